"""Which way a product takes, by its rows and shape. Figures: docs/design/0040-gpu-kernels.md.

The library (cuBLAS) reads weights at about 80 % of the memory's rate when rows are few, and takes 5 us however small
the weight; from some number of rows on it is compute that counts, and cuBLAS is better at that.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from raypp.ops.kernels.launch import Device
from raypp.ops.kernels.projection import Tuning, Weights

MAX_ROWS = 32
"""Beyond, the library computes."""

_MAX_NORM_ROWS = 16  # with more, each program would normalize more than it multiplies
_PIECE = 8192  # elements of the weight that a program asks for at once: 16 KiB
_MAX_SPLITS = 8


@dataclass(frozen=True)
class Choice:
    """How to launch a product, and whether the norm before it is part of it."""

    tuning: Tuning
    fuses_norm: bool


def choose_projection(num_rows: int, weights: Weights, device: Device) -> Choice | None:
    """Return how own kernels compute a product with so many rows; None where the library is faster."""
    if not 1 <= num_rows <= MAX_ROWS:
        return None
    if num_rows == 1:
        return Choice(_tune_row(weights), fuses_norm=True)
    fuses_norm = weights.norm_eps is not None and num_rows <= _MAX_NORM_ROWS
    return Choice(_tune_rows(weights, device, can_split=not (fuses_norm or weights.is_gated)), fuses_norm)


def _tune_row(weights: Weights) -> Tuning:
    """Whole rows of the weight at once where they are short enough: all is asked for before the input is there."""
    inputs = min(4096, triton.next_power_of_2(weights.num_inputs))
    outputs = max(1, _PIECE // inputs // (2 if weights.is_gated else 1))
    return Tuning(outputs=min(outputs, 16), inputs=inputs, num_stages=3)


def _tune_rows(weights: Weights, device: Device, *, can_split: bool) -> Tuning:
    """Strips of 32 outputs; split along K until there are about two programs per processor."""
    outputs = 16 if weights.is_gated else 32
    num_strips, num_splits = triton.cdiv(weights.num_outputs, outputs), 1
    while can_split and num_splits < _MAX_SPLITS and num_strips * num_splits < 1.5 * device.num_processors:
        num_splits *= 2
    return Tuning(outputs=outputs, inputs=128, num_splits=num_splits, num_stages=4)
