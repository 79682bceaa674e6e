"""Requests that begin alike compute their beginning once, even when they come together."""

from __future__ import annotations

import pytest
from drive import Pipeline, make_limits, make_request

from raypp.scheduler.scheduler import Scheduler
from raypp.types import SamplingParams


def _computed_prompt_tokens(pipeline: Pipeline) -> int:
    return sum(int(plan.num_scheduled_tokens[plan.num_decode_rows :].sum()) for plan in pipeline.plans)


@pytest.mark.parametrize("num_snapshots", [None, 1])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 40])
def test_equal_prompts_that_come_together(num_prompt, num_stages, num_snapshots):
    sizes = {"num_stages": num_stages, "num_snapshots": num_snapshots, "max_num_batched_tokens": 16}
    limits = make_limits(enable_prefix_caching=True, **sizes)
    scheduler = Scheduler(limits)
    pipeline = Pipeline(scheduler)
    for index in range(5):
        scheduler.add(make_request(str(index), num_prompt, max_tokens=3))
    pipeline.finish()
    num_shared = (num_prompt - 1) // limits.block_size * limits.block_size
    assert _computed_prompt_tokens(pipeline) == num_prompt + 4 * (num_prompt - num_shared)


def test_without_the_cache_nobody_waits():
    scheduler = Scheduler(make_limits(num_stages=1, max_num_batched_tokens=64))
    pipeline = Pipeline(scheduler)
    for index in range(5):
        scheduler.add(make_request(str(index), 12))
    assert len(pipeline.dispatch().rows) == 5


def test_different_prompts_do_not_wait():
    scheduler = Scheduler(make_limits(num_stages=1, enable_prefix_caching=True))
    pipeline = Pipeline(scheduler)
    for index in range(5):
        scheduler.add(make_request(str(index), range(100 * index, 100 * index + 12)))
    assert len(pipeline.dispatch().rows) == 5


def test_a_common_beginning_is_waited_for_and_no_more():
    """Four common tokens, one block, then nothing in common: the second prompt starts one step later."""
    limits = make_limits(
        num_stages=1, enable_prefix_caching=True, max_num_batched_tokens=12, min_prefill_chunk_tokens=4
    )
    scheduler = Scheduler(limits)
    pipeline = Pipeline(scheduler)
    scheduler.add(make_request("a", [0, 1, 2, 3, *range(10, 22)]))
    scheduler.add(make_request("b", [0, 1, 2, 3, *range(30, 36)]))
    first, second = pipeline.dispatch(), pipeline.dispatch()
    assert first.num_scheduled_tokens.tolist() == [12]
    assert second.num_scheduled_tokens.tolist() == [4, 6]
    assert second.num_computed_tokens.tolist() == [12, 4]


def test_a_request_that_wants_its_prompts_logprobs_computes_all_of_it():
    limits = make_limits(num_stages=1, enable_prefix_caching=True)
    scheduler = Scheduler(limits)
    pipeline = Pipeline(scheduler)
    scheduler.add(make_request("a", 20, max_tokens=1))
    pipeline.finish()
    request = make_request("b", 20, max_tokens=1)
    request.params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scheduler.add(request)
    plan = pipeline.dispatch()
    assert plan.num_scheduled_tokens.tolist() == [20]
    assert request.num_cached_tokens == 0
    pipeline.finish()
    scheduler.add(make_request("c", 20, max_tokens=1))
    assert pipeline.dispatch().num_scheduled_tokens.tolist() == [4], "its blocks are of use to others"
