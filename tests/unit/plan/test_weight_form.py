"""The setting `quantization`: FP8 made at load, and checkpoints that are quantized already."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.models.config import ModelConfig, load_model_config
from raypp.models.quantization import ONLINE_FP8, Quantization, WeightFormat
from raypp.models.sizes import layer_sizes
from raypp.plan.engine_layout import held_model
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


@pytest.mark.parametrize(("quantized", "settings"), [(_FP8, {}), (None, {"quantization": "fp8"}), (_GPTQ, {})])
def test_transformers_modules_hold_the_form(
    tmp_path: Path, quantized: dict[str, object] | None, settings: dict[str, str]
) -> None:
    """Their layers have the sizes that raypp's own layers have."""
    hardware, sizes = Hardware(2, 0, 1, "GPU", 80 << 30, (9, 0)), []
    for impl in ("raypp", "transformers"):
        model = _planned(tmp_path, quantized, model_impl=impl, **settings)
        held = held_model(model, hardware, device="cuda", dtype="bfloat16")
        sizes.append(sum(size.weight_bytes for size in layer_sizes(held, 2)))
    assert sizes[0] == sizes[1]
    whole = sum(size.weight_bytes for size in layer_sizes(replace(model, quantization=None), 2))
    assert sizes[1] < 0.55 * whole


def test_gpt_oss_holds_its_experts_in_mxfp4(tmp_path: Path) -> None:
    """20B has 12.8 GiB as published, of which 2.2 are embedding and LM head; scales take two bytes here, one there."""
    values = json.loads((_SHAPES / "gpt-oss-20b" / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = load_model_config(tmp_path)
    held = held_model(model, Hardware(2, 0, 1, "GPU", 80 << 30, (8, 6)), device="cuda", dtype="bfloat16")
    sizes = layer_sizes(held, 2)
    assert 11.1 < sum(size.weight_bytes for size in sizes) / (1 << 30) < 11.3
    in_16_bits = layer_sizes(replace(held, quantization=None), 2)
    shared = {size.weight_bytes - size.reads.experts for size in (*sizes, *in_16_bits)}
    assert len(shared) == 1


@pytest.mark.parametrize("form", ["nvfp4", "int8"])
def test_a_form_without_a_kernel_is_16_bits_on_a_gpu(form: WeightFormat) -> None:
    assert not Quantization(format=form, block=(1, 16)).has_gpu_product
    assert Quantization(format="mxfp4", block=(1, 32)).has_gpu_product


def test_gpus_without_the_type_are_refused() -> None:
    config = EngineConfig.from_flat(
        str(_SHAPES / "qwen3-8b"), load_format="dummy", quantization="fp8", max_model_len=512, device="cuda"
    )
    with pytest.raises(ConfigError, match=r"quantization=fp8, compute capability 8\.6; expected: .* 8\.9"):
        plan_engine(config, Hardware(8, 0, 1, "GPU", 80 << 30, (8, 6)))
    held = replace(ONLINE_FP8, is_for_gpus=True)
    assert plan_engine(config, Hardware(8, 0, 1, "GPU", 80 << 30, (8, 9))).held_model.quantization == held


def test_sizes_are_those_of_the_form_that_the_device_multiplies() -> None:
    fp8, awq = (load_model_config(_SHAPES / name) for name in ("qwen3-8b-fp8", "qwen3-8b-awq"))

    def is_kept(model: ModelConfig, capability: tuple[int, int], device: str = "cuda", dtype: str = "bfloat16") -> bool:
        held = held_model(model, Hardware(8, num_gpus=1, gpu_capability=capability), device=device, dtype=dtype)
        assert model.quantization is not None
        kept = replace(model, quantization=replace(model.quantization, is_for_gpus=True))
        assert held in (kept, replace(model, quantization=None))
        return held == kept

    assert [is_kept(fp8, capability) for capability in ((9, 0), (8, 9), (8, 6), (0, 0))] == [True, True, False, True]
    assert [is_kept(awq, capability) for capability in ((9, 0), (8, 0))] == [True, True]
    for model in (fp8, awq):
        assert not is_kept(model, (9, 0), device="cpu")
        assert not is_kept(model, (9, 0), dtype="float32")
    config = EngineConfig.from_flat(str(_SHAPES / "qwen3-8b-fp8"), load_format="dummy", max_model_len=512)
    old, new = (
        plan_engine(config, Hardware(8, 0, 1, "GPU", 80 << 30, capability)).stages[0].weight_bytes
        for capability in ((8, 0), (9, 0))
    )
    assert 1.7 < old / new < 1.8  # embedding and LM head are in 16 bits


@pytest.mark.parametrize("form", ["fp8", "awq"])
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("columns", [0, 8, 32, 48, 64, 96, 128, 192])
def test_plans_and_kernels_agree_on_what_is_multiplied(form: WeightFormat, rows: int, columns: int) -> None:
    pytest.importorskip("triton")
    from raypp.models.weights import DummyWeights
    from raypp.ops.cuda.quantized_projection import has_kernel

    quantization = Quantization(format=form, block=(rows, columns))
    weight = DummyWeights(0, torch.device("cpu")).quantized("a", (256, 384), quantization)
    if rows == 1 or form == "fp8":
        assert quantization.has_gpu_product == has_kernel(weight)
