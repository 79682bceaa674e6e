"""RMSNorm of rows in one launch, also of two kinds of rows side by side. Twin: `plain_torch.rms_norm`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from raypp.ops.kernels.launch import Device, start
from raypp.ops.kernels.narrow import as_stored


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
    _rms_norm[(num_tokens,)](
        x,
        x if weight is None else weight,
        y,
        eps,
        size,
        HAS_WEIGHT=weight is not None,
        CLAMPS=y.dtype != x.dtype,
        **_of_rows(size, device),
    )
    return y


def join_norms(
    embedding: torch.Tensor,
    token_ids: torch.Tensor,
    states: torch.Tensor,
    eps: float,
    device: Device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return embedding[token_ids] beside states, each normalized, [T, 2 H], as `dtype`, else the states'.

    Shapes: embedding [V, H]; token_ids [T]; states [T, H] contiguous. The norms have no weights.
    """
    num_tokens, size = states.shape
    y = torch.empty(num_tokens, 2 * size, dtype=dtype or states.dtype, device=states.device)
    if not num_tokens:
        return y
    _join_norms[(num_tokens, 2)](
        embedding,
        token_ids,
        states,
        y,
        eps,
        size,
        CLAMPS=y.dtype != states.dtype,
        **_of_rows(size, device),
    )
    return y


def _of_rows(size: int, device: Device) -> dict[str, Any]:
    """Return the options of a launch with a program per row."""
    block = triton.next_power_of_2(size)
    return {
        "BLOCK": block,
        "OVERLAPS": device.has_dependent_launch,
        "num_warps": min(16, max(1, block // 512)),
        **device.launch_options,
    }


@triton.jit
def _normalized(row, column, inside, size, eps):
    """Return a row, float32, over its root mean square."""
    value = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    return value * tl.rsqrt(tl.sum(value * value, 0) / size + eps)


@triton.jit
def _rms_norm(
    x,
    weight,
    y,
    eps,
    size,
    BLOCK: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CLAMPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < size
    row = tl.program_id(0).to(tl.int64) * size
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    start(OVERLAPS)
    value = _normalized(x + row, column, inside, size, eps)
    if HAS_WEIGHT:
        value *= factor
    tl.store(y + row + column, as_stored(value, y, CLAMPS), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["token_ids"])  # an element per program
def _join_norms(
    embedding,
    token_ids,
    states,
    y,
    eps,
    size,
    BLOCK: tl.constexpr,
    CLAMPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    start(OVERLAPS)
    source = states + token * size
    if side == 0:
        source = embedding + tl.load(token_ids + token).to(tl.int64) * size
    value = _normalized(source, column, inside, size, eps)
    tl.store(y + (2 * token + side) * size + column, as_stored(value, y, CLAMPS), mask=inside)
