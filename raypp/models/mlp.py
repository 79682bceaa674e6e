"""The gated MLP that all families share, with its norm and its sum."""

from __future__ import annotations

import torch

from raypp.models.config import ModelConfig
from raypp.models.weights import WeightReader
from raypp.ops.backend import KernelSet


class GatedMLP:
    """hidden + down(silu(gate(x)) * up(x)) with x = norm(hidden); gate and up are one product.

    Args:
        config: The model's.
        norm_weight: [H].
        weights: Below the MLP's prefix.
        kernels: Of the device.
    """

    def __init__(
        self, config: ModelConfig, norm_weight: torch.Tensor, weights: WeightReader, kernels: KernelSet
    ) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        rows = (intermediate, intermediate)
        gate_up_bias = down_bias = None
        if config.mlp_bias:
            gate_up_bias = weights.stacked(("gate_proj.bias", "up_proj.bias"), rows)
            down_bias = weights.tensor("down_proj.bias", hidden)
        gate_up = weights.stacked(("gate_proj.weight", "up_proj.weight"), rows, hidden)
        down = weights.tensor("down_proj.weight", hidden, intermediate)
        self._gate_up = kernels.norm_gated_linear(norm_weight, config.rms_norm_eps, gate_up, gate_up_bias)
        self._down = kernels.add_linear(down, down_bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H]. Shapes: hidden [T, H], may be overwritten."""
        return self._down(self._gate_up(hidden), hidden)
