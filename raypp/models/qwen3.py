"""Qwen3 (dense): queries and keys are normalized per head before they are rotated.

    hidden -> norm -> q, k, v -> norm of each q and k head -> rotary -> attention -> o -> + hidden -> norm -> MLP -> +

Source: the published checkpoints' config.json and tensor names; transformers 5.17, `models/qwen3`.
"""

from __future__ import annotations

import torch

from raypp.models.config import ModelConfig
from raypp.models.mlp import GatedMLP
from raypp.models.weights import WeightReader
from raypp.ops.linear import Linear
from raypp.ops.norm import RMSNorm
from raypp.ops.rotary import Rotation, apply_rotary


class Qwen3Layer:
    """One layer; see `raypp.models.decoder.DecoderLayer`."""

    def __init__(self, config: ModelConfig, weights: WeightReader) -> None:
        hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self._head_split = (config.num_heads, config.num_kv_heads)
        self._qkv_shape = (-1, config.num_heads + 2 * config.num_kv_heads, head_dim)
        self._qk_v_split = (config.num_heads + config.num_kv_heads, config.num_kv_heads)
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim

        attention, rows = weights.below("self_attn."), (q_size, kv_size, kv_size)
        qkv_bias = output_bias = None
        if config.qkv_bias:
            qkv_bias = attention.stacked(("q_proj.bias", "k_proj.bias", "v_proj.bias"), rows)
        if config.attention_output_bias:
            output_bias = attention.tensor("o_proj.bias", hidden)
        qkv = attention.stacked(("q_proj.weight", "k_proj.weight", "v_proj.weight"), rows, hidden)
        q_norm = attention.tensor("q_norm.weight", head_dim).expand(config.num_heads, head_dim)
        k_norm = attention.tensor("k_norm.weight", head_dim).expand(config.num_kv_heads, head_dim)

        self._input_norm = RMSNorm(weights.tensor("input_layernorm.weight", hidden), eps)
        self._qkv = Linear(qkv, qkv_bias)
        self._qk_norm = RMSNorm(torch.cat((q_norm, k_norm)), eps)  # one weight per head: both norms are one call
        self._output = Linear(attention.tensor("o_proj.weight", hidden, q_size), output_bias)
        self._mlp_norm = RMSNorm(weights.tensor("post_attention_layernorm.weight", hidden), eps)
        self._mlp = GatedMLP(config, weights.below("mlp."))

    def before_attention(self, hidden: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [T, Hq, D], k [T, Hk, D], v [T, Hk, D]. Shapes: hidden [T, H]."""
        qkv = self._qkv(self._input_norm(hidden)).view(self._qkv_shape)
        qk, v = qkv.split_with_sizes(self._qk_v_split, 1)
        q, k = apply_rotary(self._qk_norm(qk), by).split_with_sizes(self._head_split, 1)
        return q, k, v

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the layer, [T, H]. Shapes: hidden [T, H]; attended [T, Hq, D]."""
        hidden = self._output(attended.flatten(1)).add_(hidden)
        return self._mlp(self._mlp_norm(hidden)).add_(hidden)
