"""Configurations of published models with experts, made by hand: without files."""

from __future__ import annotations

from typing import Any

from raypp.models.attention_config import AttentionConfig
from raypp.models.config import ModelConfig
from raypp.models.expert_config import ExpertConfig
from raypp.models.rope_config import RopeConfig


def expert_model(**changes: Any) -> ModelConfig:
    """Return Qwen3-30B-A3B's sizes."""
    values: dict[str, Any] = {
        "architecture": "Qwen3MoeForCausalLM",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "rms_norm_eps": 1e-6,
        "qkv_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "qk_norm": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
        "eos_token_ids": (151645,),
        "experts": ExpertConfig(num_experts=128, num_chosen=8, intermediate_size=768, normalizes=True),
    }
    attention = {"num_heads": 32, "num_kv_heads": 4, "head_dim": 128, "v_dim": 128, "rope": RopeConfig(theta=1e6)}
    attention |= {name: changes.pop(name) for name in attention.keys() & changes.keys()}
    attention["v_dim"] = attention["head_dim"]
    values["attention"] = (AttentionConfig(**attention),) * changes.pop("num_layers", 48)
    return ModelConfig(**{**values, **changes})


LARGE: dict[str, Any] = {
    "hidden_size": 4096,
    "num_layers": 94,
    "num_heads": 64,
    "experts": ExpertConfig(num_experts=128, num_chosen=8, intermediate_size=1536, normalizes=True),
}
"""What Qwen3-235B-A22B changes of that."""
