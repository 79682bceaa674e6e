"""Checkpoints with random weights in memory: tensors as files have them, bf16, FP8 and AWQ, made on the device.

Which experts a token goes through depends on the token alone. As many of the residual stream's first dimensions as
there are experts say so, no layer writes to them, and each layer's router reads them in an order of its own. So
rounding changes what experts compute, never which ones are chosen, and the errors of two models can be compared.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from raypp.models.config import ModelConfig
from raypp.models.quantization import Quantization
from raypp.models.weights import missing_tensor

FORMS: dict[str, Quantization | None] = {
    "bf16": None,
    "fp8 blocks": Quantization(format="fp8", block=(128, 128)),
    "fp8 outputs": Quantization(format="fp8", block=(1, 0)),
    "awq": Quantization(format="awq", block=(1, 128), has_zeros=True),
}
"""How linear layers are stored."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output of eight an int32 holds, its lowest bits first
_MIN_INT4_SCALE = 1e-4  # of groups of zeros
_CHOSEN_LEVELS = (2.0, 4.0)  # of a chosen expert's dimension; of the others, 0
_ROUTER_GAIN = 1.5


class MemoryCheckpoint:
    """A model's tensors by name. See `raypp.models.weights.WeightSource`."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: tuple[int | slice, ...] | None = None
    ) -> torch.Tensor:
        """Return a copy of a tensor, or of a part, which the reader may change."""
        if name not in self._tensors:
            raise missing_tensor("memory", name, shape, self._tensors)
        tensor = self._tensors[name]
        assert tensor.shape == shape, f"{name}: {tuple(tensor.shape)} instead of {shape}"
        return (tensor if where is None else tensor[where]).to(dtype, copy=True)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape, None if there is none of that name."""
        return tuple(self._tensors[name].shape) if name in self._tensors else None

    def type_of(self, name: str) -> torch.dtype | None:
        """Return a tensor's type, likewise."""
        return self._tensors[name].dtype if name in self._tensors else None

    def unread(self) -> Collection[str]:
        """Return nothing: who reads it reads all."""
        return ()


def random_checkpoint(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> MemoryCheckpoint:
    """Return a checkpoint of a model without biases, whose linear layers are stored as `config.quantization` says.

    Products have the size of their inputs. What is not quantized is of `dtype`.
    """
    tensors: dict[str, torch.Tensor] = {}
    generator, hidden, experts = torch.Generator(device).manual_seed(seed), config.hidden_size, config.experts
    num_codes = 0 if experts is None else experts.num_experts

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = (1 + 0.1 * normal(size)).to(dtype)

    def linear(module: str, num_outputs: int, num_inputs: int, *, writes_stream: bool = False) -> None:
        """Put a layer there; `{}` in its name makes one for each expert of it."""
        count = [num_codes] if "{}" in module else []
        weight = normal(*count, num_outputs, num_inputs) * num_inputs**-0.5
        if writes_stream:
            weight[..., :num_codes, :] = 0
        for end, stored in _stored(weight, config.quantization, dtype).items():
            for index, one in enumerate(stored if count else [stored]):
                tensors[f"{module.format(index)}.{end}"] = one

    q_size, kv_size, _ = config.attention[0].row_sizes
    embedding = normal(config.vocab_size, hidden)
    if experts is not None:
        embedding[:, :num_codes] = _expert_codes(config.vocab_size, num_codes, experts.num_chosen, generator)
    tensors["model.embed_tokens.weight"] = embedding.to(dtype)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            linear(f"{layer}.self_attn.{name}", size, hidden)
        linear(f"{layer}.self_attn.o_proj", hidden, q_size, writes_stream=True)
        for name in "qk":
            norm(f"{layer}.self_attn.{name}_norm", config.attention[0].head_dim)
        mlp, size = f"{layer}.mlp", config.intermediate_size
        if experts is not None:
            router = torch.zeros(num_codes, hidden, device=device)
            order = torch.randperm(num_codes, generator=generator, device=device)
            router[torch.arange(num_codes, device=device), order] = _ROUTER_GAIN
            tensors[f"{mlp}.gate.weight"] = router.to(dtype)
            mlp, size = f"{mlp}.experts.{{}}", experts.intermediate_size
        linear(f"{mlp}.gate_proj", size, hidden)
        linear(f"{mlp}.up_proj", size, hidden)
        linear(f"{mlp}.down_proj", hidden, size, writes_stream=True)
    norm("model.norm", hidden)
    tensors["lm_head.weight"] = (normal(config.vocab_size, hidden) * hidden**-0.5).to(dtype)
    return MemoryCheckpoint(tensors)


def _expert_codes(num_tokens: int, num_experts: int, num_chosen: int, generator: torch.Generator) -> torch.Tensor:
    """Return the first dimensions of tokens, [V, E]: far from 0 for k experts, in different degrees, else 0."""
    device = generator.device
    ranks = torch.rand(num_tokens, num_experts, generator=generator, device=device).argsort(1).argsort(1)
    low, high = _CHOSEN_LEVELS
    levels = low + (high - low) * torch.rand(num_tokens, num_experts, generator=generator, device=device)
    return levels * (ranks < num_chosen)


def _stored(weight: torch.Tensor, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that stand for weights, [..., N, K], by the ends of their names."""
    if quantization is None:
        return {"weight": weight.to(dtype)}
    rows, columns = quantization.block[0], quantization.block[1] or weight.shape[-1]
    if quantization.format == "fp8":
        blocks = weight.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # [..., R, rows, C, columns]
        scale = (blocks.abs().amax((-3, -1)) / 448).clamp(min=1e-30)
        data = (blocks / scale.unsqueeze(-2).unsqueeze(-1)).reshape(weight.shape).to(torch.float8_e4m3fn)
        return {"weight": data, "weight_scale_inv" if quantization.block[1] else "weight_scale": scale}
    assert quantization.format == "awq"
    groups = weight.unflatten(-1, (-1, columns))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=_MIN_INT4_SCALE).half()
    zero = (-low / scale).round().clamp(0, 15)
    code = ((groups / scale.float().unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, 15).flatten(-2)
    return {
        "qweight": _awq_packed(code.transpose(-1, -2)),
        "qzeros": _awq_packed(zero.transpose(-1, -2)),
        "scales": scale.transpose(-1, -2).contiguous(),
    }


def _awq_packed(numbers: torch.Tensor) -> torch.Tensor:
    """Return eight numbers of the last dimension in one int32."""
    eights = numbers.to(torch.int64).unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)]
    words = (eights << torch.arange(0, 32, 4, device=numbers.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
