"""The products of each token's experts, and their weighted sum.

    few pairs   gate_up_few: a program multiplies some rows of a pair's expert with the token element by element
                down_few: a program computes some outputs of a token, all of its experts' with their weights; no more
                than the residual is added
    more        gate_up_tiles, down_tiles: a program multiplies a strip of an expert's weight with the pairs of a tile
                by tensor cores; sum_of_experts adds a token's results in their order

The first way converts weights in 8 bits element by element, exactly. Tensor cores multiply 8 bits with tokens in 8
bits, scaled by group of inputs. Weights in 4 bits always go the second way, see `raypp.ops.cuda.int4_products`.

Experts of `down` are known since the launch before the last: their weights are loaded before the previous kernel has
finished (see `raypp.ops.cuda.kernel_launch`).

Twin: `experts` of tests/gpu/reference_ops.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from raypp.ops.backend import SILU, Gate
from raypp.ops.cuda.between_products import constants_of, gated
from raypp.ops.cuda.int4_products import (
    Int4Product,
    Int4Tuning,
    project_int4_of_experts,
    tiles_of_piece,
)
from raypp.ops.cuda.kernel_launch import Device, Workspace, fence_shared, start
from raypp.ops.cuda.packed_int4 import TILE, can_pack
from raypp.ops.cuda.projection import Tuning, load
from raypp.ops.cuda.router_kernels import SCALED, Arranged, Inputs, Routed
from raypp.ops.cuda.token_quantization import in_8_bits
from raypp.ops.weight import Weight, WeightKind

_SUMMED = 1024  # outputs of a program that adds


def has_kernel(weight: Weight, dtype: torch.dtype, device: Device) -> bool:
    """Return whether kernels read a weight as it is, with tokens of this type."""
    if weight.kind == "plain":
        return weight.data.dtype == dtype
    if weight.order is not None or weight.num_inputs % 32:
        return False
    if weight.kind in ("int4", "fp4"):
        return can_pack(weight)
    assert weight.scale is not None
    is_one = weight.scale.shape[-1] == 1
    return weight.kind == "fp8" and device.has_fp8 and (is_one or weight.block[1] % SCALED == 0)


def group_inputs(weight: Weight) -> int:
    """Return how many inputs a program multiplies at most before it scales; 0: any number."""
    if weight.kind == "plain":
        return 0
    return min(SCALED, weight.block[1]) if weight.num_inputs > weight.block[1] else SCALED


def gate_up_few(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: Weight,
    bias: torch.Tensor | None,
    gate: Gate,
    routed: Routed,
    tuning: Tuning,
    device: Device,
) -> torch.Tensor:
    """Return gate and up of norm(x) as one for each pair, [T * k, I].

    Shapes: x [T, H] contiguous; norm_weight [H], None: x as it is; weight [E, 2 I, H] contiguous, the gate first; bias
    [E, 2 I].
    """
    num_pairs, num_outputs, num_inputs = routed.experts.numel(), weight.num_outputs // 2, weight.num_inputs
    y = torch.empty(num_pairs, num_outputs, dtype=x.dtype, device=x.device)
    inputs = group_inputs(weight) or tuning.inputs
    _gate_up_few[(triton.cdiv(num_outputs, tuning.outputs), num_pairs)](
        x,
        x if norm_weight is None else norm_weight,
        eps,
        *_tensors(weight),
        x if bias is None else bias,
        routed.experts,
        y,
        num_outputs,
        num_inputs,
        **_form(weight),
        **constants_of(gate),
        OWN=len(weight.data) if routed.has_others else None,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm_weight is not None,
        CHOSEN=routed.experts.shape[1],
        OUTPUTS=tuning.outputs,
        INPUTS=inputs,
        IS_EVEN=num_inputs % inputs == 0,
        STAGES=tuning.num_stages,
        OVERLAPS=device.has_dependent_launch,
        num_warps=tuning.num_warps,
        **device.launch_options,
    )
    return y


def down_few(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    routed: Routed,
    tuning: Tuning,
    device: Device,
) -> torch.Tensor:
    """Return residual + the weighted sum of a token's products, [T, H].

    Shapes: x [T * k, I] contiguous; residual [T, H], left as it is; weight [E, H, I] contiguous; bias [E, H].
    """
    (num_tokens, chosen), (num_outputs, num_inputs) = routed.experts.shape, (weight.num_outputs, weight.num_inputs)
    y = torch.empty_like(residual)
    inputs = group_inputs(weight) or tuning.inputs
    _down_few[(triton.cdiv(num_outputs, tuning.outputs), num_tokens)](
        x,
        *_tensors(weight),
        x if bias is None else bias,
        routed.experts,
        routed.weights,
        residual,
        y,
        num_outputs,
        num_inputs,
        **_form(weight),
        OWN=len(weight.data) if routed.has_others else None,
        HAS_BIAS=bias is not None,
        CHOSEN=chosen,
        CHOSEN_PADDED=triton.next_power_of_2(chosen),
        OUTPUTS=tuning.outputs,
        INPUTS=inputs,
        IS_EVEN=num_inputs % inputs == 0 and triton.next_power_of_2(chosen) == chosen and not routed.has_others,
        STAGES=tuning.num_stages,
        OVERLAPS=device.has_dependent_launch,
        num_warps=tuning.num_warps,
        **device.launch_options,
    )
    return y


def gate_up_tiles(
    weight: Weight | Int4Product,
    bias: torch.Tensor | None,
    gate: Gate,
    arranged: Arranged,
    num_chosen: int,
    next_kind: WeightKind,
    like: torch.Tensor,
    tuning: Tuning,
    device: Device,
    workspace: Workspace,
) -> Inputs:
    """Return gate and up as one for each pair, [T * k, I], in the order of `arranged.pairs`, for a `next_kind`.

    Shapes: weight [E, 2 I, H] contiguous, the gate first; bias [E, 2 I].

    Args:
        weight: Of the product.
        bias: Of the product.
        gate: How gate and up become one.
        arranged: The pairs.
        num_chosen: k.
        next_kind: Of the weight that the result is multiplied with. With fp8 a program has 128 outputs.
        like: A tensor of the tokens' type.
        tuning: How the work is cut.
        device: Where it runs.
        workspace: For products of 4 bits that are split.
    """
    if isinstance(weight, Int4Product):
        x = arranged.normed.values
        cut = _int4_tuning(tuning, weight)
        return Inputs(project_int4_of_experts(x, weight, arranged, num_chosen, cut, device, workspace))
    y = Inputs.empty(len(arranged.pairs), weight.num_outputs // 2, next_kind, like)
    _launch_tiles(arranged.normed, weight, bias, arranged, y, num_chosen, next_kind, tuning, device, gate)
    return y


def down_tiles(
    x: Inputs,
    weight: Weight | Int4Product,
    bias: torch.Tensor | None,
    arranged: Arranged,
    num_chosen: int,
    like: torch.Tensor,
    tuning: Tuning,
    device: Device,
    workspace: Workspace,
) -> torch.Tensor:
    """Return each pair's product, [T * k, H], in the order of their numbers, in the type of `like`.

    Shapes: x [T * k, I], in the order of `arranged.pairs`; weight [E, H, I] contiguous; bias [E, H].
    """
    if isinstance(weight, Int4Product):
        cut = _int4_tuning(tuning, weight)
        return project_int4_of_experts(x.values, weight, arranged, num_chosen, cut, device, workspace)
    y = Inputs.empty(len(x.values), weight.num_outputs, "plain", like)
    _launch_tiles(x, weight, bias, arranged, y, num_chosen, "plain", tuning, device)
    return y.values


def _int4_tuning(tuning: Tuning, product: Int4Product) -> Int4Tuning:
    strips, pieces = max(1, tuning.outputs // TILE), max(1, tuning.inputs // (TILE * tiles_of_piece(product.weight)))
    return Int4Tuning(strips, tuning.num_splits, tuning.num_warps, tuning.num_stages, pieces=pieces)


def sum_of_experts(y: torch.Tensor, routed: Routed, residual: torch.Tensor, device: Device) -> torch.Tensor:
    """Return residual + each token's products times their weights, [T, H].

    Shapes: y [T * k, H] contiguous; residual [T, H], overwritten.
    """
    num_tokens, num_outputs = residual.shape
    block = min(_SUMMED, triton.next_power_of_2(num_outputs))
    _sum_of_experts[(triton.cdiv(num_outputs, block), num_tokens)](
        y,
        routed.weights,
        residual,
        num_outputs,
        CHOSEN=routed.experts.shape[1],
        HAS_OTHERS=routed.has_others,
        BLOCK=block,
        OVERLAPS=device.has_dependent_launch,
        num_warps=max(1, block // 256),
        **device.launch_options,
    )
    return residual


def _tensors(weight: Weight) -> tuple[torch.Tensor, ...]:
    """Return data and scale; the data where there is none."""
    return weight.data, weight.data if weight.scale is None else weight.scale


def _form(weight: Weight) -> dict[str, Any]:
    """Return what kernels are compiled for, of a weight."""
    rows, columns = weight.block
    return {"KIND": weight.kind, "BLOCK_OUT": rows, "BLOCK_IN": columns}


def _launch_tiles(
    x: Inputs,
    weight: Weight,
    bias: torch.Tensor | None,
    arranged: Arranged,
    y: Inputs,
    num_chosen: int,
    next_kind: WeightKind,
    tuning: Tuning,
    device: Device,
    gate: Gate | None = None,
) -> None:
    num_tiles, (num_outputs, num_inputs) = arranged.tiles.shape[1], (y.values.shape[1], weight.num_inputs)
    inputs = group_inputs(weight) or tuning.inputs
    outputs = SCALED if y.scale is not None else tuning.outputs
    _multiply_tiles[(triton.cdiv(num_outputs, outputs), num_tiles)](
        x.values,
        x.values if x.scale is None else x.scale,
        *_tensors(weight),
        x.values if bias is None else bias,
        arranged.pairs,
        arranged.tiles,
        num_tiles,
        y.values,
        y.values if y.scale is None else y.scale,
        num_outputs,
        num_inputs,
        **_form(weight),
        **constants_of(gate or SILU),
        HAS_BIAS=bias is not None,
        NEXT_KIND=next_kind,
        CHOSEN=num_chosen,
        HAS_GATE=gate is not None,
        IS_EARLY=gate is None and arranged.tile_rows <= 32 and weight.kind == "plain" and not device.is_invariant,
        ROWS=arranged.tile_rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        SCALED=SCALED,
        IS_EVEN=num_inputs % inputs == 0,
        IS_EVEN_OUT=num_outputs % outputs == 0,
        OVERLAPS=device.has_dependent_launch,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **device.launch_options,
    )


@triton.jit
def _scale(scale, matrix_row, num_inputs, begin, KIND: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Return an output's scale for the group of inputs at `begin`, float32. `matrix_row`: of `scale`."""
    factor = tl.full(matrix_row.shape, 1.0, tl.float32)
    if KIND != "plain":
        factor = tl.load(scale + matrix_row * tl.cdiv(num_inputs, BLOCK_IN) + begin // BLOCK_IN).to(tl.float32)
    return factor


@triton.jit
def _added(total, piece, value, scale, KIND: tl.constexpr):
    """Return total + a piece of the weight times x, element by element. Shapes alike, or 1 where they repeat."""
    if KIND == "fp8":
        total += piece.to(tl.float32) * scale * value
    else:
        total += piece.to(tl.float32) * value
    return total


@triton.jit
def _gate_up_few(
    x,
    norm_weight,
    eps,
    weight,
    weight_scale,
    bias,
    experts,
    y,
    num_outputs,
    num_inputs,
    KIND: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    OWN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHOSEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    pair = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    # Past the end, the last output is computed again, and not stored.
    read_output = tl.minimum(output, num_outputs - 1)
    cell = read_output.to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_offset = num_outputs.to(tl.int64) * num_inputs
    token = x + (pair // CHOSEN) * num_inputs
    gate = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    up = gate
    squares = tl.zeros((INPUTS,), tl.float32)
    start(OVERLAPS)
    expert = tl.load(experts + pair).to(tl.int64)
    end = num_inputs
    if OWN is not None:  # of another member's expert nothing is read
        end = tl.where(expert < OWN, num_inputs, 0)
        expert = tl.minimum(expert, OWN - 1)
    of_expert = weight + expert * (2 * up_offset)
    first_scale = expert * tl.cdiv(2 * num_outputs, BLOCK_OUT)
    gate_row = first_scale + read_output // BLOCK_OUT
    up_row = first_scale + (num_outputs + read_output) // BLOCK_OUT
    for begin in tl.range(0, end, INPUTS, num_stages=STAGES):
        inside = (begin + column < num_inputs)[None, :]
        gate_piece = load(of_expert + begin + cell, inside, IS_EVEN)
        up_piece = load(of_expert + up_offset + begin + cell, inside, IS_EVEN)
        value = load(token + begin + column, begin + column < num_inputs, IS_EVEN).to(tl.float32)
        if HAS_NORM:
            squares += value * value
            value *= load(norm_weight + begin + column, begin + column < num_inputs, IS_EVEN).to(tl.float32)
        value = value[None, :]
        scale = _scale(weight_scale, gate_row, num_inputs, begin, KIND, BLOCK_IN)
        up_scale = _scale(weight_scale, up_row, num_inputs, begin, KIND, BLOCK_IN)
        gate = _added(gate, gate_piece, value, scale[:, None], KIND)
        up = _added(up, up_piece, value, up_scale[:, None], KIND)
    factor = tl.rsqrt(tl.sum(squares, 0) / num_inputs + eps) if HAS_NORM else 1.0
    of_gate, of_up = tl.sum(gate, 1) * factor, tl.sum(up, 1) * factor
    if HAS_BIAS:
        of_expert_bias = bias + expert * (2 * num_outputs) + read_output
        of_gate += tl.load(of_expert_bias).to(tl.float32)
        of_up += tl.load(of_expert_bias + num_outputs).to(tl.float32)
    result = gated(of_gate, of_up, ALPHA, LIMIT, OFFSET, CUBIC)
    tl.store(y + pair * num_outputs + output, result.to(y.dtype.element_ty), mask=output < num_outputs)


@triton.jit
def _down_few(
    x,
    weight,
    weight_scale,
    bias,
    experts,
    weights,
    residual,
    y,
    num_outputs,
    num_inputs,
    KIND: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    OWN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    rank = tl.arange(0, CHOSEN_PADDED)
    is_chosen = rank < CHOSEN
    pair = token * CHOSEN + tl.minimum(rank, CHOSEN - 1)
    # The launch before the last wrote them, see `raypp.ops.cuda.kernel_launch`.
    expert = tl.load(experts + pair, cache_modifier=".cg").to(tl.int64)
    share = tl.load(weights + pair, mask=is_chosen, other=0.0, cache_modifier=".cg")
    if OWN is not None:  # others' have no share
        is_chosen = is_chosen & (expert < OWN)
        expert = tl.minimum(expert, OWN - 1)
    read_output = tl.minimum(output, num_outputs - 1)[None, :]
    cell = weight + (expert[:, None] * num_outputs + read_output)[:, :, None] * num_inputs + column[None, None, :]
    scale_row = expert[:, None] * tl.cdiv(num_outputs, BLOCK_OUT) + read_output // BLOCK_OUT
    x_row = x + pair[:, None] * num_inputs
    inside = is_chosen[:, None, None] & (column < num_inputs)[None, None, :]
    first_piece = load(cell, inside, IS_EVEN)
    scale = _scale(weight_scale, scale_row, num_inputs, 0, KIND, BLOCK_IN)
    start(OVERLAPS)
    before = tl.load(residual + token * num_outputs + output, mask=output < num_outputs, other=0.0).to(tl.float32)
    value = load(x_row + column[None, :], column[None, :] < num_inputs, IS_EVEN).to(tl.float32)
    total = tl.zeros((CHOSEN_PADDED, OUTPUTS, INPUTS), tl.float32)
    total = _added(total, first_piece, value[:, None, :], scale[:, :, None], KIND)
    for begin in tl.range(INPUTS, num_inputs, INPUTS, num_stages=STAGES):
        inside = is_chosen[:, None, None] & (begin + column < num_inputs)[None, None, :]
        piece = load(cell + begin, inside, IS_EVEN)
        value = load(x_row + begin + column[None, :], begin + column[None, :] < num_inputs, IS_EVEN).to(tl.float32)
        scale = _scale(weight_scale, scale_row, num_inputs, begin, KIND, BLOCK_IN)
        total = _added(total, piece, value[:, None, :], scale[:, :, None], KIND)
    of_experts = tl.sum(total, 2)
    if HAS_BIAS:
        of_experts += tl.load(bias + expert[:, None] * num_outputs + read_output).to(tl.float32)
    result = before + tl.sum(of_experts * share[:, None], 0)
    tl.store(y + token * num_outputs + output, result.to(y.dtype.element_ty), mask=output < num_outputs)


@triton.jit
def _multiplied(total, piece, value, scale, x_scale, KIND: tl.constexpr):
    """Return total + a piece of the weight times the tokens, by tensor cores, [OUTPUTS, ROWS]."""
    if KIND == "plain":
        total = tl.dot(piece, tl.trans(value), total)
    else:
        total += tl.dot(piece, tl.trans(value)) * (scale[:, None] * x_scale[None, :])
    return total


@triton.jit(do_not_specialize=["num_tiles"])
def _multiply_tiles(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    pairs,
    tiles,
    num_tiles,
    y,
    y_scale,
    num_outputs,
    num_inputs,
    KIND: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NEXT_KIND: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_GATE: tl.constexpr,
    IS_EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_EVEN_OUT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    HALVES: tl.constexpr = 2 if HAS_GATE else 1
    strip, tile = tl.program_id(0), tl.program_id(1)
    output = strip * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    # Past the end, outputs and rows are computed again, and not stored.
    read_output = output if IS_EVEN_OUT else tl.minimum(output, num_outputs - 1)
    cell = read_output.to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_offset = num_outputs.to(tl.int64) * num_inputs
    inside = (column < num_inputs)[None, :]
    if not IS_EARLY:
        start(OVERLAPS)
    expert = tl.load(tiles + tile, cache_modifier=".cg").to(tl.int64)
    first_row = tl.load(tiles + num_tiles + tile, cache_modifier=".cg")
    num_rows = tl.load(tiles + 2 * num_tiles + tile, cache_modifier=".cg")
    if expert >= 0:
        row = tl.arange(0, ROWS)
        place = (first_row + tl.minimum(row, num_rows - 1)).to(tl.int64)
        pair = tl.load(pairs + place, cache_modifier=".cg").to(tl.int64)
        x_row = pair // CHOSEN if HAS_GATE else place
        x_cell = x_row[:, None] * num_inputs + column[None, :]
        x_scale_row = x_scale + x_row * tl.cdiv(num_inputs, SCALED)
        matrix = weight + expert * (HALVES * up_offset)
        first_scale = expert * tl.cdiv(HALVES * num_outputs, BLOCK_OUT)
        scale_row = first_scale + read_output // BLOCK_OUT
        up_scale_row = first_scale + (num_outputs + read_output) // BLOCK_OUT
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        up_total = total
        of_x = tl.full((ROWS,), 1.0, tl.float32)
        begin_at = 0
        if IS_EARLY:
            begin_at = INPUTS
            first_piece = load(matrix + cell, inside, IS_EVEN)
            start(OVERLAPS)
            first_value = load(x + x_cell, inside, IS_EVEN)
        for begin in range(begin_at, num_inputs, INPUTS):
            inside = (begin + column < num_inputs)[None, :]
            value = load(x + x_cell + begin, inside, IS_EVEN)
            if KIND == "fp8":
                of_x = tl.load(x_scale_row + begin // SCALED)
            scale = _scale(weight_scale, scale_row, num_inputs, begin, KIND, BLOCK_IN)
            piece = load(matrix + cell + begin, inside, IS_EVEN)
            fence_shared(OVERLAPS)
            total = _multiplied(total, piece, value, scale, of_x, KIND)
            if HAS_GATE:
                up_scale = _scale(weight_scale, up_scale_row, num_inputs, begin, KIND, BLOCK_IN)
                up_piece = load(matrix + up_offset + cell + begin, inside, IS_EVEN)
                up_total = _multiplied(up_total, up_piece, value, up_scale, of_x, KIND)
        if IS_EARLY:
            total = tl.dot(first_piece, tl.trans(first_value), total)
        if HAS_BIAS:
            of_expert_bias = bias + expert * (HALVES * num_outputs) + read_output
            total += tl.load(of_expert_bias).to(tl.float32)[:, None]
            if HAS_GATE:
                up_total += tl.load(of_expert_bias + num_outputs).to(tl.float32)[:, None]
        result = gated(total, up_total, ALPHA, LIMIT, OFFSET, CUBIC) if HAS_GATE else total
        y_row = place if HAS_GATE else pair
        in_row = row < num_rows
        if NEXT_KIND == "fp8":
            result, of_y = in_8_bits(result, 0)
            tl.store(y_scale + y_row * tl.cdiv(num_outputs, SCALED) + strip, of_y, mask=in_row)
        mask = in_row[:, None] & (output < num_outputs)[None, :]
        y_cell = y_row[:, None] * num_outputs + output[None, :]
        tl.store(y + y_cell, tl.trans(result.to(y.dtype.element_ty)), mask=mask)
    elif IS_EARLY:
        start(OVERLAPS)


@triton.jit
def _sum_of_experts(
    y,
    weights,
    residual,
    num_outputs,
    CHOSEN: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = output < num_outputs
    start(OVERLAPS)
    total = tl.load(residual + token * num_outputs + output, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(CHOSEN):
        pair = token * CHOSEN + rank
        share = tl.load(weights + pair)
        is_there = inside
        if HAS_OTHERS:  # of their pairs there is no product
            is_there = output < tl.where(share == 0.0, 0, num_outputs)
        value = tl.load(y + pair * num_outputs + output, mask=is_there, other=0.0).to(tl.float32)
        total += share * value
    tl.store(residual + token * num_outputs + output, total.to(residual.dtype.element_ty), mask=inside)
