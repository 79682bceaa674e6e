"""The type of the KV cache, and what it does to the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.models.config import load_model_config
from raypp.plan.engine_layout import choose_kv_dtype
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.plan.measure import room_of

_SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"
_EAGLE = {"method": "eagle3", "model": str(_SHAPES / "qwen3-8b-eagle3")}


def _hardware(capability: tuple[int, int]) -> Hardware:
    return Hardware(16, num_gpus=2, gpu_memory_bytes=140 << 30, gpu_capability=capability)


def _plan(**settings: object) -> EnginePlan:
    config = EngineConfig.from_flat(str(_SHAPES / "qwen3-8b"), load_format="dummy", num_stages=2, **settings)
    return plan_engine(config, _hardware((9, 0)))


@pytest.mark.parametrize("speculative", [{}, _EAGLE])
def test_the_plan_counts_the_caches_own_bytes(speculative: dict[str, object]) -> None:
    wide, narrow = (_plan(kv_cache_dtype=asked, speculative=speculative) for asked in ("auto", "fp8"))
    assert (wide.kv_dtype, narrow.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    assert narrow.num_blocks // 2 == wide.num_blocks
    for plan in (wide, narrow):
        assert {plan.stage_spec(index).kv_dtype for index in (0, 1)} == {plan.kv_dtype}
        assert plan.describe()["kv_cache_dtype"] == plan.kv_dtype
        # What was decided is what it would decide again.
        assert _plan(kv_cache_dtype=plan.resolved_config().cache.kv_cache_dtype).kv_dtype == plan.kv_dtype
    assert wide.dtype == narrow.dtype
    assert [stage.weight_bytes for stage in wide.stages] == [stage.weight_bytes for stage in narrow.stages]


def test_more_layers_fit_beside_a_smaller_cache() -> None:
    plans = [_plan(kv_cache_dtype=asked, num_kv_blocks=8000) for asked in ("model", "fp8")]
    wide, narrow = (
        room_of(replace(plan, memory=tuple(replace(stage, share_bytes=20 << 30) for stage in plan.memory)))
        for plan in plans
    )
    assert all(more > fewer for more, fewer in zip(narrow.most_layers(), wide.most_layers(), strict=True))


@pytest.mark.parametrize(
    ("asked", "says_fp8", "capability", "device", "dtype", "expected"),
    [
        ("auto", False, (9, 0), "cuda", "bfloat16", "bfloat16"),
        ("auto", True, (9, 0), "cuda", "bfloat16", "float8_e4m3fn"),
        ("auto", True, (8, 0), "cuda", "bfloat16", "bfloat16"),
        ("auto", True, (0, 0), "cpu", "float32", "float8_e4m3fn"),
        ("model", True, (9, 0), "cuda", "float16", "float16"),
        ("fp8", False, (8, 9), "cuda", "float16", "float8_e4m3fn"),
        ("fp8", False, (8, 0), "cuda", "float32", "float8_e4m3fn"),
        ("fp8", False, (8, 6), "cuda", "bfloat16", None),
    ],
)
def test_which_type(
    asked: str, says_fp8: bool, capability: tuple[int, int], device: str, dtype: str, expected: str | None
) -> None:
    config = EngineConfig.from_flat("tiny", kv_cache_dtype=asked)
    model = replace(load_model_config(_SHAPES / "qwen3-8b"), has_fp8_kv_cache=says_fp8)
    if expected is None:
        with pytest.raises(ConfigError, match="cannot be in 8 bits") as error:
            choose_kv_dtype(config, model, _hardware(capability), device=device, dtype=dtype)
        assert "8.6" in str(error.value)
    else:
        assert choose_kv_dtype(config, model, _hardware(capability), device=device, dtype=dtype) == expected
