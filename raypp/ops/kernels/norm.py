"""RMSNorm of rows in one launch. Twin: `raypp.ops.reference.rms_norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.kernels.launch import Device, start


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, device: Device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return x normalized, [T, H], as `dtype`, else x's. Computed in float32.

    Shapes: x [T, H] contiguous; weight [H], None for ones.
    """
    y = torch.empty_like(x, dtype=dtype)
    num_tokens, size = x.shape
    if not num_tokens:
        return y
    block = triton.next_power_of_2(size)
    _rms_norm[(num_tokens,)](
        x,
        x if weight is None else weight,
        y,
        eps,
        size,
        BLOCK=block,
        HAS_WEIGHT=weight is not None,
        OVERLAPS=device.has_dependent_launch,
        num_warps=min(16, max(1, block // 512)),
        **device.launch_options,
    )
    return y


@triton.jit
def _rms_norm(x, weight, y, eps, size, BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr, OVERLAPS: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < size
    cell = tl.program_id(0).to(tl.int64) * size + column
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    start(OVERLAPS)
    value = tl.load(x + cell, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    if HAS_WEIGHT:
        value *= factor
    tl.store(y + cell, value.to(y.dtype.element_ty), mask=inside)
