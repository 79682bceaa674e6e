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
    """Strips of the weight, as many as processors or half of that; split along K only where they are fewer still.

    The parts of a split go through memory, and one program waits for all of them.
    """
    processors = device.num_processors
    if weights.is_gated:  # two weights and two sums leave fewer registers
        return Tuning(outputs=16, inputs=128, num_stages=5)
    if triton.cdiv(weights.num_outputs, 32) >= 0.75 * processors:
        return Tuning(outputs=32, inputs=256, num_stages=4)
    num_strips, num_splits = triton.cdiv(weights.num_outputs, 16), 1
    while weights.norm_eps is None and num_splits < _MAX_SPLITS and num_strips * num_splits < 0.45 * processors:
        num_splits *= 2
    return Tuning(outputs=16, inputs=256, num_splits=num_splits, num_stages=6)
