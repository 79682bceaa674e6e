"""The MLP of a layer with experts, in the layouts in which checkpoints store it.

    by expert    mlp.experts.{e}.gate_proj.weight [I, H], up_proj.weight [I, H], down_proj.weight [H, I]
    fused        mlp.experts.gate_up_proj [E, 2 I, H], mlp.experts.down_proj [E, H, I]
    turned       mlp.experts.gate_up_proj [E, H, 2 I], mlp.experts.down_proj [E, I, H]

E experts of I dimensions. Mixtral has other names, see `raypp.models.families`. The published Qwen3-VL-MoE is turned;
transformers 5 writes it fused, and the others by expert.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from raypp.errors import ModelLoadError
from raypp.models.config import ModelConfig
from raypp.models.expert_config import ExpertConfig
from raypp.models.weights import WeightReader, WeightSource
from raypp.ops.backend import KernelSet
from raypp.ops.routing import Routing

_FUSED_BLOCK = "mlp."
"""Of fused tensors, whatever the family."""
_QUANTIZED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")


class SparseMLP:
    """hidden + the weighted sum of the gated MLPs that a token's router chooses, all of norm(hidden).

    Args:
        config: The model's, which has experts.
        weights: Below the layer's prefix.
        kernels: Of the device.
    """

    def __init__(self, config: ModelConfig, weights: WeightReader, kernels: KernelSet) -> None:
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        norm_weight = weights.tensor("post_attention_layernorm.weight", hidden)
        names, num_experts, size = experts.names, experts.num_experts, experts.intermediate_size
        is_renamed = names.block != _FUSED_BLOCK and weights.has(f"{_FUSED_BLOCK}gate.weight")
        block = weights.below(_FUSED_BLOCK if is_renamed else names.block)
        if any(block.has(f"gate.{tensor}") for tensor in _QUANTIZED):
            router = block.weight(("gate",), (num_experts,), hidden).dequantized(weights.dtype)
        else:
            router = block.tensor("gate.weight", num_experts, hidden)
        if block.has("experts.gate_up_proj"):
            block = block.of(FusedExperts(block.source, block.prefix + "experts.", experts, hidden))
        gate_up = block.expert_weight("experts.{}.", num_experts, (names.gate, names.up), (size, size), hidden)
        down = block.expert_weight("experts.{}.", num_experts, (names.down,), (hidden,), size)
        routing = Routing(experts.num_chosen, experts.normalizes, experts.are_chosen_evenly)
        self._experts = kernels.experts(norm_weight, config.rms_norm_eps, router, gate_up, down, routing)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H]. Shapes: hidden [T, H], may be overwritten."""
        return self._experts(hidden)


class FusedExperts:
    """Gives tensors of one expert's layers by name, out of those of all. See `raypp.models.weights.WeightSource`.

    Args:
        source: Has the fused tensors.
        prefix: Before their names, up to `experts.`.
        experts: The model's.
        hidden_size: H.
    """

    def __init__(self, source: WeightSource, prefix: str, experts: ExpertConfig, hidden_size: int) -> None:
        self._source = source
        self._prefix = prefix
        names, size = experts.names, experts.intermediate_size
        self._parts = {
            f"{names.gate}.weight": ("gate_up_proj", slice(0, size)),
            f"{names.up}.weight": ("gate_up_proj", slice(size, 2 * size)),
            f"{names.down}.weight": ("down_proj", slice(0, hidden_size)),
        }
        shapes = {
            "gate_up_proj": (experts.num_experts, 2 * size, hidden_size),
            "down_proj": (experts.num_experts, hidden_size, size),
        }
        # One of the two may be square, never both.
        self._has_inputs_first = all(source.shape_of(prefix + name) == _turned(shape) for name, shape in shapes.items())
        self._shapes = {name: _turned(shape) if self._has_inputs_first else shape for name, shape in shapes.items()}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of one expert, or any other of the source.

        Raises:
            ModelLoadError: the fused tensor is missing, has the wrong shape or type, or cannot be read.
        """
        expert, _, layer = name.removeprefix(self._prefix).partition(".")
        if not name.startswith(self._prefix) or not expert.isdecimal():
            return self._source.get(name, shape, dtype)
        if layer not in self._parts:
            raise ModelLoadError(
                f"there is no tensor {name} for quantized experts",
                got=f"experts in one tensor, {self._prefix}gate_up_proj",
                expected="experts in one tensor only in 16 or 32 bits",
                hint="use a checkpoint that stores each expert by itself, or leave them out of quantization_config",
            )
        fused, rows = self._parts[layer]
        where = (int(expert), slice(None), rows) if self._has_inputs_first else (int(expert), rows, slice(None))
        part = self._source.part(self._prefix + fused, self._shapes[fused], dtype, where)
        return part.t().contiguous() if self._has_inputs_first else part

    def part(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: tuple[int | slice, ...]
    ) -> torch.Tensor:
        """Return a part of a tensor."""
        return self._source.part(name, shape, dtype, where)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a stored tensor; those of single experts are none."""
        return self._source.shape_of(name)

    def type_of(self, name: str) -> torch.dtype | None:
        """Return the type of a stored tensor, likewise."""
        return self._source.type_of(name)

    def unread(self) -> Collection[str]:
        """Return the names of the tensors that are there and that nobody asked for yet."""
        return self._source.unread()


def _turned(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    return shape[0], shape[2], shape[1]
