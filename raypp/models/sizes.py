"""Computes the bytes of a model's parts from its configuration alone, for planning without building anything.

Weights are counted as the checkpoint holds them. On a CPU linear layers may keep more, see `raypp.ops.cpu.linear`.
"""

from __future__ import annotations

from raypp.models.config import ModelConfig

LOGIT_BYTES = 4  # whatever the model's type, see `raypp.ops.backend.KernelSet.lm_head`


def layer_weight_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Return the bytes of one layer's weights. All layers are alike."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    elements = hidden * (query + 2 * key_value) + query * hidden + 3 * hidden * intermediate
    elements += 2 * hidden  # norms
    elements += 2 * config.head_dim * config.qk_norm
    elements += (query + 2 * key_value) * config.qkv_bias + hidden * config.attention_output_bias
    elements += (2 * intermediate + hidden) * config.mlp_bias
    return elements * dtype_bytes


def embedding_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Return the bytes of the token embedding, which the first stage holds."""
    return config.vocab_size * config.hidden_size * dtype_bytes


def lm_head_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Return the bytes of the final norm and the LM head, which the last stage holds; also when it is tied."""
    return (config.vocab_size + 1) * config.hidden_size * dtype_bytes


def kv_bytes_per_token_per_layer(config: ModelConfig, kv_dtype_bytes: int) -> int:
    """Return the bytes of KV cache that one token takes in one layer."""
    return 2 * config.num_kv_heads * config.head_dim * kv_dtype_bytes
