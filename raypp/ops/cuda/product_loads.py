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


@triton.jit
def fetch_early(rows, first, last, num_bytes, PARTS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Ask for the beginning of what a program reads of some rows of bytes, into the second-level cache.

    Before `start` the memory would be idle while the previous kernel ends. These are `num_bytes` of each row from byte
    `first` on, as long as they are before `last`, in PARTS: one for each thread, at best. All are multiples of 16, and
    `num_bytes` of 16 PARTS. Shapes: rows [n] pointers.
    """
    if OVERLAPS:
        size = num_bytes // PARTS
        begin = first + tl.arange(0, PARTS) * size
        begin = tl.maximum(tl.minimum(begin, last - size), 0)
        address = (rows[:, None] + begin[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [address, tl.zeros_like(address).to(tl.int32) + size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _stacked(above, below):
    """Return rows above others. Shapes: above, below [n, m]; result [2 n, m]."""
    pairs = tl.permute(tl.join(above, below), (2, 0, 1))
    return tl.reshape(pairs, (2 * above.shape[0], above.shape[1]))


@triton.jit
def tiled(rows, ROWS: tl.constexpr):
    """Return rows above zeros that fill a tile. Shapes: rows [n, m]; result [ROWS, m], with ROWS of n or 2 n."""
    return rows if rows.shape[0] == ROWS else _stacked(rows, tl.zeros_like(rows))
