"""Numbers that are handed on as float16 where a model's own type has a wider range."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def within_float16(value):
    """Return float32 as float16; what is beyond the range becomes its end, and what is no number stays none."""
    return tl.clamp(value, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def as_stored(value, y, CLAMPS: tl.constexpr):
    """Return float32 as the type of what it is stored to; CLAMPS: that is float16 for another type."""
    return within_float16(value) if CLAMPS else value.to(y.dtype.element_ty)
