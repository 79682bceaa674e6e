"""RMSNorm of rows in one launch. Twin: `raypp.ops.reference.rms_norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.kernels.launch import Device, start


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, device: Device) -> torch.Tensor:
    """Return x normalized, [T, H]. Shapes: x [T, H] contiguous; weight [H], None for ones. Computed in float32."""
    y = torch.empty_like(x)
    _launch(x, x, weight, y, eps, device, adds=False)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, device: Device
) -> torch.Tensor:
    """Add x to the residual stream, in place, and return that normalized, [T, H].

    Shapes: x, residual [T, H] contiguous; weight [H]. The sum is rounded before it is normalized, as the next layer
    finds it.
    """
    y = torch.empty_like(x)
    _launch(x, residual, weight, y, eps, device, adds=True)
    return y


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    y: torch.Tensor,
    eps: float,
    device: Device,
    *,
    adds: bool,
) -> None:
    num_tokens, size = x.shape
    if not num_tokens:
        return
    block = triton.next_power_of_2(size)
    _rms_norm[(num_tokens,)](
        x,
        residual,
        x if weight is None else weight,
        y,
        eps,
        size,
        BLOCK=block,
        HAS_WEIGHT=weight is not None,
        ADDS=adds,
        OVERLAPS=device.has_dependent_launch,
        num_warps=min(16, max(1, block // 512)),
        **device.launch_options,
    )


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    y,
    eps,
    size,
    BLOCK: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < size
    cell = tl.program_id(0).to(tl.int64) * size + column
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    start(OVERLAPS)
    value = tl.load(x + cell, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + cell, mask=inside, other=0.0).to(tl.float32)
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + cell, total, mask=inside)
        value = total.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    if HAS_WEIGHT:
        value *= factor
    tl.store(y + cell, value.to(y.dtype.element_ty), mask=inside)
