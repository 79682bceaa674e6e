"""The gated MLP that all families share."""

from __future__ import annotations

import torch

from raypp.models.config import ModelConfig
from raypp.models.weights import WeightReader
from raypp.ops.activation import silu_and_mul
from raypp.ops.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are one product.

    Args:
        config: The model's.
        weights: Below the MLP's prefix.
    """

    def __init__(self, config: ModelConfig, weights: WeightReader) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        rows = (intermediate, intermediate)
        gate_up_bias = down_bias = None
        if config.mlp_bias:
            gate_up_bias = weights.stacked(("gate_proj.bias", "up_proj.bias"), rows)
            down_bias = weights.tensor("down_proj.bias", hidden)
        gate_up = weights.stacked(("gate_proj.weight", "up_proj.weight"), rows, hidden)
        self._gate_up = Linear(gate_up, gate_up_bias)
        self._down = Linear(weights.tensor("down_proj.weight", hidden, intermediate), down_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output, [T, H]. Shapes: x [T, H]."""
        return self._down(silu_and_mul(self._gate_up(x)))
