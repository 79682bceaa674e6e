"""The kernels of an NVIDIA GPU: own Triton kernels where fusion pays, FlashInfer for prefill, cuBLAS for many rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.cuda_attention import CudaAttention
from raypp.ops.kernels.gate import silu_and_mul
from raypp.ops.kernels.heads import rotation_table
from raypp.ops.kernels.launch import Device
from raypp.ops.kernels.norm import rms_norm
from raypp.ops.kernels.workspace import Workspace
from raypp.ops.rotary import Rotation
from raypp.ops.sampling import sample, sample_greedy


class CudaKernels:
    """See `raypp.ops.backend.KernelSet`.

    Args:
        device: A CUDA device.
        dtype: bfloat16 or float16.
        block_size: Of the KV cache.
        max_rows: The most decode rows of a step.
        max_query_len: The most query tokens of a decode row, 1 + K.
        num_ring_entries: Steps whose attention may be planned at a time.
    """

    name = "cuda"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        block_size: int,
        max_rows: int,
        max_query_len: int,
        num_ring_entries: int,
    ) -> None:
        self._device = Device.of(device)
        self._dtype = dtype
        self._workspace = Workspace(device)
        self._block_size = block_size
        self._max_rows = max_rows
        self._max_query_len = max_query_len
        self._num_ring_entries = num_ring_entries
        self._attention: CudaAttention | None = None

    def norm_linear(
        self, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> NormLinear:
        """Return x -> norm(x) W^T + b."""
        return NormLinear(norm_weight, eps, weight, bias, self._device)

    def norm_gated_linear(
        self, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> NormGatedLinear:
        """Return x -> silu(gate) * up of norm(x) W^T + b."""
        return NormGatedLinear(norm_weight, eps, weight, bias, self._device)

    def add_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> AddLinear:
        """Return (x, residual) -> residual + x W^T + b."""
        return AddLinear(weight, bias)

    def attention(self, heads: Heads) -> LayerAttention:
        """Return the attention of a layer with these heads."""
        if self._attention is None:
            self._attention = CudaAttention(
                heads,
                block_size=self._block_size,
                dtype=self._dtype,
                max_rows=self._max_rows,
                max_query_len=self._max_query_len,
                num_ring_entries=self._num_ring_entries,
                device=self._device,
                workspace=self._workspace,
            )
        return LayerAttention(self._attention, heads)

    def rotation(self, positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> Rotation:
        """Return the step's rotation, float32."""
        return rotation_table(positions, inverse_frequencies, self._device)

    def plan_attention(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Plan the prefill rows."""
        assert self._attention is not None, "no layer has been made"
        self._attention.plan(batch, ring_entry)

    def sample_greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each row's most likely token."""
        return sample_greedy(logits)

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return a draw per row."""
        return sample(logits, temperature, seeds, positions)


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


class NormLinear:
    """Norm, then product."""

    def __init__(
        self, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None, device: Device
    ) -> None:
        self._norm_weight = norm_weight
        self._eps = eps
        self._weight = weight
        self._bias = bias
        self._device = device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, N]. Shapes: x [T, K]."""
        return F.linear(rms_norm(x, self._norm_weight, self._eps, self._device), self._weight, self._bias)


class NormGatedLinear:
    """Norm, product, gate."""

    def __init__(
        self, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None, device: Device
    ) -> None:
        self._linear = NormLinear(norm_weight, eps, weight, bias, device)
        self._device = device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, I]. Shapes: x [T, K]."""
        return silu_and_mul(self._linear(x), self._device)


class AddLinear:
    """Product and sum; the sum is part of the product's kernel."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight_t = weight.t()
        self._bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the residual stream, which is overwritten, [T, H]. Shapes: x [T, K]; residual [T, H]."""
        residual = residual.addmm_(x, self._weight_t)
        return residual if self._bias is None else residual.add_(self._bias)
