"""What encoders are to be, from the configuration and the hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.plan.encoder_plan import item_token_bytes
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware

SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"
TWO_GPUS = Hardware(num_cpu_cores=8, memory_bytes=1 << 38, num_gpus=2, gpu_name="G", gpu_memory_bytes=100 << 30)


def plan_of(model: str, **settings: object) -> EnginePlan:
    config = EngineConfig.from_flat(str(SHAPES / model), load_format="dummy", max_model_len=4096, **settings)
    return plan_engine(config, TWO_GPUS)


def test_a_model_that_reads_text_alone_has_no_encoders():
    plan = plan_of("qwen3-0.6b", num_encoders=2)
    assert plan.encoders.num_encoders == 0
    assert plan.scheduler_limits().max_item_tokens == 0
    assert plan.describe()["encoders"] is None


def test_pictures_take_their_share_of_the_first_stage():
    small = plan_of("qwen3-vl-8b", num_stages=2, stage_embedding_bytes=1 << 28)
    large = plan_of("qwen3-vl-8b", num_stages=2, stage_embedding_bytes=8 << 30)
    token_bytes = 4 * 4096 * 2  # an embedding and three deepstack rows
    assert item_token_bytes(small.model, 2) == token_bytes
    assert small.scheduler_limits().max_item_tokens == (1 << 28) // token_bytes
    assert large.num_blocks < small.num_blocks


def test_an_encoder_may_have_a_share_of_a_gpu():
    plan = plan_of("qwen3-vl-8b", encoder_num_gpus=0.25, gpu_memory_utilization=0.8, num_encoders=3)
    assert plan.encoders.num_encoders == 3
    assert plan.encoders.resources["GPU"] == 0.25
    spec = plan.encoders.spec(2)
    assert (spec.encoder_index, spec.captures, spec.token_budgets) == (2, True, None)
    assert spec.memory_bytes == int((100 << 30) * 0.8 * 0.25)
    described = plan.describe()["encoders"]
    assert described["num_encoders"] == 3
    assert described["resources"]["GPU"] == 0.25


@pytest.mark.parametrize(
    ("settings", "captures"), [({"mode": "none"}, False), ({"dtype": "float32"}, False), ({}, True)]
)
def test_graphs_where_they_can_be(settings, captures):
    assert plan_of("qwen3-vl-8b", **settings).encoders.spec(0).captures == captures


@pytest.mark.parametrize("budgets", [[], [0, 64]])
def test_budgets_that_cannot_be_are_refused(budgets):
    with pytest.raises(ConfigError, match="token_budgets"):
        plan_of("qwen3-vl-8b", token_budgets=budgets)
