"""A stage's first steps write nothing that a request could read."""

from __future__ import annotations

import threading

import pytest
import torch
from sampler_plans import sampler_of

from raypp.config.engine_config import EngineConfig
from raypp.errors import ResourceError
from raypp.messages import NULL_BLOCK
from raypp.ops.kv_cache import sides
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.build_stage import allocate_kv_caches, build_stage_model
from raypp.stage.first_steps import compile_ahead, warm_up
from raypp.stage.step_sizes import FullSize

CPU = torch.device("cpu")


@pytest.mark.parametrize("stage_index", [0, 1])
def test_only_the_null_block_is_written(stage_index):
    config = EngineConfig.from_flat(
        "tiny", num_stages=2, max_model_len=40, max_num_batched_tokens=100, max_num_seqs=8, num_kv_blocks=20
    )
    plan = plan_engine(config, Hardware(1))
    spec = plan.stage_spec(stage_index)
    kv_caches = allocate_kv_caches(spec, plan.model)
    sampler = sampler_of(spec, CPU) if spec.is_last else None
    with torch.inference_mode():
        warm_up(spec, build_stage_model(spec, plan.model, None), kv_caches, sampler)
    for side in sides(kv_caches):
        assert side[NULL_BLOCK].any()
        assert not side[NULL_BLOCK + 1 :].any()
    if sampler is not None:
        history = sampler.history
        for of_rows in (history.lengths, history.output_counts, history.tokens.table):
            assert of_rows[spec.scrap_row].any() or of_rows is history.tokens.table  # where token 0 is written
            assert not of_rows[: spec.scrap_row].any()


@pytest.mark.parametrize("stage_index", [0, 1])
def test_sizes_run_side_by_side_and_write_the_null_block_alone(stage_index):
    settings = {"num_stages": 2, "max_model_len": 40, "max_num_seqs": 8, "num_kv_blocks": 20, "compile_threads": 3}
    plan = plan_engine(EngineConfig.from_flat("tiny", mode="full", **settings), Hardware(1))
    spec = plan.stage_spec(stage_index)
    kv_caches, model = allocate_kv_caches(spec, plan.model), build_stage_model(spec, plan.model, None)
    sampler = sampler_of(spec, CPU) if spec.is_last else None
    forward, seen = model.forward, []

    def noted(hidden: torch.Tensor, *args: object) -> torch.Tensor:
        seen.append((len(hidden), threading.current_thread().name))
        return forward(hidden, *args)

    model.forward = noted  # type: ignore[method-assign, assignment]
    sizes = [FullSize(4, 2), FullSize(4, 0), FullSize(2, 0), FullSize(1, 0)]
    compile_ahead(spec, model, kv_caches, sampler, sizes)
    assert sorted(num_tokens for num_tokens, _ in seen) == [1, 2, 4, 12]
    assert all(thread.startswith("compile") for _, thread in seen)
    for side in sides(kv_caches):
        assert side[NULL_BLOCK].any()
        assert side[NULL_BLOCK].isfinite().all()
        assert not side[NULL_BLOCK + 1 :].any()


def test_what_a_thread_raises_is_raised_but_for_memory():
    plan = plan_engine(EngineConfig.from_flat("tiny", mode="full", compile_threads=2), Hardware(1))
    spec = plan.stage_spec(0)
    model, kv_caches = build_stage_model(spec, plan.model, None), allocate_kv_caches(spec, plan.model)

    def fail(*args: object) -> None:
        raise errors.pop()

    model.forward = fail  # type: ignore[method-assign, assignment]
    errors: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError("again")]
    compile_ahead(spec, model, kv_caches, None, [FullSize(2, 0), FullSize(1, 0)])
    errors = [ValueError("no such kernel"), ValueError("no such kernel")]
    with pytest.raises(ValueError, match="no such kernel"):
        compile_ahead(spec, model, kv_caches, None, [FullSize(2, 0), FullSize(1, 0)])


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
