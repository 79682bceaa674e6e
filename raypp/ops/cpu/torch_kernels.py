"""The kernel set in plain torch, for any device: the CPU's, and a GPU's in float32 or without Triton.

On a GPU its attention asks the device for lengths in every step, so a CUDA graph cannot hold it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.break_point import break_point
from raypp.ops.cpu.linear import Linear
from raypp.ops.cpu.paged_attention import paged_attention
from raypp.ops.cpu.rms_norm import RMSNorm
from raypp.ops.cpu.torch_experts import TorchExperts, silu_and_mul
from raypp.ops.kv_cache import as_cached, cache_rows, write_kv_cache
from raypp.ops.rotary import Rotation, apply_rotary, rotation
from raypp.ops.routing import Routing
from raypp.ops.weight import Weight


class TorchKernels:
    """See `raypp.ops.backend.KernelSet`.

    Args:
        dtype: Of weights and activations.
        packs_weights: Whether products may keep their weights in a form of their own, see `Linear`.
    """

    can_be_recorded = False
    library_from_tokens = 1

    def __init__(self, dtype: torch.dtype, *, packs_weights: bool = True) -> None:
        self._dtype = dtype
        self._packs_weights = packs_weights

    def in_8_bits(self) -> TorchKernels:
        """Return this set: it has no product with such weights."""
        return self

    def norm_linear(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
    ) -> NormLinear:
        """Return x -> norm(x) W^T + b."""
        return NormLinear(RMSNorm(norm_weight, eps), self.linear(weight, bias))

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm:
        """Return the norm of rows by itself."""
        return RMSNorm(weight, eps)

    def joined_norms_linear(
        self,
        embedding: torch.Tensor,
        norm_weights: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
    ) -> JoinedNormsLinear:
        """Return (token_ids, states) -> (norm(embedding[token_ids]) beside norm(states)) W^T + b."""
        token_norm, state_norm = (RMSNorm(norm_weight, eps) for norm_weight in norm_weights)
        return JoinedNormsLinear(embedding, token_norm, state_norm, self.linear(weight, bias))

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Return x -> x W^T + b."""
        return Linear(weight.dequantized(self._dtype), bias, may_pack=self._packs_weights)

    def norm_gated_linear(
        self, norm_weight: torch.Tensor, eps: float, weight: Weight, bias: torch.Tensor | None = None
    ) -> NormGatedLinear:
        """Return x -> silu(gate) * up of norm(x) W^T + b."""
        return NormGatedLinear(RMSNorm(norm_weight, eps), self.linear(weight, bias))

    def add_linear(self, weight: Weight, bias: torch.Tensor | None = None) -> AddLinear:
        """Return (x, residual) -> residual + x W^T + b."""
        return AddLinear(self.linear(weight, bias))

    def experts(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        routing: Routing,
    ) -> TorchExperts:
        """Return the sparse MLP of a layer."""
        gate_ups, downs = (
            [self.linear(Weight(matrix)) for matrix in weight.dequantized(self._dtype)] for weight in (gate_up, down)
        )
        return TorchExperts(RMSNorm(norm_weight, eps), router, gate_ups, downs, routing)

    def lm_head(
        self,
        weight: Weight,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        *,
        is_shared: bool = False,
    ) -> TorchLMHead:
        """Return x -> norm(x) W^T, or x W^T, in float32."""
        return TorchLMHead(None if norm_weight is None else RMSNorm(norm_weight, eps), self.linear(weight))

    def attention(self, heads: Heads) -> TorchAttention:
        """Return the attention of a layer with these heads."""
        return TorchAttention(heads)

    def rotation(self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float = 1.0) -> Rotation:
        """Return the step's rotation, in the precision of the activations."""
        return rotation(positions, inverse_frequencies, self._dtype, scale)

    @break_point
    def plan_attention(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Leave it to the first layer, which sees the cache."""
        batch.plan = None


class JoinedNormsLinear:
    """Tokens and states side by side, each normalized, then product."""

    def __init__(self, embedding: torch.Tensor, token_norm: RMSNorm, state_norm: RMSNorm, linear: Linear) -> None:
        self._embedding = embedding
        self._token_norm = token_norm
        self._state_norm = state_norm
        self._linear = linear

    def __call__(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return [T, N]. Shapes: token_ids [T]; states [T, H]."""
        tokens = F.embedding(token_ids, self._embedding)
        return self._linear(torch.cat((self._token_norm(tokens), self._state_norm(states)), 1))


class NormLinear:
    """Norm, then product."""

    def __init__(self, norm: RMSNorm, linear: Linear) -> None:
        self._norm = norm
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, N]. Shapes: x [T, K]."""
        return self._linear(self._norm(x))


class TorchLMHead:
    """Norm, if there is one, then product."""

    def __init__(self, norm: RMSNorm | None, linear: Linear) -> None:
        self._norm = norm
        self._linear = linear

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, [N, V] float32. Shapes: x [N, H]."""
        return self._linear.in_float32(x if self._norm is None else self._norm(x), out)


class NormGatedLinear:
    """Norm, product, gate."""

    def __init__(self, norm: RMSNorm, linear: Linear) -> None:
        self._norm = norm
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, I]. Shapes: x [T, K]."""
        return silu_and_mul(self._linear(self._norm(x)))


class AddLinear:
    """Product and sum."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return [T, H]. Shapes: x [T, K]; residual [T, H], left as it is."""
        return self._linear(x).add_(residual)


class TorchAttention:
    """Norm and rotation of the heads, KV cache, attention."""

    def __init__(self, heads: Heads) -> None:
        num_heads, num_kv_heads, norm = heads.num_heads, heads.num_kv_heads, heads.norm
        self._qkv_shape = (-1, num_heads + 2 * num_kv_heads, heads.head_dim)
        self._qk_v_split = (num_heads + num_kv_heads, num_kv_heads)
        self._head_split = (num_heads, num_kv_heads)
        self._heads = heads
        self._norm: RMSNorm | None = None
        if norm is not None:  # one weight per head: both norms are one call
            q_weight = norm.q_weight.expand(num_heads, heads.head_dim)
            k_weight = norm.k_weight.expand(num_kv_heads, heads.head_dim)
            self._norm = RMSNorm(torch.cat((q_weight, k_weight)), norm.eps)

    def __call__(
        self,
        qkv: torch.Tensor,
        by: Rotation,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output, [T, Hq * D]; see `raypp.ops.backend.Attention`."""
        q, k, v = self._make_heads(qkv, by)
        return _attend(q, k, v, kv_cache, batch, self._heads, out)

    def append(self, qkv: torch.Tensor, by: Rotation, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Only write the cache."""
        _, k, v = self._make_heads(qkv, by)
        k, v = as_cached(k, kv_cache, self._heads.k_scale), as_cached(v, kv_cache, self._heads.v_scale)
        write_kv_cache(kv_cache, k, v, *cache_rows(kv_cache, slot_mapping))

    def _make_heads(self, qkv: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys, normalized and rotated, and values, each [T, heads, D]."""
        qk, v = qkv.view(self._qkv_shape).split_with_sizes(self._qk_v_split, 1)
        if self._norm is not None:
            qk = self._norm(qk)
        q, k = apply_rotary(qk, by).split_with_sizes(self._head_split, 1)
        return q, k, v


@break_point
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: AttentionBatch,
    heads: Heads,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Return the output, [T, Hq * D]; in the first rows of `out` if that is given. Its groups depend on lengths."""
    if out is None:
        return paged_attention(q, k, v, kv_cache, batch, heads).flatten(1)
    num_tokens = batch.num_tokens
    out[:num_tokens] = paged_attention(q[:num_tokens], k, v, kv_cache, batch, heads).flatten(1)
    return out
