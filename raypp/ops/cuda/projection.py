"""Products with few rows, with the norm before and the gate or sum after them in one launch.

    1 or 2 rows   each program multiplies some rows of the weight with x element by element, and sums at the end
    more          each program multiplies a strip of the weight with all of x by tensor cores; the strip may be split
                  along K, then the last part to finish adds the parts, in their order: the same bits every time

One or two rows may be normalized in the same launch. The norm's weight g is folded into the product's weight before
(`fold_norm`); the kernel sums the squares of x beside the product, and scales the result at the end: norm(x) W^T =
(x (W * g)^T) / rms(x). With a gate, a program computes an output's gate and up together. The first piece of the weight
is loaded before the previous kernel has finished (see `raypp.ops.cuda.kernel_launch`). A quantized weight does not take
the norm's: the first way multiplies x by it as it is read.

Of a weight in 8 bits each output has a scale, or each block of outputs and inputs; blocks only go the second way. The
first way converts the weight element by element, exactly; tensor cores multiply it with x in 8 bits, since converting
would take longer than reading. There, x may have scales as well: one per row, or as many as the weight has blocks of
inputs.

Twin: `linear` of tests/gpu/reference_ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from raypp.ops.cuda.between_products import as_stored, silu
from raypp.ops.cuda.kernel_launch import Device, Workspace, arrives_last, fence_shared, start
from raypp.ops.weight import Weight

FEW_ROWS = 2
"""Up to so many rows are multiplied element by element, and may be normalized in the same launch."""

HELD_INPUTS = 128
"""Of each part of K, a program multiplies the first so many last: they are asked for before x is there."""


@dataclass(frozen=True, eq=False)
class Product:
    """What a product needs. N outputs (with a gate 2 N rows of the weight, the gate first), K inputs."""

    weight: Weight  # [N, K] contiguous: plain, or fp8
    bias: torch.Tensor | None = None  # [N]
    norm_eps: float | None = None  # x is normalized first; only with few rows
    is_gated: bool = False
    norm_weight: torch.Tensor | None = None  # [K] of that norm; None: folded into the weight

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.weight.num_outputs // (2 if self.is_gated else 1)

    @property
    def num_inputs(self) -> int:
        """K."""
        return self.weight.num_inputs

    @property
    def has_blocks(self) -> bool:
        """Whether an output has several scales."""
        return self.weight.scale is not None and self.weight.block[1] < self.num_inputs


def fold_norm(weight: torch.Tensor, norm_weight: torch.Tensor) -> None:
    """Multiply each input's column by the norm's weight, in place.

    Shapes: weight [N, K]; norm_weight [K]. It rounds the weight where a norm of its own would round its output; the
    errors are alike.
    """
    for rows in weight.split(4096):  # in float32, a piece at a time
        rows.copy_(rows.float() * norm_weight.float())


@dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    Args:
        outputs: Of a program.
        inputs: Of a piece of the weight that is asked for at once.
        num_splits: Programs that share K; only with more than few rows and no gate.
        num_warps: Of a program.
        num_stages: Pieces under way from memory.
        least_rows: Of a tile. Hopper's tensor cores multiply fewer than 16 rows by other instructions than more.
        num_turns: Parts of K that a program sums one after the other, as so many splits do with pieces of
            `HELD_INPUTS`; 0: none. For many rows.
        most_rows: Of a tile.
    """

    outputs: int
    inputs: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
    least_rows: int = 8
    num_turns: int = 0
    most_rows: int = 128


def partial_floats(num_rows: int, product: Product, tuning: Tuning) -> int:
    """Return how many floats of the workspace `project` needs."""
    if tuning.num_splits == 1:
        return 0
    num_outputs = triton.cdiv(product.num_outputs, tuning.outputs) * tuning.outputs * (2 if product.is_gated else 1)
    padded = _padded(num_rows, product, tuning)
    return int(num_outputs * tuning.num_splits * triton.cdiv(num_rows, padded) * padded)


def shared_bytes(num_rows: int, product: Product, tuning: Tuning) -> int:
    """Return the shared memory of a program that multiplies by tensor cores, or a little more."""
    num_rows_read = tuning.outputs * (2 if product.is_gated else 1) + _padded(num_rows, product, tuning)
    return int(num_rows_read * tuning.inputs * product.weight.data.element_size() * tuning.num_stages)


def project(
    x: torch.Tensor,
    product: Product,
    residual: torch.Tensor | None,
    tuning: Tuning,
    device: Device,
    workspace: Workspace,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return norm(x) W^T + b, its gate, or its sum with the residual stream, [T, N].

    It is in `out` if that is given, else of `dtype`, else of x's type.

    All three may be of types of their own. A product in 8 bits keeps within the range of y's; with more than few rows
    its x is in 8 bits as well, and has scales if the weight's outputs have several.

    Shapes: x [T, K] contiguous, few rows with a norm; residual [T, N], left as it is;
    x_scale [C, T or more] float32, for C blocks of the weight's inputs, or one.
    """
    num_rows, num_inputs, num_outputs = x.shape[0], product.num_inputs, product.num_outputs
    weight, scale = product.weight.data, product.weight.scale
    assert out is None or (out.shape == (num_rows, num_outputs) and out.is_contiguous())
    y = torch.empty(num_rows, num_outputs, dtype=dtype or x.dtype, device=x.device) if out is None else out
    arguments = (
        x if product.bias is None else product.bias,
        x if residual is None else residual,
        y,
        num_outputs,
        num_inputs,
    )
    flags = {
        "HAS_GATE": product.is_gated,
        "HAS_BIAS": product.bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "IS_EVEN": num_inputs % (tuning.inputs * tuning.num_splits) == 0,
        "CLAMPS": scale is not None and (y.dtype == torch.float16 or y.element_size() == 1),
        "OVERLAPS": device.has_dependent_launch,
        "num_warps": tuning.num_warps,
        **device.launch_options,
    }
    num_programs = triton.cdiv(num_outputs, tuning.outputs)
    block_rows, block_columns = product.weight.block
    if num_rows <= FEW_ROWS and x_scale is None and not device.is_invariant:
        assert not product.has_blocks, "tensor cores multiply blocks"
        project_few[(num_programs,)](
            x,
            product.norm_eps or 0.0,
            x if product.norm_weight is None else product.norm_weight,
            weight,
            x if scale is None else scale,
            *arguments,
            HAS_NORM=product.norm_eps is not None,
            HAS_NORM_WEIGHT=product.norm_weight is not None,
            HAS_SCALE=scale is not None,
            IS_WHOLE=num_inputs <= tuning.inputs,
            ROWS=num_rows,
            OUTPUTS=tuning.outputs,
            INPUTS=tuning.inputs,
            TOGETHER=1 if num_rows == 1 else 8,
            STAGES=tuning.num_stages,
            **flags,
        )
        return y
    assert scale is None or x.element_size() == 1, "tensor cores multiply what is alike"
    assert product.norm_eps is None, "a norm in the same launch costs several rows more than one of its own"
    assert not product.has_blocks or (x_scale is not None and block_columns % tuning.inputs == 0)
    assert partial_floats(num_rows, product, tuning) <= workspace.floats.numel(), "not reserved"
    padded = _padded(num_rows, product, tuning)
    num_tiles = triton.cdiv(num_rows, padded)
    flags |= {
        "HAS_SCALE": scale is not None and not product.has_blocks,
        "HAS_X_SCALE": x_scale is not None and not product.has_blocks,
        "HAS_BLOCKS": product.has_blocks,
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLUMNS": block_columns if product.has_blocks else 1,
        "ROWS": padded,
        "OUTPUTS": tuning.outputs,
        "INPUTS": tuning.inputs,
        "num_stages": tuning.num_stages,
    }
    read = (x, x if x_scale is None else x_scale, weight, x if scale is None else scale, *arguments)
    x_scale_stride = 1 if x_scale is None else x_scale.stride(0)
    if tuning.num_turns:
        held = tuning.inputs if product.has_blocks else HELD_INPUTS
        flags["IS_EVEN"] = num_inputs % (held * tuning.num_turns) == 0
        _project_many[(num_programs * num_tiles,)](
            *read, num_rows, x_scale_stride, TURNS=tuning.num_turns, HELD=held, TILES=8, **flags
        )
        return y
    _project_rows[(num_programs, tuning.num_splits, num_tiles)](
        *read, workspace.floats, workspace.counters, num_rows, x_scale_stride, SPLITS=tuning.num_splits, **flags
    )
    return y


def _padded(num_rows: int, product: Product, tuning: Tuning) -> int:
    """Return the rows of a tile: the smallest number that tensor cores take of this type, or more."""
    least = tuning.least_rows if product.weight.scale is None else 16
    return min(tuning.most_rows, max(least, int(triton.next_power_of_2(num_rows))))


@triton.jit(do_not_specialize=["num_rows"])  # one kernel for all that fit a tile
def _project_rows(
    x,
    x_scale,
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
    x_scale_stride,
    HAS_SCALE: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
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
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    strip, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    output = strip * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    # Past the end, outputs are computed again, and not stored. Rows are not even read: many programs read x.
    real, real_row = tl.minimum(output, num_outputs - 1), tl.minimum(row, num_rows - 1)
    is_row = (row < num_rows)[:, None]
    cell = real.to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_offset = num_outputs.to(tl.int64) * num_inputs
    x_cell = row.to(tl.int64)[:, None] * num_inputs + column[None, :]
    split_inputs = tl.cdiv(tl.cdiv(num_inputs, INPUTS), SPLITS) * INPUTS
    first = split * split_inputs
    last = tl.minimum(first + split_inputs, num_inputs)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up_total = total
    inside = (first + column < last)[None, :]
    first_piece = load(weight + cell + first, inside, IS_EVEN)
    first_up_piece = first_piece
    addend = load_vector(bias, output, num_outputs, HAS_BIAS)
    up_addend = addend
    factor = load_scale(weight_scale, output, num_outputs, HAS_SCALE)
    up_factor = factor
    if HAS_GATE:
        first_up_piece = load(weight + up_offset + cell + first, inside, IS_EVEN)
        up_addend = load_vector(bias, num_outputs + output, 2 * num_outputs, HAS_BIAS)
        up_factor = load_scale(weight_scale, num_outputs + output, 2 * num_outputs, HAS_SCALE)
    start(OVERLAPS)
    first_value = tl.load(x + x_cell + first, mask=is_row if IS_EVEN else is_row & inside, other=0.0)
    x_factor = tl.full((ROWS,), 1.0, tl.float32)
    if HAS_X_SCALE:
        x_factor = tl.load(x_scale + real_row)
    y_cell = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    in_y = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    before = tl.zeros((ROWS, OUTPUTS), tl.float32)
    EARLY: tl.constexpr = (32 if HAS_BLOCKS else 64) >= ROWS
    if HAS_RESIDUAL and EARLY:  # now, not at the end, so that its latency is hidden, if registers hold it
        before = tl.load(residual + y_cell, mask=in_y, other=0.0).to(tl.float32)
    # Scales are loaded one piece ahead here: the compiler does that for the pieces alone.
    num_blocks = tl.cdiv(num_inputs, BLOCK_COLUMNS)
    x_scales, scales = x_scale + real_row, weight_scale + real // BLOCK_ROWS * num_blocks
    up_scales = weight_scale + (num_outputs + real) // BLOCK_ROWS * num_blocks
    first_by_row, first_by_output, first_by_up = _scales(
        x_scales, scales, up_scales, first, num_inputs, x_scale_stride, BLOCK_COLUMNS, HAS_BLOCKS, HAS_GATE
    )
    by_row, by_output, by_up = _scales(
        x_scales, scales, up_scales, first + INPUTS, num_inputs, x_scale_stride, BLOCK_COLUMNS, HAS_BLOCKS, HAS_GATE
    )
    for begin in range(first + INPUTS, last, INPUTS):
        inside = (begin + column < last)[None, :]
        value = tl.load(x + x_cell + begin, mask=is_row if IS_EVEN else is_row & inside, other=0.0)
        piece = load(weight + cell + begin, inside, IS_EVEN)
        fence_shared(OVERLAPS)
        next_by_row, next_by_output, next_by_up = _scales(
            x_scales, scales, up_scales, begin + INPUTS, num_inputs, x_scale_stride, BLOCK_COLUMNS, HAS_BLOCKS, HAS_GATE
        )
        total = _with_piece(total, piece, value, by_output, by_row, HAS_BLOCKS)
        if HAS_GATE:
            up_piece = load(weight + up_offset + cell + begin, inside, IS_EVEN)
            up_total = _with_piece(up_total, up_piece, value, by_up, by_row, HAS_BLOCKS)
        by_row, by_output, by_up = next_by_row, next_by_output, next_by_up
    total = _with_piece(total, first_piece, first_value, first_by_output, first_by_row, HAS_BLOCKS)
    if HAS_GATE:
        up_total = _with_piece(up_total, first_up_piece, first_value, first_by_up, first_by_row, HAS_BLOCKS)
    if HAS_GATE:
        totals, is_last = sums_of_splits((tl.trans(total), tl.trans(up_total)), partial, counters, SPLITS)
    else:
        totals, is_last = sums_of_splits((tl.trans(total),), partial, counters, SPLITS)
    if is_last:
        if HAS_RESIDUAL and not EARLY:
            before = tl.load(residual + y_cell, mask=in_y, other=0.0).to(tl.float32)
        result = totals[0] * (x_factor[:, None] * factor[None, :]) + addend[None, :]
        if HAS_GATE:
            result = silu(result) * (totals[1] * (x_factor[:, None] * up_factor[None, :]) + up_addend[None, :])
        tl.store(y + y_cell, as_stored(result + before, y, CLAMPS), mask=in_y)


@triton.jit(do_not_specialize=["num_rows"])
def _project_many(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    residual,
    y,
    num_outputs,
    num_inputs,
    num_rows,
    x_scale_stride,
    HAS_SCALE: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
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
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TURNS: tl.constexpr,
    HELD: tl.constexpr,
    TILES: tl.constexpr,
):
    """Sum as `_project_rows` with TURNS splits of pieces of HELD inputs: each part's first HELD come last.

    Programs of TILES tiles of rows follow each other, strip by strip, so that a strip comes from memory once.
    """
    num_strips, num_tiles = tl.cdiv(num_outputs, OUTPUTS), tl.cdiv(num_rows, ROWS)
    first_tile = tl.program_id(0) // (TILES * num_strips) * TILES
    among, height = tl.program_id(0) % (TILES * num_strips), tl.minimum(num_tiles - first_tile, TILES)
    row = (first_tile + among % height) * ROWS + tl.arange(0, ROWS)
    output = among // height * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    # Past the end, rows and outputs are computed again, and not stored.
    real, real_row = tl.minimum(output, num_outputs - 1), tl.minimum(row, num_rows - 1)
    cell = real.to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_offset = num_outputs.to(tl.int64) * num_inputs
    x_cell = real_row.to(tl.int64)[:, None] * num_inputs + column[None, :]
    addend = load_vector(bias, output, num_outputs, HAS_BIAS)
    up_addend = addend
    factor = load_scale(weight_scale, output, num_outputs, HAS_SCALE)
    up_factor = factor
    if HAS_GATE:
        up_addend = load_vector(bias, num_outputs + output, 2 * num_outputs, HAS_BIAS)
        up_factor = load_scale(weight_scale, num_outputs + output, 2 * num_outputs, HAS_SCALE)
    start(OVERLAPS)
    x_factor = tl.full((ROWS,), 1.0, tl.float32)
    if HAS_X_SCALE:
        x_factor = tl.load(x_scale + real_row)
    num_blocks = tl.cdiv(num_inputs, BLOCK_COLUMNS)
    x_scales, scales = x_scale + real_row, weight_scale + real // BLOCK_ROWS * num_blocks
    up_scales = weight_scale + (num_outputs + real) // BLOCK_ROWS * num_blocks
    part_inputs = tl.cdiv(tl.cdiv(num_inputs, HELD), TURNS) * HELD
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up_sums = sums
    for turn in range(TURNS):
        first = turn * part_inputs
        length = tl.cdiv(tl.minimum(part_inputs, num_inputs - first), HELD) * HELD
        begin = first + _place(0, length, HELD)
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        up_total = total
        by_row, by_output, by_up = _scales(  # loaded one piece ahead, as above
            x_scales, scales, up_scales, begin, num_inputs, x_scale_stride, BLOCK_COLUMNS, HAS_BLOCKS, HAS_GATE
        )
        for done in range(0, length, INPUTS):
            inside = (begin + column < num_inputs)[None, :]
            value, piece = load(x + x_cell + begin, inside, IS_EVEN), load(weight + cell + begin, inside, IS_EVEN)
            fence_shared(OVERLAPS)
            next_begin = first + _place(done + INPUTS, length, HELD)
            next_by_row, next_by_output, next_by_up = _scales(
                x_scales, scales, up_scales, next_begin, num_inputs, x_scale_stride, BLOCK_COLUMNS, HAS_BLOCKS, HAS_GATE
            )
            total = _with_piece(total, piece, value, by_output, by_row, HAS_BLOCKS)
            if HAS_GATE:
                up_piece = load(weight + up_offset + cell + begin, inside, IS_EVEN)
                up_total = _with_piece(up_total, up_piece, value, by_up, by_row, HAS_BLOCKS)
            by_row, by_output, by_up = next_by_row, next_by_output, next_by_up
            begin = next_begin
        if TURNS > 1:
            sums += total
            up_sums += up_total
        else:
            sums, up_sums = total, up_total
    y_cell = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    in_y = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    result = tl.trans(sums) * (x_factor[:, None] * factor[None, :]) + addend[None, :]
    if HAS_GATE:
        result = silu(result) * (tl.trans(up_sums) * (x_factor[:, None] * up_factor[None, :]) + up_addend[None, :])
    if HAS_RESIDUAL:
        result += tl.load(residual + y_cell, mask=in_y, other=0.0).to(tl.float32)
    tl.store(y + y_cell, as_stored(result, y, CLAMPS), mask=in_y)


@triton.jit
def _scales(
    x_scales, scales, up_scales, begin, num_inputs, x_scale_stride,
    COLUMNS: tl.constexpr, HAS_BLOCKS: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Return the scales of the block that begins there, or of the last one: of rows, of outputs, and of the gate's."""
    by_row, by_output, by_up = 1.0, 1.0, 1.0
    if HAS_BLOCKS:
        block = tl.minimum(begin // COLUMNS, tl.cdiv(num_inputs, COLUMNS) - 1)
        by_row, by_output = tl.load(x_scales + block * x_scale_stride), tl.load(scales + block)
        by_up = tl.load(up_scales + block) if HAS_GATE else by_output
    return by_row, by_output, by_up


@triton.jit
def _with_piece(total, piece, value, by_output, by_row, HAS_BLOCKS: tl.constexpr):
    """Return sums with those of one more piece, whose scales may be of blocks."""
    if HAS_BLOCKS:
        return total + tl.dot(piece, tl.trans(value)) * (by_output.to(tl.float32)[:, None] * by_row[None, :])
    return tl.dot(piece, tl.trans(value), total)


@triton.jit
def _place(done, length, HELD: tl.constexpr):
    """Return which input of a part follows behind so many, if its first HELD come last."""
    return tl.where(done + HELD < length, done + HELD, tl.maximum(done + HELD - length, 0))


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
    for row in tl.static_range(ROWS):  # now, not at the end, so that its latency is hidden
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


@triton.jit
def sums_of_splits(totals, partial, counters, SPLITS: tl.constexpr, num_rows=None):
    """Return sums of all splits' totals, in their order, and whether this program, the last one to come, has them.

    Shapes: totals a tuple of [n, m], each of its own shape, of program (strip, split, tile of rows); of `num_rows` rows
    where that is given.
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
            tl.store(parts + split * step + cell, totals[i], mask=_is_row(totals[i], num_rows))
            parts += SPLITS * step
        is_last = arrives_last(counters + place, SPLITS)
        parts = partial + place.to(tl.int64) * (SPLITS * size)
        sums = ()
        for i in tl.static_range(COUNT):
            cell, step = _cells(totals[i])
            total, is_row = tl.zeros_like(totals[i]), _is_row(totals[i], num_rows)
            if is_last:
                for index in tl.static_range(SPLITS):  # written out, so that the parts come at once
                    total += tl.load(parts + index * step + cell, mask=is_row, other=0.0, cache_modifier=".cg")
            sums += (total,)
            parts += SPLITS * step
        totals = sums
    return totals, is_last


@triton.jit
def _is_row(total, num_rows):
    """Return the mask of a total's first rows, [n, 1]; None: all of them."""
    return True if num_rows is None else (tl.arange(0, total.shape[0]) < num_rows)[:, None]


@triton.jit
def _cells(total):
    """Return where the elements of a total lie, and their number."""
    height: tl.constexpr = total.shape[0]
    width: tl.constexpr = total.shape[1]
    return tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :], height * width


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
