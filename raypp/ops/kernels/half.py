"""Numbers that are handed on as float16 where a model's own type has a wider range."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def within_float16(value):
    """Return float32 as float16; what is beyond the range becomes its end, and what is no number stays none."""
    return tl.clamp(value, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
