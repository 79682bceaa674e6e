"""RMSNorm of rows in one launch, also of two kinds of rows side by side. Twin: `raypp.ops.reference.rms_norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.kernels.half import within_float16
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


def join_norms(
    embedding: torch.Tensor,
    token_ids: torch.Tensor,
    token_weight: torch.Tensor,
    states: torch.Tensor,
    state_weight: torch.Tensor,
    eps: float,
    device: Device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return norm(embedding[token_ids]) beside norm(states), [T, 2 H], as `dtype` (float16), else the states'.

    Shapes: embedding [V, H]; token_ids [T]; states [T, H] contiguous; weights [H].
    """
    num_tokens, size = states.shape
    y = torch.empty(num_tokens, 2 * size, dtype=dtype or states.dtype, device=states.device)
    if not num_tokens:
        return y
    block = triton.next_power_of_2(size)
    _join_norms[(num_tokens, 2)](
        embedding,
        token_ids,
        token_weight,
        states,
        state_weight,
        y,
        eps,
        size,
        BLOCK=block,
        CLAMPS=y.dtype != states.dtype,
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


@triton.jit(do_not_specialize_on_alignment=["token_ids"])  # an element per program
def _join_norms(
    embedding,
    token_ids,
    token_weight,
    states,
    state_weight,
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
    weight = token_weight
    if side == 1:
        weight = state_weight
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    start(OVERLAPS)
    source = states + token * size
    if side == 0:
        source = embedding + tl.load(token_ids + token).to(tl.int64) * size
    value = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / size + eps) * factor
    if CLAMPS:
        tl.store(y + (2 * token + side) * size + column, within_float16(value), mask=inside)
    else:
        tl.store(y + (2 * token + side) * size + column, value.to(y.dtype.element_ty), mask=inside)
