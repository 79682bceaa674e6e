"""The setting `batch_invariant`: it reaches the stages, and what cannot hold is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Gpu, Machine, described_hardware, read_machines

_SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"


def plan(model: str, **settings: object) -> EnginePlan:
    fixed: dict[str, object] = {"load_format": "dummy", "skip_tokenizer_init": True, "batch_invariant": True}
    config = EngineConfig.from_flat(_SHAPES / model, **{**fixed, **settings})
    return plan_engine(config, described_hardware(read_machines("4x80GB")))


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b"])
def test_it_reaches_all_stages(model: str) -> None:
    assert all(spec.is_batch_invariant for spec in plan(model, num_stages=2, tensor_parallel_size=2).stage_specs())
    assert not any(spec.is_batch_invariant for spec in plan(model, batch_invariant=False).stage_specs())


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        ("qwen3-0.6b", {"device": "cpu"}, "stages on cpu in float32, whose products are torch's"),
        ("qwen3-0.6b", {"dtype": "float32"}, "stages on cuda in float32"),
        ("qwen3-0.6b", {"compile": True}, "compile=true"),
        ("qwen3-vl-8b", {}, "images, which encoders compute in batches (num_encoders=0 leaves them out)"),
        ("qwen3.6-27b", {"num_encoders": 0}, "recurrent states, which prompts compute in chunks"),
        ("glm-4.7-flash", {}, "latents, which prompts expand"),
        ("gemma-4-31b", {}, "heads of more than 256, or more than 64 query heads per KV head"),
        ("qwen3-0.6b", {"max_logprobs": 21}, "more than 20 log-probabilities, which torch sums (max_logprobs)"),
        ("qwen3-0.6b", {"max_logprobs": -1}, "more than 20 log-probabilities"),
    ],
)
def test_what_cannot_hold_is_refused(model: str, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match="batch_invariant cannot hold") as raised:
        plan(model, **settings)
    assert reason in str(raised.value.got)


def test_gpus_of_different_kinds_are_refused() -> None:
    machine = Machine((Gpu(80 << 30, "NVIDIA H100 80GB HBM3"), Gpu(80 << 30, "NVIDIA A100-SXM4-80GB")))
    config = EngineConfig.from_flat(_SHAPES / "qwen3-0.6b", load_format="dummy", batch_invariant=True, num_stages=2)
    with pytest.raises(ConfigError, match="batch_invariant cannot hold") as raised:
        plan_engine(config, described_hardware((machine,)))
    assert "NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3" in str(raised.value.got)


def test_a_model_with_images_takes_text_alone() -> None:
    assert plan("qwen3-vl-8b", num_encoders=0).stage_spec(0).is_batch_invariant
