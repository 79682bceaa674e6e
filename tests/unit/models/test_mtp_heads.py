"""Where the tensors of a model's own head are found, and in which form, whatever index and config.json say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from raypp.errors import ModelLoadError
from raypp.models.checkpoint_names import file_of_tensor, stored_tensors
from raypp.models.config import ModelConfig, load_model_config
from raypp.models.draft_head_config import load_mtp_config
from raypp.models.quantization import ONLINE_FP8, Quantization
from raypp.models.weights import CheckpointWeights

LARGE = Path(__file__).parents[3] / "benchmarks/models/qwen3.6-27b"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
FORM = Quantization(format="fp8", block=(128, 128), skipped=("lm_head",))
HEAD = {
    "mtp.fc.weight": BF16,
    "mtp.norm.weight": BF16,
    "mtp.layers.0.self_attn.q_proj.weight": BF16,
    "mtp.layers.0.mlp.experts.gate_up_proj": BF16,
    "mtp.layers.0.mlp.experts.down_proj": BF16,
}


def _save(file: Path, types: dict[str, torch.dtype]) -> None:
    save_file({name: torch.zeros(4, 4).to(dtype) for name, dtype in types.items()}, file)


def _model(quantization: Quantization | None = FORM) -> ModelConfig:
    return replace(load_model_config(LARGE), quantization=quantization)


@pytest.mark.parametrize("name", ["mtp.safetensors", "model-mtp.safetensors", "mtp-00001-of-00001.safetensors"])
@pytest.mark.parametrize("has_index", [True, False])
def test_a_head_is_found_in_a_file_that_is_not_listed(tmp_path, name, has_index):
    _save(tmp_path / "model.safetensors", {"model.norm.weight": BF16})
    _save(tmp_path / name, HEAD)
    _save(tmp_path / "other.safetensors", {"other.weight": BF16})
    if has_index:
        index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert file_of_tensor(tmp_path) == {"model.norm.weight": "model.safetensors"} | dict.fromkeys(HEAD, name)
    assert {tensor.file.name for tensor in stored_tensors(tmp_path).values()} == {"model.safetensors", name}
    source = CheckpointWeights(tmp_path)
    assert source.get("mtp.fc.weight", (4, 4), BF16).shape == (4, 4)
    assert "mtp.norm.weight" in source.unread()
    head = load_mtp_config(tmp_path, _model())
    assert head is not None
    assert head.kind == "mtp"


def test_a_listed_tensor_is_where_the_index_says(tmp_path):
    _save(tmp_path / "model-00001.safetensors", {"mtp.fc.weight": BF16})
    _save(tmp_path / "mtp.safetensors", HEAD)
    index = {"weight_map": {"mtp.fc.weight": "model-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = file_of_tensor(tmp_path)
    assert found.pop("mtp.fc.weight") == "model-00001.safetensors"
    assert set(found.values()) == {"mtp.safetensors"}


def test_a_broken_file_of_a_head_is_named(tmp_path):
    _save(tmp_path / "model.safetensors", {"model.norm.weight": BF16})
    (tmp_path / "mtp.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelLoadError, match=r"mtp\.safetensors is truncated"):
        file_of_tensor(tmp_path)


def test_a_checkpoint_may_have_none(tmp_path):
    _save(tmp_path / "model.safetensors", {"model.norm.weight": BF16})
    assert load_mtp_config(tmp_path, _model()) is None
    assert load_mtp_config(tmp_path, replace(_model(), mtp_prefix=None)) is None
    assert load_mtp_config(tmp_path, _model(), is_dummy=True) is not None


def _form(path: Path, head: dict[str, torch.dtype], quantization: Quantization | None = FORM) -> Quantization | None:
    _save(path / "model.safetensors", {"model.norm.weight": BF16} | head)
    found = load_mtp_config(path, _model(quantization))
    assert found is not None
    return found.layer.quantization


def test_a_head_in_16_bits_is_read_as_it_is(tmp_path):
    form = _form(tmp_path, HEAD)
    assert form is not None
    assert not any(form.covers(name) for name in ("mtp.fc", "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.x"))
    assert form.covers("model.layers.0.self_attn.q_proj")


def test_parts_of_a_head_may_be_in_16_bits(tmp_path):
    quantized = {"mtp.layers.0.self_attn.q_proj.weight": FP8, "mtp.layers.0.self_attn.q_proj.weight_scale_inv": BF16}
    form = _form(tmp_path, HEAD | quantized)
    assert form is not None
    assert form.covers("mtp.layers.0.self_attn.q_proj")
    assert form.covers("mtp.layers.0.self_attn.o_proj")
    assert not any(form.covers(name) for name in ("mtp.fc", "mtp.layers.0.mlp.experts.3.gate_proj"))


def test_16_bits_that_are_to_become_fp8_do(tmp_path):
    assert _form(tmp_path, HEAD, ONLINE_FP8) == ONLINE_FP8
    assert _form(tmp_path, HEAD, None) is None
