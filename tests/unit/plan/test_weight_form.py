"""The setting `quantization`: FP8 made at load, and checkpoints that are quantized already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.models.config import ModelConfig
from raypp.models.quantization import ONLINE_FP8
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware

_SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


def _planned(path: Path, quantized: dict[str, object] | None, **settings: object) -> ModelConfig:
    values = json.loads((_SHAPES / "qwen3-0.6b" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "quantization_config": quantized}))
    config = EngineConfig.from_flat(str(path), load_format="dummy", max_model_len=512, **settings)
    return plan_engine(config, Hardware(1)).model


def test_a_checkpoint_in_16_bits_becomes_fp8(tmp_path: Path) -> None:
    assert _planned(tmp_path, None).quantization is None
    assert _planned(tmp_path, None, quantization="fp8").quantization == ONLINE_FP8


def test_a_checkpoint_in_fp8_stays(tmp_path: Path) -> None:
    asked = _planned(tmp_path, _FP8, quantization="fp8")
    assert asked.quantization is not None
    assert asked == _planned(tmp_path, _FP8)


def test_one_in_4_bits_is_a_contradiction(tmp_path: Path) -> None:
    assert _planned(tmp_path, _GPTQ).quantization is not None
    with pytest.raises(ConfigError, match=r"quantization=fp8, weights of 4 bits \(gptq\).*leave quantization out"):
        _planned(tmp_path, _GPTQ, quantization="fp8")
