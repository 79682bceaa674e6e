"""The kernel of products in 8 bits whose programs round x themselves; see `raypp.ops.cuda.projection`.

A program reads x in 16 bits, a piece at a time as it reads the weight, and gives each row of the piece a scale by its
largest element, as `raypp.ops.cuda.token_quantization` does in a launch of its own. Scales are relative, so that a norm
before it takes nothing but its weight: the row's factor 1 / rms(x) is applied to the sums, and the squares of x are
summed beside them. A split of K has the squares of its part, which are added like its sums. Where x has 8 rows at most,
only they are rounded; the tile that tensor cores take is filled up with zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from raypp.ops.cuda.between_products import as_stored, silu
from raypp.ops.cuda.kernel_launch import start
from raypp.ops.cuda.product_loads import fetch_early, load, load_scale, load_vector, tiled
from raypp.ops.cuda.split_sums import sums_of_splits
from raypp.ops.cuda.token_quantization import in_8_bits


@triton.jit
def _rounded(value, by_input, squares, HAS_NORM: tl.constexpr, ROWS: tl.constexpr):
    """Return a piece of x, times the norm's weight, in 8 bits, its rows' scales, and the sums of squares with its own.

    Shapes: value, by_input [n, INPUTS] with ROWS or half as many rows; results [ROWS, INPUTS], [1, ROWS].
    """
    value = value.to(tl.float32)
    if HAS_NORM:
        squares += value * value
        value *= by_input.to(tl.float32)
    codes, by_row = in_8_bits(value, 1)
    return tiled(codes, ROWS), tl.trans(tiled(by_row[:, None], ROWS)), squares


@triton.jit(do_not_specialize=["num_rows", "num_ahead"])  # one kernel for all that fit a tile
def project_rounding(
    x,
    eps,
    norm_weight,
    weight,
    weight_scale,
    bias,
    residual,
    y,
    num_outputs,
    num_inputs,
    partial,
    counters,
    num_rows,
    num_ahead,
    HAS_NORM: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CLAMPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    ROWS: tl.constexpr,
    X_ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    strip, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    output = strip * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    # Past the end, outputs are computed again, and not stored. Rows are not even read: many programs read x.
    real = tl.minimum(output, num_outputs - 1)
    cell = real.to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_offset = num_outputs.to(tl.int64) * num_inputs
    x_row = tl.arange(0, X_ROWS)
    x_cell = x_row.to(tl.int64)[:, None] * num_inputs + column[None, :]
    is_row = (x_row < num_rows)[:, None]
    split_inputs = tl.cdiv(tl.cdiv(num_inputs, INPUTS), SPLITS) * INPUTS
    first = split * split_inputs
    last = tl.minimum(first + split_inputs, num_inputs)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up_total = total
    squares = tl.zeros((X_ROWS, INPUTS), tl.float32)
    inside = (first + column < last)[None, :]
    first_piece = load(weight + cell + first, inside, IS_EVEN)
    first_up_piece = first_piece
    if HAS_GATE:
        first_up_piece = load(weight + up_offset + cell + first, inside, IS_EVEN)
    if num_ahead > 0:
        early = real.to(tl.int64) * num_inputs
        fetch_early(weight + early, first, last, num_ahead, 4, OVERLAPS)
        if HAS_GATE:
            fetch_early(weight + up_offset + early, first, last, num_ahead, 4, OVERLAPS)
    addend = load_vector(bias, output, num_outputs, HAS_BIAS)
    up_addend = addend
    factor = load_scale(weight_scale, output, num_outputs, not HAS_BLOCKS)
    up_factor = factor
    if HAS_GATE:
        up_addend = load_vector(bias, num_outputs + output, 2 * num_outputs, HAS_BIAS)
        up_factor = load_scale(weight_scale, num_outputs + output, 2 * num_outputs, not HAS_BLOCKS)
    # Scales and the norm's weight are asked for one piece ahead: unlike the pieces, nobody else would.
    first_by_input = column
    by_input = first_by_input
    if HAS_NORM:  # one for each row, in the threads that hold the row
        norm_cell = norm_weight + column[None, :] + tl.zeros_like(x_row)[:, None]
        first_by_input = load(norm_cell + first, inside, IS_EVEN)
        by_input = load(norm_cell + first + INPUTS, (first + INPUTS + column < last)[None, :], False)
    if HAS_BLOCKS:
        num_blocks = tl.cdiv(num_inputs, BLOCK_COLUMNS)
        scales = weight_scale + real // BLOCK_ROWS * num_blocks
        up_scales = weight_scale + (num_outputs + real) // BLOCK_ROWS * num_blocks
        last_block = num_blocks - 1
        block = tl.minimum(first // BLOCK_COLUMNS, last_block)
        next_block = tl.minimum((first + INPUTS) // BLOCK_COLUMNS, last_block)
        first_by_output, by_output = tl.load(scales + block), tl.load(scales + next_block)
        if HAS_GATE:
            first_by_up, by_up = tl.load(up_scales + block), tl.load(up_scales + next_block)
    start(OVERLAPS)
    first_value = tl.load(x + x_cell + first, mask=is_row & inside, other=0.0)
    y_cell = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    in_y = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    before = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if HAS_RESIDUAL:  # now, not at the end: nobody waits for it there
        before = tl.load(residual + y_cell, mask=in_y, other=0.0).to(tl.float32)
    for begin in range(first + INPUTS, last, INPUTS):
        inside, later = (begin + column < last)[None, :], begin + INPUTS
        value = tl.load(x + x_cell + begin, mask=is_row if IS_EVEN else is_row & inside, other=0.0)
        piece = load(weight + cell + begin, inside, IS_EVEN)
        if HAS_GATE:
            up_piece = load(weight + up_offset + cell + begin, inside, IS_EVEN)
        next_by_input = by_input
        if HAS_NORM:
            next_by_input = load(norm_cell + later, (later + column < last)[None, :], False)
        codes, by_row, squares = _rounded(value, by_input, squares, HAS_NORM, ROWS)
        by_input = next_by_input
        by_cell, by_up_cell = by_row, by_row
        if HAS_BLOCKS:
            by_cell = by_output[:, None] * by_row
            block = tl.minimum(later // BLOCK_COLUMNS, last_block)
            by_output = tl.load(scales + block)
            if HAS_GATE:
                by_up_cell = by_up[:, None] * by_row
                by_up = tl.load(up_scales + block)
        total += tl.dot(piece, tl.trans(codes)) * by_cell
        if HAS_GATE:
            up_total += tl.dot(up_piece, tl.trans(codes)) * by_up_cell
    codes, by_row, squares = _rounded(first_value, first_by_input, squares, HAS_NORM, ROWS)
    if HAS_BLOCKS:
        total += tl.dot(first_piece, tl.trans(codes)) * (first_by_output[:, None] * by_row)
        if HAS_GATE:
            up_total += tl.dot(first_up_piece, tl.trans(codes)) * (first_by_up[:, None] * by_row)
    else:
        total += tl.dot(first_piece, tl.trans(codes)) * by_row
        if HAS_GATE:
            up_total += tl.dot(first_up_piece, tl.trans(codes)) * by_row
    parts = (tl.trans(total),)
    if HAS_GATE:
        parts += (tl.trans(up_total),)
    if HAS_NORM:
        parts += (tiled(tl.sum(squares, 1)[:, None], ROWS),)
    totals, is_last = sums_of_splits(parts, partial, counters, SPLITS)
    if is_last:
        by_cell = factor[None, :]
        up_by_cell = up_factor[None, :]
        if HAS_NORM:
            of_row = tl.rsqrt(totals[2 if HAS_GATE else 1] / num_inputs + eps)
            by_cell *= of_row
            up_by_cell *= of_row
        result = totals[0] * by_cell + addend[None, :]
        if HAS_GATE:
            result = silu(result) * (totals[1] * up_by_cell + up_addend[None, :])
        tl.store(y + y_cell, as_stored(result + before, y, CLAMPS), mask=in_y)
