"""The benchmark that counts the experts that a step reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from micro.expert_choices import distinct_experts

from raypp.models.config import load_model_config

_SPARSE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
}


@torch.inference_mode()
def test_distinct_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_SPARSE))
    config = load_model_config(tmp_path)
    assert config.experts is not None
    even = replace(config, experts=replace(config.experts, are_chosen_evenly=True))
    found = distinct_experts(
        even, [1, 64], num_layers=9, num_steps=2, model_path=str(tmp_path), device=torch.device("cpu")
    )
    assert found[1] == [2.0, 2.0]  # of the two layers that have some
    assert all(mean > 15 for mean in found[64])
