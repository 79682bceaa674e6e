"""Which way a product takes, by its rows and shape. Figures: docs/design/0045-gpu-kernels.md.

The library (cuBLAS) reads weights at about 80 % of the memory's rate when rows are few, and takes 5 us however small
the weight; from some number of rows on it is compute that counts, and cuBLAS is better at that.
"""

from __future__ import annotations

import triton

from raypp.ops.kernels.launch import Device
from raypp.ops.kernels.projection import Tuning, Weights

MAX_ROWS = 32
"""Beyond, the library computes."""

SMALL_WEIGHT_BYTES = 16 << 20
"""With several rows the library is better from here on; below, its fixed time per product counts."""

_PIECE = 8192  # elements of the weight that a program asks for at once: 16 KiB
_MAX_SPLITS = 8


def choose_projection(num_rows: int, weights: Weights, device: Device) -> Tuning | None:
    """Return how own kernels compute a product with so many rows; None where the library is faster."""
    if num_rows == 1:
        return _tune_row(weights)
    if 1 < num_rows <= MAX_ROWS and weights.weight.nbytes <= SMALL_WEIGHT_BYTES:
        return _tune_rows(weights, device)
    return None


def _tune_row(weights: Weights) -> Tuning:
    """Whole rows of the weight at once where they are short enough: all is asked for before the input is there."""
    inputs = min(4096, triton.next_power_of_2(weights.num_inputs))
    outputs = max(1, _PIECE // inputs // (2 if weights.is_gated else 1))
    return Tuning(outputs=min(outputs, 16), inputs=inputs, num_stages=3)


def _tune_rows(weights: Weights, device: Device) -> Tuning:
    """Strips of 32 rows of the weight; split along K where that leaves processors without work."""
    outputs = 16 if weights.is_gated else 32
    can_split = not weights.is_gated and weights.norm_eps is None
    num_strips, num_splits = triton.cdiv(weights.num_outputs, outputs), 1
    while can_split and num_splits < _MAX_SPLITS and num_strips * num_splits < 0.75 * device.num_processors:
        num_splits *= 2
    if weights.is_gated:  # two weights and two sums leave fewer registers
        return Tuning(outputs=outputs, inputs=128, num_stages=5)
    return Tuning(outputs=outputs, inputs=256, num_splits=num_splits, num_stages=4)
