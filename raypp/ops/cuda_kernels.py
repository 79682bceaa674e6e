"""The kernels of an NVIDIA GPU: own Triton kernels where fusion pays, FlashInfer for prefill, cuBLAS for many rows."""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops import reference
from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.backend import AddedProjection, DecodeKernel, Projection
from raypp.ops.cuda_attention import CudaAttention
from raypp.ops.kernels.choose import MAX_ROWS, MAX_ROWS_IN_8_BITS, OwnProduct, own_product
from raypp.ops.kernels.gate import silu_and_mul
from raypp.ops.kernels.heads import rotation_table
from raypp.ops.kernels.launch import Device
from raypp.ops.kernels.norm import join_norms, rms_norm
from raypp.ops.kernels.projection import Weights, fold_norm, partial_floats, project, quantize
from raypp.ops.kernels.workspace import Workspace
from raypp.ops.rotary import Rotation


class CudaKernels:
    """See `raypp.ops.backend.KernelSet`.

    Args:
        device: A CUDA device.
        dtype: bfloat16 or float16.
        block_size: Of the KV cache.
        max_rows: The most decode rows of a step.
        max_query_len: The most query tokens of a decode row, 1 + K.
        num_ring_entries: Steps whose attention may be planned at a time.
        decode: Which kernel attends decode rows.
    """

    name = "cuda"
    can_be_recorded = True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        block_size: int,
        max_rows: int,
        max_query_len: int,
        num_ring_entries: int,
        decode: DecodeKernel = "triton",
    ) -> None:
        self._device = Device.of(device)
        self._dtype = dtype
        self._workspace = Workspace(device)
        self._block_size = block_size
        self._max_rows = max_rows
        self._max_query_len = max_query_len
        self._num_ring_entries = num_ring_entries
        self._decode: DecodeKernel = decode
        self._attention: list[CudaAttention] = []  # that of all layers, once there is one; copies share it
        self._most_own_rows = 0
        self._has_8_bits = False

    def in_8_bits(self) -> CudaKernels:
        """Return a set whose own kernels read weights of 8 bits."""
        kernels = copy(self)
        kernels._has_8_bits = True
        return kernels

    @property
    def library_from_tokens(self) -> int:
        """One more than the most rows that own kernels multiply."""
        return 1 + self._most_own_rows

    def norm_linear(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        is_shared: bool = False,
    ) -> Projection:
        """Return x -> norm(x) W^T + b."""
        if is_shared:
            return SeparateNorm(self.norm(norm_weight, eps), self._projection(Weights(weight, bias)))
        fold_norm(weight, norm_weight)
        return self._projection(Weights(weight, bias, eps))

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        """Return the norm of rows by itself."""
        return Norm(weight, eps, self._device)

    def joined_norms(
        self, embedding: torch.Tensor, token_weight: torch.Tensor, state_weight: torch.Tensor, eps: float
    ) -> JoinedNorms:
        """Return (token_ids, states) -> norm(embedding[token_ids]) beside norm(states)."""
        most_half_rows = MAX_ROWS_IN_8_BITS if self._has_8_bits and self._dtype == torch.bfloat16 else 0
        return JoinedNorms(embedding, token_weight, state_weight, eps, self._device, most_half_rows)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
        """Return x -> x W^T + b."""
        return self._projection(Weights(weight, bias))

    def norm_gated_linear(
        self, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Projection:
        """Return x -> silu(gate) * up of norm(x) W^T + b."""
        fold_norm(weight, norm_weight)
        return self._projection(Weights(weight, bias, eps, is_gated=True))

    def add_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> AddedProjection:
        """Return (x, residual) -> residual + x W^T + b."""
        return self._projection(Weights(weight, bias)).add

    def attention(self, heads: Heads) -> LayerAttention:
        """Return the attention of a layer with these heads."""
        if not self._attention:
            attention = CudaAttention(
                heads,
                block_size=self._block_size,
                dtype=self._dtype,
                max_rows=self._max_rows,
                max_query_len=self._max_query_len,
                num_ring_entries=self._num_ring_entries,
                device=self._device,
                workspace=self._workspace,
                decode=self._decode,
            )
            self._attention.append(attention)
        return LayerAttention(self._attention[0], heads)

    def rotation(self, positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> Rotation:
        """Return the step's rotation, float32."""
        return rotation_table(positions, inverse_frequencies, self._device)

    def plan_attention(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Plan the prefill rows."""
        assert self._attention, "no layer has been made"
        self._attention[0].plan(batch, ring_entry)

    def _projection(self, weights: Weights) -> CudaProjection:
        in_8_bits = quantize(weights) if self._has_8_bits else None
        projection = CudaProjection(weights, self._device, self._workspace, in_8_bits)
        self._most_own_rows = max(self._most_own_rows, projection.most_own_rows)
        return projection


class LayerAttention:
    """One layer's part of the attention that all share."""

    def __init__(self, attention: CudaAttention, heads: Heads) -> None:
        self._attention = attention
        self._heads = heads

    def __call__(
        self,
        qkv: torch.Tensor,
        by: Rotation,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output, [T, Hq * D]; see `raypp.ops.backend.Attention`."""
        return self._attention.run(qkv, self._heads, by, kv_cache, batch, out)

    def append(self, qkv: torch.Tensor, by: Rotation, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Only write the cache."""
        self._attention.append(qkv, self._heads, by, kv_cache, slot_mapping)


class Norm:
    """A norm by itself."""

    def __init__(self, weight: torch.Tensor, eps: float, device: Device) -> None:
        self._weight = weight
        self._eps = eps
        self._device = device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, K]. Shapes: x [T, K] contiguous."""
        return rms_norm(x, self._weight, self._eps, self._device)


class JoinedNorms:
    """Tokens and states side by side, each normalized; up to some rows as float16, for a product in 8 bits."""

    def __init__(
        self,
        embedding: torch.Tensor,
        token_weight: torch.Tensor,
        state_weight: torch.Tensor,
        eps: float,
        device: Device,
        most_half_rows: int,
    ) -> None:
        self._embedding = embedding
        self._token_weight = token_weight
        self._state_weight = state_weight
        self._eps = eps
        self._device = device
        self._most_half_rows = most_half_rows

    def __call__(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return [T, 2 H]. Shapes: states [T, H] contiguous."""
        dtype = torch.float16 if len(states) <= self._most_half_rows else states.dtype
        return join_norms(
            self._embedding,
            token_ids,
            self._token_weight,
            states,
            self._state_weight,
            self._eps,
            self._device,
            dtype,
        )


class SeparateNorm:
    """A norm before a product whose weight others use too, so that the norm's own cannot be folded into it."""

    def __init__(self, norm: Norm, projection: Projection) -> None:
        self._norm = norm
        self._projection = projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, N]. Shapes: x [T, K] contiguous."""
        return self._projection(self._norm(x))


class CudaProjection:
    """A product with what goes before and after, by own kernels or the library, as its rows are few or many.

    While a compiler looks, it is the library's product with plain torch around: there is nothing to fuse in kernels.

    Args:
        weights: Of the product.
        device: Where it runs.
        workspace: For products that are split.
        in_8_bits: The same for own kernels to read; None: `weights`.
    """

    def __init__(
        self, weights: Weights, device: Device, workspace: Workspace, in_8_bits: Weights | None = None
    ) -> None:
        self._weights = weights
        self._device = device
        self._workspace = workspace
        self._own: dict[int, OwnProduct] = {}
        for num_rows in range(1, MAX_ROWS + 1):
            own = own_product(num_rows, in_8_bits or weights, device) or own_product(num_rows, weights, device)
            if own is not None:
                self._own[num_rows] = own
                workspace.reserve(partial_floats(num_rows, own.weights, own.tuning))

    @property
    def most_own_rows(self) -> int:
        """The most rows for which an own kernel is chosen; 0 if the library takes all."""
        return max(self._own, default=0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return norm(x) W^T + b, or its gate, [T, N]. Shapes: x [T, K] contiguous."""
        if torch.compiler.is_compiling():
            return self._plain(x)
        weights, own, dtype = self._weights, self._own.get(len(x)), self._weights.weight.dtype
        in_8_bits = own is not None and own.weights.scale is not None and dtype == torch.bfloat16
        if weights.norm_eps is not None and (own is None or own.weights.norm_eps is None):
            x = rms_norm(x, None, weights.norm_eps, self._device, torch.float16 if in_8_bits else dtype)
        if own is not None:
            # What comes behind a gate has as many rows, and is in 8 bits as well.
            result = torch.float16 if in_8_bits and weights.is_gated else dtype
            return project(x, own.weights, None, own.tuning, self._device, self._workspace, result)
        y = F.linear(x.to(dtype), weights.weight, weights.bias)
        return silu_and_mul(y, self._device) if weights.is_gated else y

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b, [T, N]. Shapes: x [T, K] contiguous; residual [T, N], may be overwritten."""
        weights = self._weights
        if torch.compiler.is_compiling():
            return residual + F.linear(x, weights.weight, weights.bias)
        own = self._own.get(len(x))
        if own is not None:
            return project(x, own.weights, residual, own.tuning, self._device, self._workspace, residual.dtype)
        # The library adds in the product's own kernel.
        residual = residual.addmm_(x.to(residual.dtype), weights.weight.t())
        return residual if weights.bias is None else residual.add_(weights.bias)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        if weights.norm_eps is not None:
            x = reference.rms_norm(x, None, weights.norm_eps)
        y = F.linear(x, weights.weight, weights.bias)
        return reference.silu_and_mul(y) if weights.is_gated else y
