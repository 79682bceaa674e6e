"""Adds the parts of a product that is split along K: the last program to come adds them, in their order."""

from __future__ import annotations

import triton
import triton.language as tl

from raypp.ops.cuda.kernel_launch import arrives_last


@triton.jit
def sums_of_splits(totals, partial, counters, SPLITS: tl.constexpr):
    """Return sums of all splits' totals, in their order, and whether this program, the last one to come, has them.

    Shapes: totals a tuple of [n, m], each of its own shape, of program (strip, split, tile of rows).
    """
    is_last = True
    if SPLITS > 1:
        COUNT: tl.constexpr = len(totals)
        size = 0
        for i in tl.static_range(COUNT):
            size += totals[i].shape[0] * totals[i].shape[1]
        place, split = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), tl.program_id(1)
        parts = partial + place.to(tl.int64) * (SPLITS * size)
        for i in tl.static_range(COUNT):
            cell, step = _cells(totals[i])
            tl.store(parts + split * step + cell, totals[i])
            parts += SPLITS * step
        is_last = arrives_last(counters + place, SPLITS)
        parts = partial + place.to(tl.int64) * (SPLITS * size)
        sums = ()
        for i in tl.static_range(COUNT):
            cell, step = _cells(totals[i])
            total = tl.zeros_like(totals[i])
            if is_last:
                for index in tl.static_range(SPLITS):  # written out, so that the parts come at once
                    total += tl.load(parts + index * step + cell, cache_modifier=".cg")
            sums += (total,)
            parts += SPLITS * step
        totals = sums
    return totals, is_last


@triton.jit
def _cells(total):
    """Return where the elements of a total lie, and their number."""
    height: tl.constexpr = total.shape[0]
    width: tl.constexpr = total.shape[1]
    return tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :], height * width
