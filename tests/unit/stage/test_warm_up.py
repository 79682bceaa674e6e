"""A stage's first steps write nothing that a request could read."""

from __future__ import annotations

import pytest
import torch

from raypp.config.engine import EngineConfig
from raypp.driver.engine_plan import plan_engine
from raypp.driver.hardware import Hardware
from raypp.errors import ResourceError
from raypp.messages import NULL_BLOCK
from raypp.stage.build import allocate_kv_caches, build_stage_model
from raypp.stage.warm_up import warm_up


@pytest.mark.parametrize("stage_index", [0, 1])
def test_only_the_null_block_is_written(stage_index):
    config = EngineConfig.from_flat(
        "tiny", num_stages=2, max_model_len=40, max_num_batched_tokens=100, max_num_seqs=8, num_kv_blocks=20
    )
    plan = plan_engine(config, Hardware(1))
    spec = plan.stage_spec(stage_index)
    kv_caches = allocate_kv_caches(spec, plan.model)
    with torch.inference_mode():
        warm_up(spec, build_stage_model(spec, plan.model, None), kv_caches)
    for kv_cache in kv_caches:
        assert kv_cache[:, NULL_BLOCK].any()
        assert not kv_cache[:, NULL_BLOCK + 1 :].any()


def test_a_step_that_memory_does_not_hold_is_refused():
    plan = plan_engine(EngineConfig.from_flat("tiny"), Hardware(1))
    spec = plan.stage_spec(0)
    model = build_stage_model(spec, plan.model, None)

    def out_of_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nmore")

    model.forward = out_of_memory  # type: ignore[method-assign, assignment]
    with pytest.raises(ResourceError, match="no memory for a step") as caught, torch.inference_mode():
        warm_up(spec, model, allocate_kv_caches(spec, plan.model))
    assert "1.00 GiB" in str(caught.value.got)
