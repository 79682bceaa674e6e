"""The kernel set in plain torch, for any device: the CPU's, and a GPU's in float32 or without Triton.

On a GPU its attention asks the device for lengths in every step, so a CUDA graph cannot hold it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.members import Members
from raypp.ops.attention import AttentionBatch, Heads, LatentHeads, Rotation, apply_rotary, rotation, signed
from raypp.ops.backend import (
    SILU,
    AddedProjection,
    ExpertWeights,
    Gate,
    JoinedProjection,
    LMHead,
    Projection,
    Router,
    choose_experts,
)
from raypp.ops.break_point import break_point
from raypp.ops.cpu.paged_attention import paged_attention
from raypp.ops.cpu.torch_gated_delta import TorchGatedDelta
from raypp.ops.kv_cache import LayerCache, as_cached, cache_rows, write_kv_cache
from raypp.ops.row_state import DeltaHeads
from raypp.ops.weight import Weight, linear_in_float32


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
    ) -> Projection:
        norm, linear = RMSNorm(norm_weight, eps), self.linear(weight, bias)
        return lambda x: linear(norm(x))

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm:
        return RMSNorm(weight, eps)

    def joined_norms_linear(
        self,
        embedding: torch.Tensor,
        norm_weights: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
    ) -> JoinedProjection:
        token_norm, state_norm = (RMSNorm(norm_weight, eps) for norm_weight in norm_weights)
        linear = self.linear(weight, bias)

        def joined(token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            tokens = F.embedding(token_ids, embedding)
            return linear(torch.cat((token_norm(tokens), state_norm(states)), 1))

        return joined

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        return Linear(weight.dequantized(self._dtype), bias, may_pack=self._packs_weights)

    def norm_gated_linear(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
        gate: Gate = SILU,
    ) -> Projection:
        norm, linear = RMSNorm(norm_weight, eps), self.linear(weight, bias)
        if gate == SILU:
            return lambda x: silu_and_mul(linear(norm(x)))
        return lambda x: gate(*linear(norm(x)).chunk(2, -1))

    def add_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, norm: tuple[torch.Tensor, float] | None = None
    ) -> AddedProjection:
        """Return (x, residual) -> residual + x W^T + b, or its norm. The residual is left as it is."""
        linear = self.linear(weight, bias)
        if norm is None:
            return lambda x, residual: linear(x).add_(residual)
        normed = RMSNorm(*norm)
        return lambda x, residual: normed(linear(x)).add_(residual)

    def member_sum(self, members: Members) -> AddedProjection:
        """Return (x, residual) -> x, with all members' x and the residual added."""
        sum_ = members.sum_
        return lambda x, residual: sum_(x).add_(residual)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def experts(self, norm_weight: torch.Tensor, eps: float, router: Router, weights: ExpertWeights) -> TorchExperts:
        of_router = None if router.norm_weight is None else RMSNorm(router.norm_weight, eps)
        return TorchExperts(RMSNorm(norm_weight, eps), router, self.chosen_experts(weights), of_router)

    def chosen_experts(self, weights: ExpertWeights) -> TorchChosenExperts:
        gate_ups, downs = (
            [
                self.linear(Weight(matrix), None if biases is None else biases[expert])
                for expert, matrix in enumerate(weight.dequantized(self._dtype))
            ]
            for weight, biases in ((weights.gate_up, weights.gate_up_bias), (weights.down, weights.down_bias))
        )
        return TorchChosenExperts(gate_ups, downs, weights.gate, weights.first)

    def lm_head(
        self,
        weight: Weight,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        *,
        is_shared: bool = False,
    ) -> LMHead:
        linear = self.linear(weight)
        if norm_weight is None:
            return linear.in_float32
        norm = RMSNorm(norm_weight, eps)
        return lambda x, out=None: linear.in_float32(norm(x), out)

    def attention(self, heads: Heads) -> TorchAttention:
        return TorchAttention(heads)

    def latent_attention(self, latents: LatentHeads) -> TorchLatentAttention:
        return TorchLatentAttention(latents)

    def gated_delta(self, heads: DeltaHeads) -> TorchGatedDelta:
        return TorchGatedDelta(heads)

    def rotation(self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float = 1.0) -> Rotation:
        """Return the step's rotation, in the precision of the activations."""
        return rotation(positions, inverse_frequencies, self._dtype, scale)

    def rotation_of(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
        return signed(cos, sin, self._dtype)

    @break_point
    def plan_attention(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Leave it to the first layer of each kind, which sees the cache."""
        batch.plans = {}


class TorchAttention:
    """Norm and rotation of the heads, KV cache, attention."""

    def __init__(self, heads: Heads) -> None:
        num_heads, num_kv_heads, norm = heads.num_heads, heads.num_kv_heads, heads.norm
        self._qkv_shape = (-1, num_heads + 2 * num_kv_heads, heads.head_dim)
        self._qk_v_split = (num_heads + num_kv_heads, num_kv_heads)
        self._qk_v_widths = ((num_heads + num_kv_heads) * heads.head_dim, num_kv_heads * heads.value_dim)
        self._head_split = (num_heads, num_kv_heads)
        self._heads = heads
        self._norm: RMSNorm | None = None
        self._value_norm: RMSNorm | None = None
        if norm is not None and norm.has_values:
            self._value_norm = RMSNorm(torch.ones_like(norm.k_weight), norm.eps)
        if norm is not None:  # one weight per head: both norms are one call
            q_weight = norm.q_weight.expand(num_heads, heads.head_dim)
            k_weight = norm.k_weight.expand(num_kv_heads, heads.head_dim)
            self._norm = RMSNorm(torch.cat((q_weight, k_weight)), norm.eps)

    def __call__(
        self,
        qkv: torch.Tensor,
        rope: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        gates = None
        if self._heads.has_gate:
            qkv, gates = self._without_gates(qkv)
        q, k, v = self._make_heads(qkv, rope)
        out = _attend(q, k, v, cache, batch, self._heads, out)
        return out if gates is None else out.mul_(torch.sigmoid(gates))

    def append(self, qkv: torch.Tensor, rope: Rotation, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
        if self._heads.has_gate:
            qkv, _ = self._without_gates(qkv)
        _, k, v = self._make_heads(qkv, rope)
        _append(k, v, cache, slot_mapping, self._heads)

    def _without_gates(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, and the queries' gates [T, Hq * Dk]."""
        num_heads, head_dim = self._heads.num_heads, self._heads.head_dim
        width = 2 * num_heads * head_dim
        queries, gates = qkv[:, :width].unflatten(1, (num_heads, 2, head_dim)).unbind(2)
        return torch.cat((queries.flatten(1), qkv[:, width:]), 1), gates.flatten(1)

    def _make_heads(self, qkv: torch.Tensor, rope: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys, normalized and rotated, and values, each [T, heads, D]."""
        if self._heads.values_are_keys:
            qk = qkv.unflatten(1, (-1, self._heads.head_dim))
            v = qk[:, self._head_split[0] :]
        elif self._heads.value_dim == self._heads.head_dim:
            qk, v = qkv.view(self._qkv_shape).split_with_sizes(self._qk_v_split, 1)
        else:
            qk, v = qkv.split_with_sizes(self._qk_v_widths, 1)
            qk = qk.unflatten(1, (-1, self._heads.head_dim))
            v = v.unflatten(1, (-1, self._heads.value_dim))
        if self._value_norm is not None:
            v = self._value_norm(v)
        if self._norm is not None:
            qk = self._norm(qk)
        rotary_dim = self._heads.rotary_dim
        if rotary_dim is None or rotary_dim == self._heads.head_dim:
            rotated = apply_rotary(qk, rope)
        else:
            rotated = torch.cat((apply_rotary(qk[..., :rotary_dim], rope), qk[..., rotary_dim:]), -1)
        q, k = rotated.split_with_sizes(self._head_split, 1)
        return q, k, v


class TorchLatentAttention:
    """Norm of latents, rotation, cache, attention over latents: for prompts, too, whose keys are nowhere expanded."""

    def __init__(self, latents: LatentHeads) -> None:
        to_keys, to_values = latents.expand.split_with_sizes((latents.key_dim, latents.value_dim), 1)
        self._to_keys = to_keys  # [Hq, N, L]
        self._to_values = to_values.transpose(1, 2)  # [Hq, L, Dv]
        self._norm = RMSNorm(latents.norm_weight, latents.eps)
        self._latents = latents

    def __call__(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        rope: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        latents, heads = self._latents, self._latents.heads
        q, k, v = self._made(projected, rope)
        summed = None if out is None else q.new_zeros(len(q), heads.num_heads * latents.rank)
        summed = _attend(q, k, v, cache, batch, heads, summed).unflatten(1, (heads.num_heads, -1))
        attended = torch.bmm(summed.transpose(0, 1), self._to_values).transpose(0, 1).flatten(1)
        if out is None:
            return attended
        return out.copy_(attended)

    def append(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        rope: Rotation,
        cache: LayerCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        _, k, v = self._made(projected, rope)
        _append(k, v, cache, slot_mapping, self._latents.heads)

    def _made(
        self, projected: tuple[torch.Tensor, torch.Tensor], rope: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries over latents [T, Hq, L + R], keys [T, 1, L + R], values [T, 1, L]."""
        latents, heads = self._latents, self._latents.heads
        queries = projected[0].unflatten(1, (heads.num_heads, -1))
        latent, key = projected[1].split_with_sizes((latents.rank, latents.rotary_dim), 1)
        queries, query_ends = queries.split_with_sizes((latents.key_dim, latents.rotary_dim), 2)
        rotating = torch.cat((query_ends, key.unsqueeze(1)), 1)
        if latents.has_neighbours:
            rotated = apply_rotary(rotating.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2), rope)
            rotated = rotated.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
        else:
            rotated = apply_rotary(rotating, rope)
        q = torch.cat((torch.bmm(queries.transpose(0, 1), self._to_keys).transpose(0, 1), rotated[:, :-1]), 2)
        return q, rotated[:, -1:], self._norm(latent).unsqueeze(1)


def _append(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor, heads: Heads) -> None:
    k, v = as_cached(k, cache.keys, heads.k_scale), as_cached(v, cache.values, heads.v_scale)
    write_kv_cache(cache, k, v, cache_rows(cache, slot_mapping))


@break_point
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    heads: Heads,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Return the output, [T, Hq * Dv]; in the first rows of `out` if that is given. Its groups depend on lengths."""
    if out is None:
        return paged_attention(q, k, v, cache, batch, heads).flatten(1)
    num_tokens = batch.num_tokens
    out[:num_tokens] = paged_attention(q[:num_tokens], k, v, cache, batch, heads).flatten(1)
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. Shapes: gate_up [T, 2 * I], the gate first; returns [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


class TorchExperts:
    """The sparse MLP: see `TorchChosenExperts`.

    Args:
        norm: Of the tokens.
        router: Chooses them.
        products: Of the experts.
        norm_of_router: Of the tokens, for the router; None: the same.
    """

    def __init__(
        self, norm: RMSNorm, router: Router, products: TorchChosenExperts, norm_of_router: RMSNorm | None = None
    ) -> None:
        self._norm = norm
        self._norm_of_router = norm_of_router
        self._router = router
        self._products = products

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `raypp.ops.backend.Experts`. Both are left as they are."""
        normed, router = self._norm(hidden), self._router
        dtype = torch.float32 if router.routing.has_sigmoid else normed.dtype  # scores that are alike are many there
        bias = None if router.bias is None else router.bias.to(dtype)
        seen = normed if self._norm_of_router is None else self._norm_of_router(hidden)
        logits = F.linear(seen.to(dtype), router.weight.to(dtype), bias)
        experts, weights = choose_experts(logits, router.routing, router.correction, router.expert_scales)
        return self._products(normed, experts, weights).add_(hidden if residual is None else residual)


class TorchChosenExperts:
    """The experts one after the other: each reads its weights once, for all of its tokens.

    They ask the device for the number of each expert's tokens, so a CUDA graph cannot hold them.

    Args:
        gate_up: [2 I, H] of each expert, the gate first.
        down: [H, I] of each expert.
        gate: Between them.
        first: The number of the first expert; those that are not here add nothing.
    """

    def __init__(self, gate_up: list[Linear], down: list[Linear], gate: Gate, first: int) -> None:
        self._gate_up = gate_up
        self._down = down
        self._gate = gate
        self._first = first

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._sum(x, experts, weights, out)
        return out

    @break_point
    def _sum(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum to `out`. How often each expert is chosen decides what is launched."""
        if not len(x):
            return
        num_tokens, num_chosen = experts.shape
        own, num_own = experts.flatten() - self._first, len(self._down)
        own = torch.where((own >= 0) & (own < num_own), own, num_own)  # others come last
        counts = torch.bincount(own, minlength=num_own)[:num_own].tolist()
        by_expert = own.argsort(stable=True)[: sum(counts)]
        rows = x.index_select(0, by_expert // num_chosen)
        y = _each(self._down, self._gate(*_each(self._gate_up, rows, counts).chunk(2, -1)), counts)
        of_pairs = y.new_zeros(len(own), y.shape[1]).index_copy_(0, by_expert, y).view(num_tokens, num_chosen, -1)
        out.copy_((of_pairs * weights.unsqueeze(2)).sum(1))


def _each(linears: list[Linear], x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return the outputs of linear layers, each of its own rows. Shapes: x [sum of counts, K]; returns [.., N]."""
    parts = zip(linears, x.split(counts), strict=True)
    some = [linear(rows) for linear, rows in parts if len(rows)]
    return torch.cat(some) if some else linears[0](x)


class RMSNorm:
    """Scales vectors to a root mean square of one, then by a learned weight (RMSNorm, arXiv:1910.07467).

    Shapes: weight [..., n]. Leading dimensions give each head its own weight: the queries' and keys' norms of a layer
    are one call on [T, heads, n].
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight
        self._eps = eps
        self._size = (size,)
        # x / sqrt(sum(x^2) / n + eps) = sqrt(n) * x / hypot(|x|, sqrt(n * eps)): in float32 on a CPU half the time of
        # the composite `F.rms_norm`, and as exact; a decode step of four layers has thirteen norms.
        self._is_fast = weight.dtype == torch.float32 and not weight.is_cuda
        self._scaled_weight = weight * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=weight.dtype, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized vectors, shaped like x [..., n] and of its dtype."""
        if self._is_fast and x.dtype == torch.float32:
            length = torch.linalg.vector_norm(x, 2, -1, True).hypot_(self._floor)
            return torch.div(x, length).mul_(self._scaled_weight)
        return F.rms_norm(x, self._size, None, self._eps).mul_(self.weight)


class Linear:
    """y = x W^T + b, with the weight in oneDNN's blocked form where the CPU has that.

    Packed once at load, it is read from memory at twice the rate, and from two rows on products are 2 to 5 times as
    fast: docs/design/0002-cpu-attention.md.

    Args:
        weight: [N, K]; not kept where a packed copy takes its place.
        bias: [N] or None.
        may_pack: Whether the weight may be kept in another form than torch's own.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, may_pack: bool = True) -> None:
        self._is_packed = may_pack and _can_pack(weight)
        self._weight: torch.Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self._is_packed else weight
        )
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return y [T, N]. Shapes: x [T, K], of the weight's dtype."""
        if not self._is_packed:
            return F.linear(x, self._weight, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return y

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return y in float32, without a bias; see `linear_in_float32`."""
        if not self._is_packed:
            return linear_in_float32(x, self._weight, out)
        y = self(x).to(torch.float32)
        return y if out is None else out.copy_(y)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.is_cuda or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
