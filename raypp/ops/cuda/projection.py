"""Products with few rows, with the norm before and the gate or sum after them in one launch.

    1 or 2 rows   each program multiplies some rows of the weight with x element by element, and sums at the end
    more          each program multiplies a strip of the weight with all of x by tensor cores; the strip may be split
                  along K, then the last part to finish adds the parts, in their order: the same bits every time

One or two rows may be normalized in the same launch. The norm's weight g is folded into the product's weight before
(`fold_norm`); the kernel sums the squares of x beside the product, and scales the result at the end: norm(x) W^T =
(x (W * g)^T) / rms(x). With a gate, a program computes an output's gate and up together. The first piece of the weight
is loaded before the previous kernel has finished (see `raypp.ops.cuda.kernel_launch`). With a weight in 8 bits each
output is multiplied by its scale. The first way converts the weight element by element, exactly; tensor cores multiply
it with x in 8 bits, since converting would take longer than reading.

Twin: `linear` of tests/gpu/reference_ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from raypp.ops.cuda.between_products import as_stored, silu
from raypp.ops.cuda.kernel_launch import Device, Workspace, arrives_last, start
from raypp.ops.cuda.quantize import quantize_rows

FEW_ROWS = 2
"""Up to so many rows are multiplied element by element, and may be normalized in the same launch."""


@dataclass(frozen=True, eq=False)
class Weights:
    """What a product needs. N outputs (with a gate 2 N rows of the weight, the gate first), K inputs."""

    weight: torch.Tensor  # [N, K] contiguous
    bias: torch.Tensor | None = None  # [N]
    norm_eps: float | None = None  # x, few rows, is normalized first, by a norm whose weight is folded into this one
    is_gated: bool = False
    scale: torch.Tensor | None = None  # [N] float32, of a weight in float8_e4m3fn

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.weight.shape[0] // (2 if self.is_gated else 1)

    @property
    def num_inputs(self) -> int:
        """K."""
        return self.weight.shape[1]


def quantize(weights: Weights) -> Weights:
    """Return these weights in 8 bits; see `raypp.ops.cuda.quantize`."""
    weight, scale = quantize_rows(weights.weight)
    return replace(weights, weight=weight, scale=scale)


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
        num_splits: Parts of K; only with more than few rows and no gate.
        num_warps: Of a program.
        num_stages: Pieces under way from memory.
    """

    outputs: int
    inputs: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


def partial_floats(num_rows: int, weights: Weights, tuning: Tuning) -> int:
    """Return how many floats of the workspace `project` needs."""
    if tuning.num_splits == 1:
        return 0
    num_strips = triton.cdiv(weights.num_outputs, tuning.outputs)
    return int(num_strips * tuning.outputs * tuning.num_splits * _padded(num_rows, weights))


def shared_bytes(num_rows: int, weights: Weights, tuning: Tuning) -> int:
    """Return the shared memory of a program that multiplies by tensor cores, or a little more."""
    num_rows_read = tuning.outputs * (2 if weights.is_gated else 1) + _padded(num_rows, weights)
    return int(num_rows_read * tuning.inputs * weights.weight.element_size() * tuning.num_stages)


def project(
    x: torch.Tensor,
    weights: Weights,
    residual: torch.Tensor | None,
    tuning: Tuning,
    device: Device,
    workspace: Workspace,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return norm(x) W^T + b, its gate, or its sum with the residual stream, [T, N].

    It is in `out` if that is given, else of `dtype`, else of x's type.

    All three may be of types of their own. A product in 8 bits keeps within the range of y's; with more than few rows
    its x is in 8 bits as well.

    Shapes: x [T, K] contiguous, T from 1 to 128, few with a norm; residual [T, N], left as it is.
    """
    num_rows, num_inputs, num_outputs = x.shape[0], weights.num_inputs, weights.num_outputs
    assert out is None or (out.shape == (num_rows, num_outputs) and out.is_contiguous())
    y = torch.empty(num_rows, num_outputs, dtype=dtype or x.dtype, device=x.device) if out is None else out
    arguments = (
        x if weights.bias is None else weights.bias,
        x if residual is None else residual,
        y,
        num_outputs,
        num_inputs,
    )
    flags = {
        "HAS_GATE": weights.is_gated,
        "HAS_BIAS": weights.bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "IS_EVEN": num_inputs % (tuning.inputs * tuning.num_splits) == 0,
        "CLAMPS": weights.scale is not None and (y.dtype == torch.float16 or y.element_size() == 1),
        "OVERLAPS": device.has_dependent_launch,
        "num_warps": tuning.num_warps,
        **device.launch_options,
    }
    num_programs = triton.cdiv(num_outputs, tuning.outputs)
    if num_rows <= FEW_ROWS:
        _project_few[(num_programs,)](
            x,
            weights.norm_eps or 0.0,
            weights.weight,
            x if weights.scale is None else weights.scale,
            *arguments,
            HAS_NORM=weights.norm_eps is not None,
            HAS_SCALE=weights.scale is not None,
            IS_WHOLE=num_inputs <= tuning.inputs,
            ROWS=num_rows,
            OUTPUTS=tuning.outputs,
            INPUTS=tuning.inputs,
            TOGETHER=1 if num_rows == 1 else 8,
            STAGES=tuning.num_stages,
            **flags,
        )
        return y
    assert weights.scale is None or x.element_size() == 1, "tensor cores multiply what is alike"
    assert weights.norm_eps is None, "a norm in the same launch costs several rows more than one of its own"
    assert tuning.num_splits == 1 or not weights.is_gated
    _project_rows[(num_programs, tuning.num_splits)](
        x,
        weights.weight,
        x if weights.scale is None else weights.scale,
        *arguments,
        workspace.floats,
        workspace.counters,
        num_rows,
        HAS_SCALE=weights.scale is not None,
        ROWS=_padded(num_rows, weights),
        OUTPUTS=tuning.outputs,
        INPUTS=tuning.inputs,
        SPLITS=tuning.num_splits,
        num_stages=tuning.num_stages,
        **flags,
    )
    return y


def _padded(num_rows: int, weights: Weights) -> int:
    """Return the rows of a tile: the smallest number that tensor cores take of this type."""
    return max(8 if weights.scale is None else 16, int(triton.next_power_of_2(num_rows)))


@triton.jit
def _load(pointer, inside, IS_EVEN: tl.constexpr):
    """Return what lies inside, 0 elsewhere. Without a mask where all pieces are whole."""
    if IS_EVEN:
        return tl.load(pointer)
    return tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def _load_vector(vector, index, size, IS_THERE: tl.constexpr):
    """Return elements of a vector, float32; zeros where there is none."""
    if IS_THERE:
        return tl.load(vector + index, mask=index < size, other=0.0).to(tl.float32)
    return tl.zeros(index.shape, tl.float32)


@triton.jit
def _load_scale(scale, index, size, IS_THERE: tl.constexpr):
    """Return what outputs of a weight in 8 bits are multiplied by, float32; ones for other weights."""
    if IS_THERE:
        return tl.load(scale + index, mask=index < size, other=0.0)
    return tl.full(index.shape, 1.0, tl.float32)


@triton.jit
def _values(x, column, inside, num_inputs, IS_EVEN: tl.constexpr, ROWS: tl.constexpr):
    """Return a piece of each row of x, float32."""
    values = ()
    for row in tl.static_range(ROWS):
        values += (_load(x + row * num_inputs + column, inside, IS_EVEN).to(tl.float32),)
    return values


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
def _project_few(
    x,
    eps,
    weight,
    weight_scale,
    bias,
    residual,
    y,
    num_outputs,
    num_inputs,
    HAS_NORM: tl.constexpr,
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
    cell = tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_offset = num_outputs.to(tl.int64) * num_inputs
    totals, squares, before = (), (), ()
    for _ in tl.static_range(ROWS):
        totals += (tl.zeros((OUTPUTS, INPUTS // TOGETHER), tl.float32),)
        squares += (tl.zeros((INPUTS,), tl.float32),)
    up_totals = totals
    inside = column < num_inputs
    first_piece = _load(weight + cell, inside[None, :], IS_EVEN)
    first_up_piece = first_piece
    addend = _load_vector(bias, output, num_outputs, HAS_BIAS)
    up_addend = addend
    factor = _load_scale(weight_scale, output, num_outputs, HAS_SCALE)
    up_factor = factor
    if HAS_GATE:
        first_up_piece = _load(weight + up_offset + cell, inside[None, :], IS_EVEN)
        up_addend = _load_vector(bias, num_outputs + output, 2 * num_outputs, HAS_BIAS)
        up_factor = _load_scale(weight_scale, num_outputs + output, 2 * num_outputs, HAS_SCALE)
    start(OVERLAPS)
    first_values = _values(x, column, inside, num_inputs, False, ROWS)
    for row in tl.static_range(ROWS):  # now, not at the end: nobody waits for it there
        before += (_load_vector(residual + row * num_outputs, output, num_outputs, HAS_RESIDUAL),)
    if not IS_WHOLE:
        for begin in tl.range(INPUTS, num_inputs, INPUTS, num_stages=STAGES):
            inside = begin + column < num_inputs
            values = _values(x + begin, column, inside, num_inputs, IS_EVEN, ROWS)
            piece = _load(weight + begin + cell, inside[None, :], IS_EVEN)
            if HAS_NORM:
                squares = _squared(squares, values, ROWS)
            totals = _multiplied(totals, piece, values, ROWS, TOGETHER)
            if HAS_GATE:
                up_piece = _load(weight + up_offset + begin + cell, inside[None, :], IS_EVEN)
                up_totals = _multiplied(up_totals, up_piece, values, ROWS, TOGETHER)
    if HAS_NORM:
        squares = _squared(squares, first_values, ROWS)
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


@triton.jit(do_not_specialize=["num_rows"])  # one kernel for all that fit a tile
def _project_rows(
    x,
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
    HAS_SCALE: tl.constexpr,
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
    row = tl.arange(0, ROWS)
    output = strip * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    # Past the end, rows and outputs are computed again, and not stored.
    cell = tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_offset = num_outputs.to(tl.int64) * num_inputs
    x_cell = tl.minimum(row, num_rows - 1)[:, None] * num_inputs + column[None, :]
    split_inputs = tl.cdiv(tl.cdiv(num_inputs, INPUTS), SPLITS) * INPUTS
    first = split * split_inputs
    last = tl.minimum(first + split_inputs, num_inputs)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up_total = total
    inside = (first + column < last)[None, :]
    first_piece = _load(weight + cell + first, inside, IS_EVEN)
    first_up_piece = first_piece
    addend = _load_vector(bias, output, num_outputs, HAS_BIAS)
    up_addend = addend
    factor = _load_scale(weight_scale, output, num_outputs, HAS_SCALE)
    up_factor = factor
    if HAS_GATE:
        first_up_piece = _load(weight + up_offset + cell + first, inside, IS_EVEN)
        up_addend = _load_vector(bias, num_outputs + output, 2 * num_outputs, HAS_BIAS)
        up_factor = _load_scale(weight_scale, num_outputs + output, 2 * num_outputs, HAS_SCALE)
    start(OVERLAPS)
    first_value = _load(x + x_cell + first, inside, IS_EVEN)
    y_cell = row[:, None] * num_outputs + output[None, :]
    in_y = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    before = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if HAS_RESIDUAL:  # now, not at the end: nobody waits for it there
        before = tl.load(residual + y_cell, mask=in_y, other=0.0).to(tl.float32)
    for begin in range(first + INPUTS, last, INPUTS):
        inside = (begin + column < last)[None, :]
        value = _load(x + x_cell + begin, inside, IS_EVEN)
        piece = _load(weight + cell + begin, inside, IS_EVEN)
        total = tl.dot(piece, tl.trans(value), total)
        if HAS_GATE:
            up_piece = _load(weight + up_offset + cell + begin, inside, IS_EVEN)
            up_total = tl.dot(up_piece, tl.trans(value), up_total)
    total = tl.dot(first_piece, tl.trans(first_value), total)
    if HAS_GATE:
        up_total = tl.dot(first_up_piece, tl.trans(first_value), up_total)
    total, up_total = tl.trans(total), tl.trans(up_total)

    is_last = True
    if SPLITS > 1:
        part_cell = row[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        parts = partial + strip * (SPLITS * ROWS * OUTPUTS) + part_cell
        tl.store(parts + split * (ROWS * OUTPUTS), total)
        is_last = arrives_last(counters + strip, SPLITS)
        if is_last:
            total = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for index in tl.static_range(SPLITS):  # written out, so that the parts come at once
                total += tl.load(parts + index * (ROWS * OUTPUTS), cache_modifier=".cg")
    if is_last:
        result = total * factor[None, :] + addend[None, :]
        if HAS_GATE:
            result = silu(result) * (up_total * up_factor[None, :] + up_addend[None, :])
        tl.store(y + y_cell, as_stored(result + before, y, CLAMPS), mask=in_y)
