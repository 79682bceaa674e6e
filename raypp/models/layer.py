"""The layer of all `raypp.models.families`, and its parts, of which a draft head is made, too.

    hidden -> norm -> q, k, v -> norm of heads -> rotary -> attention -> o -> + hidden -> norm -> MLP -> + hidden

Families differ in biases and in the norm of each query and key head; the configuration says which a model has. The MLP
is one gated MLP, or experts (`raypp.models.sparse_mlp`), by the layer's index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raypp.models.config import ModelConfig
from raypp.models.kv_scales import read_kv_scales
from raypp.models.sparse_mlp import SparseMLP
from raypp.models.weights import WeightReader
from raypp.ops.attention import AttentionBatch, HeadNorm, Heads
from raypp.ops.backend import KernelSet
from raypp.ops.rotary import Rotation
from raypp.ops.weight import Weight


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """What a checkpoint holds below a layer's `self_attn.`. Queries, keys and values are one product."""

    heads: Heads
    qkv: Weight  # [(Hq + 2 Hk) * D, K]
    qkv_bias: torch.Tensor | None
    output: Weight  # [H, Hq * D]
    output_bias: torch.Tensor | None


def read_attention(config: ModelConfig, weights: WeightReader, num_inputs: int) -> AttentionWeights:
    """Read a layer's attention, whose projection has `num_inputs` columns K.

    Raises:
        ModelLoadError: a tensor is missing, has the wrong shape, or cannot be read.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    rows = (q_size, kv_size, kv_size)
    qkv_bias = output_bias = norm = None
    if config.qkv_bias:
        qkv_bias = weights.stacked(("q_proj.bias", "k_proj.bias", "v_proj.bias"), rows)
    if config.attention_output_bias:
        output_bias = weights.tensor("o_proj.bias", hidden)
    if config.qk_norm:
        q_norm, k_norm = (weights.tensor(f"{name}_norm.weight", head_dim) for name in "qk")
        norm = HeadNorm(q_norm, k_norm, config.rms_norm_eps)
    return AttentionWeights(
        heads=Heads(config.num_heads, config.num_kv_heads, head_dim, norm, *read_kv_scales(weights)),
        qkv=weights.weight(("q_proj", "k_proj", "v_proj"), rows, num_inputs),
        qkv_bias=qkv_bias,
        output=weights.weight(("o_proj",), (hidden,), q_size),
        output_bias=output_bias,
    )


class GatedMLP:
    """hidden + down(silu(gate(x)) * up(x)) with x = norm(hidden); gate and up are one product.

    Args:
        config: The model's.
        weights: Below the layer's prefix.
        kernels: Of the device.
    """

    def __init__(self, config: ModelConfig, weights: WeightReader, kernels: KernelSet) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        norm_weight, mlp = weights.tensor("post_attention_layernorm.weight", hidden), weights.below("mlp.")
        rows = (intermediate, intermediate)
        gate_up_bias = down_bias = None
        if config.mlp_bias:
            gate_up_bias = mlp.stacked(("gate_proj.bias", "up_proj.bias"), rows)
            down_bias = mlp.tensor("down_proj.bias", hidden)
        gate_up = mlp.weight(("gate_proj", "up_proj"), rows, hidden)
        down = mlp.weight(("down_proj",), (hidden,), intermediate)
        self._gate_up = kernels.norm_gated_linear(norm_weight, config.rms_norm_eps, gate_up, gate_up_bias)
        self._down = kernels.add_linear(down, down_bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H]. Shapes: hidden [T, H], may be overwritten."""
        return self._down(self._gate_up(hidden), hidden)


class TransformerLayer:
    """One layer; see `raypp.models.decoder.DecoderLayer`.

    Args:
        config: The model's.
        index: Which layer it is.
        weights: Below the layer's prefix.
        kernels: Of the device.
    """

    def __init__(self, config: ModelConfig, index: int, weights: WeightReader, kernels: KernelSet) -> None:
        attention = read_attention(config, weights.below("self_attn."), config.hidden_size)
        input_norm = weights.tensor("input_layernorm.weight", config.hidden_size)
        self._qkv = kernels.norm_linear(input_norm, config.rms_norm_eps, attention.qkv, attention.qkv_bias)
        self._attention = kernels.attention(attention.heads)
        self._output = kernels.add_linear(attention.output, attention.output_bias)
        self.has_experts = config.experts_of(index) is not None
        mlp = SparseMLP if self.has_experts else GatedMLP
        self._mlp = mlp(config, weights, kernels)

    def before_attention(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values, [T, (Hq + 2 Hk) * D]. Shapes: hidden [T, H]."""
        return self._qkv(hidden)

    def attend(
        self,
        qkv: torch.Tensor,
        by: Rotation,
        kv_cache: torch.Tensor,
        attention: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention's output, [T, Hq * D]; see `raypp.ops.backend.Attention`."""
        return self._attention(qkv, by, kv_cache, attention, out)

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the layer, [T, H]. Shapes: hidden [T, H]; attended [T, Hq * D]."""
        return self._mlp(self._output(attended, hidden))
