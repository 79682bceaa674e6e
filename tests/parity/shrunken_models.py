"""Shrunken random models of transformers' types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from raypp.testing.shrunken_model import save_random_model, shrunken_config

NUM_LAYERS = 4
MORE = {
    "max_position_embeddings": 512,
    "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}


def make_shrunken(model_type: str, directory: Path, *, seed: int = 0, **values: Any) -> Path:
    """Write a random model of a type, of 4 layers, to `directory`; `values` are fields of its config.json."""
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]().get_text_config()
    chosen = {name: value for name, value in MORE.items() if hasattr(config, name)}
    small = shrunken_config(config, num_layers=NUM_LAYERS, **(chosen | values))
    return save_random_model(small, directory, seed=seed)
