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
    fields = config.to_dict()
    chosen: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS}
    chosen |= {name: value for name, value in MORE.items() if name in fields}
    if kinds := list(dict.fromkeys(fields.get("layer_types") or ())):
        chosen["layer_types"] = (kinds * NUM_LAYERS)[:NUM_LAYERS]
    return save_random_model(shrunken_config(config, **(chosen | values)), directory, seed=seed)
