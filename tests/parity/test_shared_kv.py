"""Gemma 4 E2B and E4B by transformers' modules: inputs of all layers, and layers without keys and values of their own.

Small random copies of 8 layers, the last 4 of which attend to keys and values of layers 2 and 3: tokens equal
transformers' own with prompts in chunks, cached prefixes, preemption, n-grams, blocks in CPU memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from shrunken_models import make_shrunken
from test_any_decoder import RUNS, compare

from raypp.models import config as config_module
from raypp.models.transformers_probe import answer

SHAPE = {
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "per_layer_config": {layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 3, 5, 7)},
    "hidden_size_per_layer_input": 16,
    "use_double_wide_mlp": True,
}


@pytest.fixture(autouse=True)
def _asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask transformers in this process: another one takes seconds to start."""
    monkeypatch.setattr(config_module, "asked", lambda _, path, *given, **options: answer(path, *given, **options))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shrunken("gemma4_text", tmp_path_factory.mktemp("model"), **SHAPE)


def test_greedy_tokens_equal_transformers(path: Path) -> None:
    compare(path, RUNS)


def test_members_give_the_same_tokens(path: Path) -> None:
    compare(path, [RUNS[1] | {"tensor_parallel_size": 2}, RUNS[2] | {"num_stages": 1, "tensor_parallel_size": 4}])
