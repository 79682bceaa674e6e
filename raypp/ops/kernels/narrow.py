"""Numbers that are handed on in fewer bits, or a smaller range, than a model's own type has."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.kernels.launch import Device, start

_BLOCK = 1024


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


@triton.jit
def narrowed(value, dtype: tl.constexpr):
    """Return float32 as float16 or in 8 bits; beyond the range it becomes its end, and what is no number stays none."""
    tl.static_assert(dtype == tl.float16 or dtype == tl.float8e5 or dtype == tl.float8e4nv, "nothing to be cut for")
    largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 57344.0 if dtype == tl.float8e5 else 448.0
    return tl.clamp(value, -largest, largest, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def as_stored(value, y, CLAMPS: tl.constexpr):
    """Return float32 as the type of what it is stored to; CLAMPS: its range is smaller than the model's type's."""
    return narrowed(value, y.dtype.element_ty) if CLAMPS else value.to(y.dtype.element_ty)


@triton.jit
def _narrow(x, y, num_elements, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    start(OVERLAPS)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < num_elements
    value = tl.load(x + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + element, narrowed(value, y.dtype.element_ty), mask=inside)
