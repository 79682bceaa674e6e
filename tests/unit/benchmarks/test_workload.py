"""Which models of benchmarks get random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from workload import model_settings

SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"


@pytest.mark.parametrize("name", ["qwen3-0.6b", str(SHAPES / "qwen3-0.6b")])
def test_a_shape_gets_random_weights(name):
    assert model_settings(name) == {"model": str(SHAPES / "qwen3-0.6b"), "load_format": "dummy"}


def test_what_has_weights_keeps_them(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_settings(str(tmp_path))["load_format"] == "dummy"
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert model_settings(str(tmp_path)) == {"model": str(tmp_path)}
    assert model_settings("tiny") == {"model": "tiny"}
