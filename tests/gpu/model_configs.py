"""Configurations without weights: shapes of published models with few layers, and a small one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_cache": True,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,  # heads of 128, for which attention's kernels are compiled anyway
        "vocab_size": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    },
    "small experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}
SHAPES = tuple(_SHAPES)


def write_config(shape: str, num_layers: int, directory: Path, **changes: Any) -> Path:
    """Write the config.json of a model with `num_layers` layers of that shape to `directory`, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _QWEN3 | _SHAPES[shape] | {"num_hidden_layers": num_layers, "max_window_layers": num_layers} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory
