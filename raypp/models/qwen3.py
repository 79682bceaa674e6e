"""Qwen3 (dense): queries and keys are normalized per head before they are rotated.

    hidden -> norm -> q, k, v -> norm of each q and k head -> rotary -> attention -> o -> + hidden -> norm -> MLP -> +

Source: the published checkpoints' config.json and tensor names; transformers 5.17, `models/qwen3`.
"""

from __future__ import annotations

import torch

from raypp.models.config import ModelConfig
from raypp.models.mlp import GatedMLP
from raypp.models.weights import WeightReader
from raypp.ops.attention import AttentionBatch, HeadNorm, Heads
from raypp.ops.backend import KernelSet
from raypp.ops.rotary import Rotation


class Qwen3Layer:
    """One layer; see `raypp.models.decoder.DecoderLayer`."""

    def __init__(self, config: ModelConfig, weights: WeightReader, kernels: KernelSet) -> None:
        hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim

        attention, rows = weights.below("self_attn."), (q_size, kv_size, kv_size)
        qkv_bias = output_bias = None
        if config.qkv_bias:
            qkv_bias = attention.stacked(("q_proj.bias", "k_proj.bias", "v_proj.bias"), rows)
        if config.attention_output_bias:
            output_bias = attention.tensor("o_proj.bias", hidden)
        qkv = attention.stacked(("q_proj.weight", "k_proj.weight", "v_proj.weight"), rows, hidden)
        head_norm = HeadNorm(
            attention.tensor("q_norm.weight", head_dim), attention.tensor("k_norm.weight", head_dim), eps
        )

        input_norm = weights.tensor("input_layernorm.weight", hidden)
        mlp_norm = weights.tensor("post_attention_layernorm.weight", hidden)
        output = attention.tensor("o_proj.weight", hidden, q_size)
        self._qkv = kernels.norm_linear(input_norm, eps, qkv, qkv_bias)
        self._attention = kernels.attention(Heads(config.num_heads, config.num_kv_heads, head_dim, head_norm))
        self._output = kernels.add_linear(output, output_bias)
        self._mlp = GatedMLP(config, mlp_norm, weights.below("mlp."), kernels)

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
