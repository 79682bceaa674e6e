"""The kernel of products with one or two rows, element by element; `raypp.ops.cuda.projection` says how it works."""

from __future__ import annotations

import triton
import triton.language as tl

from raypp.ops.cuda.between_products import as_stored, silu
from raypp.ops.cuda.kernel_launch import start
from raypp.ops.cuda.product_loads import load, load_scale, load_vector


@triton.jit
def _values(x, column, inside, num_inputs, IS_EVEN: tl.constexpr, ROWS: tl.constexpr):
    """Return a piece of each row of x, float32."""
    values = ()
    for row in tl.static_range(ROWS):
        values += (load(x + row * num_inputs + column, inside, IS_EVEN).to(tl.float32),)
    return values


@triton.jit
def _times(values, factor, ROWS: tl.constexpr):
    """Return each row's values times a factor."""
    products = ()
    for row in tl.static_range(ROWS):
        products += (values[row] * factor,)
    return products


@triton.jit
def _squared(squares, values, ROWS: tl.constexpr):
    """Return sums of squares with those of one more piece."""
    sums = ()
    for row in tl.static_range(ROWS):
        sums += (squares[row] + values[row] * values[row],)
    return sums


@triton.jit
def _multiplied(totals, piece, values, ROWS: tl.constexpr, TOGETHER: tl.constexpr):
    """Return each row's products with those of one more piece of the weight.

    TOGETHER neighbouring inputs, which one thread holds, share a sum: with several rows there are no registers for
    more.
    """
    sums, weight = (), piece.to(tl.float32)
    shape: tl.constexpr = (piece.shape[0], piece.shape[1] // TOGETHER, TOGETHER)
    for row in tl.static_range(ROWS):
        sums += (totals[row] + tl.sum(tl.reshape(weight * values[row][None, :], shape), 2),)
    return sums


@triton.jit
def _normed(
    values, norm_weight, column, inside, HAS_NORM_WEIGHT: tl.constexpr, IS_EVEN: tl.constexpr, ROWS: tl.constexpr
):
    """Return each row's values times the norm's weight, if that is not folded into the product's."""
    if HAS_NORM_WEIGHT:
        values = _times(values, load(norm_weight + column, inside, IS_EVEN).to(tl.float32), ROWS)
    return values


@triton.jit
def project_few(
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
    HAS_NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CLAMPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    # Past the end, the last output is computed again, and not stored.
    real = tl.minimum(output, num_outputs - 1)
    cell = real.to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_offset = num_outputs.to(tl.int64) * num_inputs
    totals, squares, before = (), (), ()
    for _ in tl.static_range(ROWS):
        totals += (tl.zeros((OUTPUTS, INPUTS // TOGETHER), tl.float32),)
        squares += (tl.zeros((INPUTS,), tl.float32),)
    up_totals = totals
    inside = column < num_inputs
    first_piece = load(weight + cell, inside[None, :], IS_EVEN)
    first_up_piece = first_piece
    addend = load_vector(bias, output, num_outputs, HAS_BIAS)
    up_addend = addend
    factor = load_scale(weight_scale, output, num_outputs, HAS_SCALE)
    up_factor = factor
    if HAS_GATE:
        first_up_piece = load(weight + up_offset + cell, inside[None, :], IS_EVEN)
        up_addend = load_vector(bias, num_outputs + output, 2 * num_outputs, HAS_BIAS)
        up_factor = load_scale(weight_scale, num_outputs + output, 2 * num_outputs, HAS_SCALE)
    start(OVERLAPS)
    first_values = _values(x, column, inside, num_inputs, False, ROWS)
    for row in tl.static_range(ROWS):  # now, not at the end: nobody waits for it there
        before += (load_vector(residual + row * num_outputs, output, num_outputs, HAS_RESIDUAL),)
    if not IS_WHOLE:
        for begin in tl.range(INPUTS, num_inputs, INPUTS, num_stages=STAGES):
            inside = begin + column < num_inputs
            values = _values(x + begin, column, inside, num_inputs, IS_EVEN, ROWS)
            piece = load(weight + begin + cell, inside[None, :], IS_EVEN)
            if HAS_NORM:
                squares = _squared(squares, values, ROWS)
            values = _normed(values, norm_weight, begin + column, inside, HAS_NORM_WEIGHT, IS_EVEN, ROWS)
            totals = _multiplied(totals, piece, values, ROWS, TOGETHER)
            if HAS_GATE:
                up_piece = load(weight + up_offset + begin + cell, inside[None, :], IS_EVEN)
                up_totals = _multiplied(up_totals, up_piece, values, ROWS, TOGETHER)
    if HAS_NORM:
        squares = _squared(squares, first_values, ROWS)
    first_values = _normed(first_values, norm_weight, column, column < num_inputs, HAS_NORM_WEIGHT, False, ROWS)
    totals = _multiplied(totals, first_piece, first_values, ROWS, TOGETHER)
    if HAS_GATE:
        up_totals = _multiplied(up_totals, first_up_piece, first_values, ROWS, TOGETHER)
    for row in tl.static_range(ROWS):
        scale = 1.0
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(squares[row], 0) / num_inputs + eps)
        result = tl.sum(totals[row], 1) * scale * factor + addend
        if HAS_GATE:
            result = silu(result) * (tl.sum(up_totals[row], 1) * scale * up_factor + up_addend)
        tl.store(y + row * num_outputs + output, as_stored(result + before[row], y, CLAMPS), mask=output < num_outputs)
