"""Finding a model, and the layers of an architecture."""

from __future__ import annotations

import pytest

from raypp.errors import ModelLoadError
from raypp.models.config import SUPPORTED_ARCHITECTURES
from raypp.models.registry import LAYER_CLASSES, layer_class_of, resolve_model_path


def test_every_supported_architecture_has_layers():
    assert set(LAYER_CLASSES) == set(SUPPORTED_ARCHITECTURES)
    layers = {architecture: layer_class_of(architecture) for architecture in SUPPORTED_ARCHITECTURES}
    assert len(set(layers.values())) == len(LAYER_CLASSES) - 1
    assert layers["Qwen3VLForConditionalGeneration"] is layers["Qwen3ForCausalLM"]


def test_a_directory_is_itself(tmp_path, monkeypatch):
    assert resolve_model_path(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_model_path(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize("model", ["./missing", "missing/a/b", "/no/such", ""])
def test_what_is_neither_directory_nor_id(model):
    with pytest.raises(ModelLoadError, match=r"there is no model .* got: no such directory"):
        resolve_model_path(model)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelLoadError, match="got: a file"):
        resolve_model_path(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("model", ["somebody/some-model-that-is-not-here", "tyni"])
def test_an_id_that_cannot_be_had(tmp_path, monkeypatch, model):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"cannot be had.*expected: tiny, .*hint: check the spelling, the network"):
        resolve_model_path(model)
