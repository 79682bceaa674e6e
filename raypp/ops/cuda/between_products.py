"""Kernels between a layer's products: norms, the gate of an MLP, conversion to fewer bits. One launch each.

Twins: `raypp.ops.cuda.cuda_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from raypp.ops.backend import Gate
from raypp.ops.cuda.kernel_launch import Device, start

_BLOCK = 1024  # elements of a program that takes rows in pieces


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


def silu_and_mul(gate_up: torch.Tensor, device: Device) -> torch.Tensor:
    """Return silu(gate) * up, [T, I]. Shapes: gate_up [T, 2 * I] contiguous, the gate first. Computed in float32."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _silu_and_mul[(num_tokens, triton.cdiv(size, _BLOCK))](
            gate_up,
            y,
            size,
            BLOCK=_BLOCK,
            OVERLAPS=device.has_dependent_launch,
            num_warps=4,
            **device.launch_options,
        )
    return y


def narrow(x: torch.Tensor, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Return x as float16 or in 8 bits, as `narrowed` does. Shapes: x contiguous."""
    y = torch.empty_like(x, dtype=dtype)
    num_elements = x.numel()
    if num_elements:
        _narrow[(triton.cdiv(num_elements, _BLOCK),)](
            x,
            y,
            num_elements,
            BLOCK=_BLOCK,
            OVERLAPS=device.has_dependent_launch,
            **device.launch_options,
        )
    return y


def constants_of(gate: Gate) -> dict[str, float]:
    """Return what kernels are compiled for, of a gate; a limit of 0 is none."""
    return {"ALPHA": gate.alpha, "LIMIT": gate.limit or 0.0, "OFFSET": gate.offset, "CUBIC": gate.cubic}


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
def narrowed(value, dtype: tl.constexpr):
    """Return float32 as float16 or in 8 bits. What is beyond the range is set to its end; NaN stays NaN."""
    tl.static_assert(dtype == tl.float16 or dtype == tl.float8e5 or dtype == tl.float8e4nv, "nothing to be cut for")
    largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 57344.0 if dtype == tl.float8e5 else 448.0
    return tl.clamp(value, -largest, largest, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def as_stored(value, y, CLAMPS: tl.constexpr):
    """Return float32 as y's type. CLAMPS says that its range is smaller than that of the model's type."""
    return narrowed(value, y.dtype.element_ty) if CLAMPS else value.to(y.dtype.element_ty)


@triton.jit
def _narrow(x, y, num_elements, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    start(OVERLAPS)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < num_elements
    value = tl.load(x + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + element, narrowed(value, y.dtype.element_ty), mask=inside)


@triton.jit
def silu(x):
    """Return x * sigmoid(x), float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, CUBIC: tl.constexpr):
    """Do what `raypp.ops.backend.Gate` does, in float32."""
    if LIMIT > 0:
        gate, up = tl.minimum(gate, LIMIT), tl.clamp(up, -LIMIT, LIMIT)
    if ALPHA == 1.0 and OFFSET == 0.0 and CUBIC == 0.0:
        result = silu(gate) * up
    elif CUBIC == 0.0:
        result = (up + OFFSET) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        result = (up + OFFSET) * (gate / (1.0 + tl.exp(-ALPHA * (gate + CUBIC * gate * gate * gate))))
    return result


@triton.jit
def _silu_and_mul(gate_up, y, size, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    start(OVERLAPS)
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + column, (silu(gate) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _normalized(row, column, inside, size, eps):
    """Return a row divided by its root mean square, float32."""
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
