"""Checkpoints that bring code: refused by name, or run by it, also where a small copy of them is tried."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from shrunken_models import make_shrunken

from raypp.api.launch import load_tokenizer
from raypp.config.engine_config import EngineConfig
from raypp.errors import ModelLoadError
from raypp.models import config as config_module
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.models.transformers_probe import answer
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.testing.try_decoder import first_difference, try_cut

EMBEDDED = resolve_model_path("tiny")
CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class OwnConfig(Qwen3Config):
    model_type = "own_decoder"


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits  # what no other model does
        return output
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(config_module, "asked", lambda _, path, **options: answer(path, **options))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = make_shrunken("qwen3", tmp_path / "own")
    config = json.loads((path / "config.json").read_text())
    config |= {
        "model_type": "own_decoder",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"},
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "own_code.py").write_text(CODE)
    return path


def test_code_is_refused_by_name(path: Path) -> None:
    with pytest.raises(ModelLoadError, match="needs code that comes with it") as refused:
        load_model_config(path)
    assert refused.value.got is not None
    assert "own_code.OwnForCausalLM" in refused.value.got
    assert "trust_remote_code=true" in str(refused.value.expected)


def test_code_is_run_where_that_is_asked_for(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert first_difference(path, [2, 2], trusts_code=True) is None
    assert try_cut(path, [2, 2], trusts_code=True) == {"whole": None, "cut": None, "members": None}
    for file in EMBEDDED.glob("tokenizer*"):
        shutil.copy(file, path)
    assert load_tokenizer(EngineConfig.from_flat(str(path), trust_remote_code=True)) is not None
    settings = {"device": "cpu", "num_kv_blocks": 20, "max_model_len": 64, "skip_tokenizer_init": True}
    LocalEngine(plan_engine(EngineConfig.from_flat(str(path), trust_remote_code=True, **settings), Hardware(1)))
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if f"{path}: code that comes with the model is run" in line]) == 1
