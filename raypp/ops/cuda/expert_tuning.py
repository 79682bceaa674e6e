"""Chooses how the products of experts are cut, by the tokens of a step and the shapes."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from raypp.ops.cuda.kernel_launch import Device
from raypp.ops.cuda.projection import Tuning
from raypp.ops.weight import WeightKind

MOST_FEW_PAIRS = 16
"""Up to so many pairs of a token and an expert are multiplied element by element."""


@dataclass(frozen=True)
class ExpertShape:
    """What the cuts depend on, besides the tokens."""

    hidden: int  # H
    intermediate: int  # I
    num_experts: int  # E
    num_chosen: int  # k
    kinds: tuple[WeightKind, WeightKind] = ("plain", "plain")  # of gate_up and of down


@dataclass(frozen=True)
class ExpertCut:
    """How the work is cut.

    Args:
        tile_rows: The most pairs of a tile; 0: a program has one pair or token, and multiplies element by element.
        gate_up: Of the first product: pairs of a gate and an up.
        down: Of the second.
    """

    tile_rows: int
    gate_up: Tuning
    down: Tuning


def choose_cut(num_tokens: int, shape: ExpertShape, device: Device) -> ExpertCut:
    """Return how the experts of so many tokens are computed."""
    num_pairs = num_tokens * shape.num_chosen
    if num_pairs <= MOST_FEW_PAIRS:
        return ExpertCut(0, _few_gate_up(shape.kinds[0]), _few_down(shape))
    rows = triton.next_power_of_2(triton.cdiv(num_pairs, shape.num_experts))
    tile_rows = (
        16 if rows <= 8 else 32 if rows <= 16 else 64 if rows <= 32 or shape.kinds != ("plain", "plain") else 128
    )
    gate_up, down = shape.kinds
    return ExpertCut(tile_rows, _tiles(tile_rows, gate_up, True), _tiles(tile_rows, down, False))


def _few_gate_up(kind: WeightKind) -> Tuning:
    """Return how the first product of few pairs is cut."""
    if kind == "plain":
        return Tuning(4, 1024, num_stages=2)
    return Tuning(16, 128, num_warps=4 if kind == "fp8" else 2, num_stages=4)


def _few_down(shape: ExpertShape) -> Tuning:
    """Return how the second product of few pairs is cut; a program has all of a token's experts."""
    rows = max(1, 32 // triton.next_power_of_2(shape.num_chosen))
    if shape.kinds[1] == "plain":
        return Tuning(min(8, rows), 256, num_stages=3)
    return Tuning(min(16, rows), 128, num_stages=4)


def _tiles(tile_rows: int, kind: WeightKind, is_gated: bool) -> Tuning:
    """Return how a product of tiles is cut."""
    if kind == "fp8":
        return Tuning(128, 128, num_warps=8 if tile_rows == 64 else 4, num_stages=3 if is_gated else 4)
    if kind == "int4":
        return Tuning(64, 128, num_warps=8 if tile_rows == 64 else 4, num_stages=4)
    if tile_rows == 128:
        return Tuning(128, 64, num_warps=8, num_stages=4)
    return Tuning(64, 64, num_stages=4) if is_gated or tile_rows > 16 else Tuning(64, 128, num_stages=4)
