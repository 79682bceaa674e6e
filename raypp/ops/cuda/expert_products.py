"""The products of each token's experts, and their weighted sum.

    few pairs   gate_up_few: a program multiplies some rows of a pair's expert with the token element by element
                down_few: a program computes some outputs of a token, all of its experts' with their weights; no more
                than the residual is added
    more        gate_up_tiles, down_tiles: a program multiplies a strip of an expert's weight with the pairs of a tile
                by tensor cores; sum_of_experts adds a token's results in their order

Experts of `down` are known since the launch before the last: their weights are loaded before the previous kernel has
finished (see `raypp.ops.cuda.kernel_launch`).

Twin: `experts` of tests/gpu/reference_ops.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.cuda.between_products import silu
from raypp.ops.cuda.kernel_launch import Device, start
from raypp.ops.cuda.projection import Tuning
from raypp.ops.cuda.router_kernels import Arranged, Routed

_SUMMED = 1024  # outputs of a program that adds


def gate_up_few(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    routed: Routed,
    tuning: Tuning,
    device: Device,
) -> torch.Tensor:
    """Return silu(gate) * up of norm(x) for each pair, [T * k, I].

    Shapes: x [T, H] contiguous; norm_weight [H]; weight [E, 2 I, H] contiguous, the gate first.
    """
    num_pairs, num_outputs, num_inputs = routed.experts.numel(), weight.shape[1] // 2, weight.shape[2]
    y = torch.empty(num_pairs, num_outputs, dtype=x.dtype, device=x.device)
    _gate_up_few[(triton.cdiv(num_outputs, tuning.outputs), num_pairs)](
        x,
        norm_weight,
        eps,
        weight,
        routed.experts,
        y,
        num_outputs,
        num_inputs,
        CHOSEN=routed.experts.shape[1],
        OUTPUTS=tuning.outputs,
        INPUTS=tuning.inputs,
        IS_EVEN=num_inputs % tuning.inputs == 0,
        STAGES=tuning.num_stages,
        OVERLAPS=device.has_dependent_launch,
        num_warps=tuning.num_warps,
        **device.launch_options,
    )
    return y


def down_few(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, routed: Routed, tuning: Tuning, device: Device
) -> torch.Tensor:
    """Return residual + the weighted sum of a token's products, [T, H].

    Shapes: x [T * k, I] contiguous; residual [T, H], left as it is; weight [E, H, I] contiguous.
    """
    (num_tokens, chosen), (_, num_outputs, num_inputs) = routed.experts.shape, weight.shape
    y = torch.empty_like(residual)
    _down_few[(triton.cdiv(num_outputs, tuning.outputs), num_tokens)](
        x,
        weight,
        routed.experts,
        routed.weights,
        residual,
        y,
        num_outputs,
        num_inputs,
        CHOSEN=chosen,
        CHOSEN_PADDED=triton.next_power_of_2(chosen),
        OUTPUTS=tuning.outputs,
        INPUTS=tuning.inputs,
        IS_EVEN=num_inputs % tuning.inputs == 0 and triton.next_power_of_2(chosen) == chosen,
        STAGES=tuning.num_stages,
        OVERLAPS=device.has_dependent_launch,
        num_warps=tuning.num_warps,
        **device.launch_options,
    )
    return y


def gate_up_tiles(
    weight: torch.Tensor, arranged: Arranged, num_chosen: int, tuning: Tuning, device: Device
) -> torch.Tensor:
    """Return silu(gate) * up for each pair, [T * k, I], in the order of `arranged.pairs`.

    Shapes: weight [E, 2 I, H] contiguous, the gate first.
    """
    y = torch.empty(len(arranged.pairs), weight.shape[1] // 2, dtype=arranged.normed.dtype, device=weight.device)
    _launch_tiles(arranged.normed, weight, arranged, y, num_chosen, tuning, device, is_gated=True)
    return y


def down_tiles(
    x: torch.Tensor, weight: torch.Tensor, arranged: Arranged, num_chosen: int, tuning: Tuning, device: Device
) -> torch.Tensor:
    """Return each pair's product, [T * k, H], in the order of their numbers.

    Shapes: x [T * k, I] contiguous, in the order of `arranged.pairs`; weight [E, H, I] contiguous.
    """
    y = torch.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)
    _launch_tiles(x, weight, arranged, y, num_chosen, tuning, device, is_gated=False)
    return y


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
        BLOCK=block,
        OVERLAPS=device.has_dependent_launch,
        num_warps=max(1, block // 256),
        **device.launch_options,
    )
    return residual


def _launch_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    arranged: Arranged,
    y: torch.Tensor,
    num_chosen: int,
    tuning: Tuning,
    device: Device,
    *,
    is_gated: bool,
) -> None:
    num_tiles, (num_outputs, num_inputs) = arranged.tiles.shape[1], (y.shape[1], weight.shape[2])
    _multiply_tiles[(triton.cdiv(num_outputs, tuning.outputs), num_tiles)](
        x,
        weight,
        arranged.pairs,
        arranged.tiles,
        num_tiles,
        y,
        num_outputs,
        num_inputs,
        CHOSEN=num_chosen,
        HAS_GATE=is_gated,
        IS_EARLY=not is_gated and arranged.tile_rows <= 32,
        ROWS=arranged.tile_rows,
        OUTPUTS=tuning.outputs,
        INPUTS=tuning.inputs,
        IS_EVEN=num_inputs % tuning.inputs == 0,
        IS_EVEN_OUT=num_outputs % tuning.outputs == 0,
        OVERLAPS=device.has_dependent_launch,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **device.launch_options,
    )


@triton.jit
def _load(pointer, inside, IS_EVEN: tl.constexpr):
    """Return what lies inside, 0 elsewhere. Without a mask where all pieces are whole."""
    if IS_EVEN:
        return tl.load(pointer)
    return tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def _gate_up_few(
    x,
    norm_weight,
    eps,
    weight,
    experts,
    y,
    num_outputs,
    num_inputs,
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
    cell = tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_offset = num_outputs.to(tl.int64) * num_inputs
    token = x + (pair // CHOSEN) * num_inputs
    gate = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    up = gate
    squares = tl.zeros((INPUTS,), tl.float32)
    start(OVERLAPS)
    of_expert = weight + tl.load(experts + pair).to(tl.int64) * (2 * up_offset)
    for begin in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        inside = begin + column < num_inputs
        gate_piece = _load(of_expert + begin + cell, inside[None, :], IS_EVEN)
        up_piece = _load(of_expert + up_offset + begin + cell, inside[None, :], IS_EVEN)
        value = _load(token + begin + column, inside, IS_EVEN).to(tl.float32)
        factor = _load(norm_weight + begin + column, inside, IS_EVEN).to(tl.float32)
        squares += value * value
        value *= factor
        gate += gate_piece.to(tl.float32) * value[None, :]
        up += up_piece.to(tl.float32) * value[None, :]
    scale = tl.rsqrt(tl.sum(squares, 0) / num_inputs + eps)
    result = silu(tl.sum(gate, 1) * scale) * (tl.sum(up, 1) * scale)
    tl.store(y + pair * num_outputs + output, result.to(y.dtype.element_ty), mask=output < num_outputs)


@triton.jit
def _down_few(
    x,
    weight,
    experts,
    weights,
    residual,
    y,
    num_outputs,
    num_inputs,
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
    # What the launch before the last wrote can be read already, but not from the first-level cache.
    expert = tl.load(experts + pair, cache_modifier=".cg").to(tl.int64)
    share = tl.load(weights + pair, mask=is_chosen, other=0.0, cache_modifier=".cg")
    row = expert[:, None] * num_outputs + tl.minimum(output, num_outputs - 1)[None, :]
    cell = weight + row[:, :, None] * num_inputs + column[None, None, :]
    x_cell = x + pair[:, None] * num_inputs + column[None, :]
    inside = is_chosen[:, None] & (column < num_inputs)[None, :]
    first_piece = _load(cell, inside[:, None, :], IS_EVEN)
    start(OVERLAPS)
    before = tl.load(residual + token * num_outputs + output, mask=output < num_outputs, other=0.0).to(tl.float32)
    value = _load(x_cell, inside, IS_EVEN).to(tl.float32)
    total = first_piece.to(tl.float32) * value[:, None, :]
    for begin in tl.range(INPUTS, num_inputs, INPUTS, num_stages=STAGES):
        inside = is_chosen[:, None] & (begin + column < num_inputs)[None, :]
        piece = _load(cell + begin, inside[:, None, :], IS_EVEN)
        value = _load(x_cell + begin, inside, IS_EVEN).to(tl.float32)
        total += piece.to(tl.float32) * value[:, None, :]
    result = before + tl.sum(tl.sum(total, 2) * share[:, None], 0)
    tl.store(y + token * num_outputs + output, result.to(y.dtype.element_ty), mask=output < num_outputs)


@triton.jit(do_not_specialize=["num_tiles"])
def _multiply_tiles(
    x,
    weight,
    pairs,
    tiles,
    num_tiles,
    y,
    num_outputs,
    num_inputs,
    CHOSEN: tl.constexpr,
    HAS_GATE: tl.constexpr,
    IS_EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_EVEN_OUT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    strip, tile = tl.program_id(0), tl.program_id(1)
    output = strip * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    # Past the end, outputs and rows are computed again, and not stored.
    read_output = output if IS_EVEN_OUT else tl.minimum(output, num_outputs - 1)
    cell = read_output.to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_offset = num_outputs.to(tl.int64) * num_inputs
    inside = (column < num_inputs)[None, :]
    if HAS_GATE:
        start(OVERLAPS)
    # What the launch before the last wrote can be read already, but not from the first-level cache.
    expert = tl.load(tiles + tile, cache_modifier=".cg")
    first_row = tl.load(tiles + num_tiles + tile, cache_modifier=".cg")
    num_rows = tl.load(tiles + 2 * num_tiles + tile, cache_modifier=".cg")
    if expert >= 0:
        row = tl.arange(0, ROWS)
        place = first_row + tl.minimum(row, num_rows - 1)
        pair = tl.load(pairs + place, cache_modifier=".cg").to(tl.int64)
        matrix = weight + expert.to(tl.int64) * (2 * up_offset if HAS_GATE else up_offset)
        if HAS_GATE:
            x_cell = (pair // CHOSEN)[:, None] * num_inputs + column[None, :]
        else:
            x_cell = place.to(tl.int64)[:, None] * num_inputs + column[None, :]
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        up_total = total
        begin_at = 0
        if IS_EARLY:
            begin_at = INPUTS
            first_piece = _load(matrix + cell, inside, IS_EVEN)
            start(OVERLAPS)
            first_value = _load(x + x_cell, inside, IS_EVEN)
        elif not HAS_GATE:
            start(OVERLAPS)
        for begin in range(begin_at, num_inputs, INPUTS):
            inside = (begin + column < num_inputs)[None, :]
            value = _load(x + x_cell + begin, inside, IS_EVEN)
            piece = _load(matrix + cell + begin, inside, IS_EVEN)
            total = tl.dot(piece, tl.trans(value), total)
            if HAS_GATE:
                up_piece = _load(matrix + up_offset + cell + begin, inside, IS_EVEN)
                up_total = tl.dot(up_piece, tl.trans(value), up_total)
        if IS_EARLY:
            total = tl.dot(first_piece, tl.trans(first_value), total)
        result = total
        if HAS_GATE:
            result = silu(total) * up_total
            y_row = place.to(tl.int64)
        else:
            y_row = pair
        mask = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
        y_cell = y_row[:, None] * num_outputs + output[None, :]
        tl.store(y + y_cell, tl.trans(result.to(y.dtype.element_ty)), mask=mask)
    elif not HAS_GATE:
        start(OVERLAPS)


@triton.jit
def _sum_of_experts(
    y, weights, residual, num_outputs, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    token = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = output < num_outputs
    start(OVERLAPS)
    total = tl.load(residual + token * num_outputs + output, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(CHOSEN):
        pair = token * CHOSEN + rank
        value = tl.load(y + pair * num_outputs + output, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * value
    tl.store(residual + token * num_outputs + output, total.to(residual.dtype.element_ty), mask=inside)
