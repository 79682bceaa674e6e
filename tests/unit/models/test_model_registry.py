"""Finding a model."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from raypp.errors import ModelLoadError
from raypp.models.registry import resolve_model_path


def test_a_directory_is_itself(tmp_path, monkeypatch):
    assert resolve_model_path(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_model_path(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize("model", ["./missing", "missing/a/b", "/no/such", ""])
def test_what_is_neither_directory_nor_id(model):
    with pytest.raises(ModelLoadError, match=r"there is no model .* got: no such directory"):
        resolve_model_path(model)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelLoadError, match="got: a file"):
        resolve_model_path(str(tmp_path / "model.bin"))


def test_an_id_has_revisions(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--somebody--model"
    for ref, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (cache / "refs").mkdir(parents=True, exist_ok=True)
        (cache / "refs" / ref).write_text(commit)
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")
    found = [resolve_model_path("somebody/model", revision).name for revision in (None, "main", "v1")]
    assert found == ["a" * 40, "a" * 40, "b" * 40]
    with pytest.raises(ModelLoadError, match="cannot be downloaded in revision 'v2'"):
        resolve_model_path("somebody/model", "v2")


_USUAL = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
_OWN = ["consolidated-00001-of-00001.safetensors", "consolidated.safetensors.index.json"]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (["config.json", *_USUAL, *_OWN], _USUAL),
        (["config.json", "model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (_OWN, _OWN),
        (["config.json", *_OWN], _OWN),  # of the model that Mistral's own files are of
        (["config.json", *_USUAL, "original/model.safetensors"], _USUAL),
        (["config.json", "model.safetensors.index.json", "parts/model-1.safetensors"], None),  # the index names it
    ],
)
def test_one_form_of_a_checkpoint_is_downloaded(tmp_path, monkeypatch, stored, expected):
    others = ["params.json", "tekken.json"]

    def download(model, *, revision, allow_patterns, ignore_patterns=None):
        names = filter_repo_objects([*stored, *others], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shards = [each for each in stored if each.startswith((name.partition(".")[0], "parts/"))]
            weight_map = {each: each for each in shards if each.endswith(".safetensors")}
            (tmp_path / name).write_text(json.dumps({"weight_map": weight_map}))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    directory = resolve_model_path("mistralai/Model")
    found = {str(file.relative_to(directory)) for file in directory.rglob("*.*")}
    assert found - {"config.json"} == {*(expected or stored), *others} - {"config.json"}


@pytest.mark.parametrize("is_embedded", [True, False])
def test_what_is_not_of_the_hub_has_no_revisions(tmp_path, is_embedded):
    with pytest.raises(ModelLoadError, match=r"has no revisions.*leave revision out"):
        resolve_model_path("tiny" if is_embedded else str(tmp_path), "v1")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("somebody/some-model-that-is-not-here", "cannot be downloaded; got: .*"),
        ("tinny", r"there is no model 'tinny'; did you mean tiny\?"),
    ],
)
def test_an_id_that_cannot_be_downloaded(tmp_path, monkeypatch, model, message):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=rf"{message}; expected: tiny, .*hint: check the spelling"):
        resolve_model_path(model)
