"""Chooses how the products of experts are cut, by the tokens of a step and the shapes."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from raypp.ops.cuda.kernel_launch import Device
from raypp.ops.cuda.projection import Tuning

MOST_FEW_PAIRS = 16
"""Up to so many pairs of a token and an expert are multiplied element by element."""


@dataclass(frozen=True)
class ExpertShape:
    """What the cuts depend on, besides the tokens."""

    hidden: int  # H
    intermediate: int  # I
    num_experts: int  # E
    num_chosen: int  # k


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
        rows = max(1, 16 // triton.next_power_of_2(shape.num_chosen))
        return ExpertCut(0, Tuning(4, 1024, num_stages=2), Tuning(min(8, 2 * rows), 256, num_stages=3))
    rows = triton.next_power_of_2(triton.cdiv(num_pairs, shape.num_experts))
    if rows <= 8:
        return ExpertCut(16, Tuning(64, 64, num_stages=4), Tuning(64, 128, num_stages=4))
    if rows <= 32:
        return ExpertCut(32, Tuning(64, 64, num_stages=4), Tuning(64, 128, num_stages=4))
    if rows <= 64:
        return ExpertCut(64, Tuning(64, 64, num_stages=4), Tuning(128, 64, num_stages=4))
    return ExpertCut(128, Tuning(128, 64, num_warps=8, num_stages=4), Tuning(128, 64, num_warps=8, num_stages=4))
