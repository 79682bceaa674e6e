"""How many steps of a cohort may be in flight, by the model and what is asked for."""

from __future__ import annotations

import pytest
from model_configs import write_config

from raypp.config.engine import EngineConfig
from raypp.driver.engine_plan import plan_engine
from raypp.driver.hardware import Hardware

GIB = 1 << 30
CPU = Hardware(4)
H200 = Hardware(16, 128 * GIB, 2, "NVIDIA H200", 140 * GIB)


@pytest.mark.parametrize(
    ("shape", "num_layers", "hardware", "settings", "expected"),
    [
        ("qwen3-0.6b", 28, H200, {}, 3),
        ("qwen3-0.6b", 28, CPU, {}, 2),
        ("qwen3-0.6b", 28, H200, {"speculative": {"method": "ngram"}}, 2),
        ("qwen3-0.6b", 28, H200, {"max_steps_per_cohort": 2}, 2),
        ("qwen3-8b", 36, H200, {}, 2),
        ("qwen3-8b", 36, H200, {"max_steps_per_cohort": 4}, 4),
    ],
)
def test_a_third_step_is_for_short_ones(tmp_path, shape, num_layers, hardware, settings, expected):
    path = write_config(shape, num_layers, tmp_path)
    settings = {"load_format": "dummy", "num_stages": 2, "max_model_len": 1024, "num_kv_blocks": 256} | settings
    plan = plan_engine(EngineConfig.from_flat(str(path), **settings), hardware)
    assert plan.scheduler_limits().max_steps_per_cohort == expected
    assert plan.stage_spec(1).num_ring_entries == 2 * expected
    assert plan.describe()["max_steps_per_cohort"] == expected
    assert plan.resolved_config().scheduler.max_steps_per_cohort == expected
