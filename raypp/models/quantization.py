"""How a checkpoint's weights are quantized, by the `quantization_config` of its config.json. Needs no torch.

Which tensors a format stores, and how they become a `raypp.ops.weight.Weight`, is in `raypp.models.weight_formats`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

WeightFormat = Literal["fp8", "compressed_fp8", "awq", "gptq", "compressed_int4", "online_fp8"]
"""Tensors by which a checkpoint stores a weight; `online_fp8` is 16 bits that become FP8 when they are read."""

_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The form of a model's linear layers, embedding and LM head aside."""

    format: WeightFormat
    block: tuple[int, int]  # outputs and inputs that share a scale; 0 inputs: all of them
    has_zeros: bool = False  # int4: each block has a zero of its own
    has_order: bool = False  # int4: inputs are sorted by their group (act-order)
    skipped: tuple[str, ...] = ()  # modules, or patterns behind `re:`, that stay in 16 bits

    @property
    def bits(self) -> int:
        """Of an element."""
        return 4 if self.format in ("awq", "gptq", "compressed_int4") else 8

    def weight_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Return the bytes of one weight: elements, scales, zeros, order."""
        rows, columns = self.block
        num_blocks = math.ceil(num_outputs / rows) * (math.ceil(num_inputs / columns) if columns else 1)
        total = num_outputs * num_inputs * self.bits // 8 + num_blocks * (_SCALE_BYTES + self.has_zeros)
        return total + 8 * num_inputs * self.has_order
