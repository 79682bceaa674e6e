"""Loads of the kernels of products: pieces of weights and vectors, which may end within a piece."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(pointer, inside, IS_EVEN: tl.constexpr):
    """Return what lies inside, 0 elsewhere. Without a mask where all pieces are whole."""
    if IS_EVEN:
        return tl.load(pointer)
    return tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def load_vector(vector, index, size, IS_THERE: tl.constexpr):
    """Return elements of a vector, float32; zeros where there is none."""
    if IS_THERE:
        return tl.load(vector + index, mask=index < size, other=0.0).to(tl.float32)
    return tl.zeros(index.shape, tl.float32)


@triton.jit
def load_scale(scale, index, size, IS_THERE: tl.constexpr):
    """Return what outputs of a weight in 8 bits are multiplied by, float32; ones for other weights."""
    if IS_THERE:
        return tl.load(scale + index, mask=index < size, other=0.0)
    return tl.full(index.shape, 1.0, tl.float32)
