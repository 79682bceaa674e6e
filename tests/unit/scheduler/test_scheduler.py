"""What the scheduler promises, one rule a test."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from drive import Pipeline, make_limits, make_request, make_result
from relative_cost import relative_cost

from raypp.errors import RequestError
from raypp.messages import NO_STEP, StepResult
from raypp.scheduler.drafts import FixedDrafts
from raypp.scheduler.scheduler import Scheduler
from raypp.types import FinishReason


def _pipeline(*requests, **limits) -> Pipeline:
    scheduler = Scheduler(make_limits(**limits))
    for request in requests:
        scheduler.add(request)
    return Pipeline(scheduler)


# --- requests that another engine has begun ---


def test_a_begun_request_is_taken_as_one_that_was_preempted():
    pipeline = _pipeline(make_request("a", [3, 4, 5], begun=[7, 8], max_tokens=6, min_tokens=4, eos=frozenset({1})))
    first = pipeline.dispatch()
    assert first is not None
    assert first.start_token_ids.tolist() == [3, 4, 5, 7, 8]
    assert first.start_num_tokens.tolist() == [5]
    assert first.start_prompt_lens.tolist() == [3]
    assert first.start_limits.tolist() == [9]
    assert first.start_params["min_length"].tolist() == [7]
    updates = pipeline.answer(token_id=9)
    assert [update.new_token_ids for update in updates] == [[9]]
    request = updates[0].request
    pipeline.finish()
    assert request.output_token_ids == [7, 8, 9, 7, 7, 7]
    assert request.finish_reason is FinishReason.LENGTH
    stats = pipeline.scheduler.stats()
    assert (stats.num_generated_tokens, stats.num_prompt_tokens, request.num_preemptions) == (4, 0, 0)


def test_a_begun_request_may_be_preempted():
    requests = [make_request(name, 4, begun=[5], max_tokens=40) for name in "ab"]
    pipeline = _pipeline(*requests, num_blocks=13)
    pipeline.finish()
    assert [len(request.output_token_ids) for request in requests] == [40, 40]
    assert requests[1].num_preemptions
    assert requests[1].num_new_tokens == 39


def test_what_of_a_begun_request_is_cached_was_reported_by_the_engine_that_began_it():
    requests = [make_request("a", 12, max_tokens=1), make_request("b", 12, begun=[5], max_tokens=3)]
    pipeline = _pipeline(requests[0], enable_prefix_caching=True)
    pipeline.finish()
    pipeline.scheduler.add(requests[1])
    pipeline.finish()
    assert pipeline.scheduler.stats().num_prefix_hit_tokens > 0
    assert requests[1].num_cached_tokens == 0


def test_requests_in_flight_are_those_of_steps_whose_results_have_not_come():
    pipeline = _pipeline(*(make_request(name) for name in "abc"), max_num_seqs=2)
    assert pipeline.scheduler.requests_in_flight() == []
    pipeline.dispatch_all()
    assert [request.request_id for request in pipeline.scheduler.requests_in_flight()] == ["a", "b"]
    pipeline.scheduler.abort("a")
    assert [request.request_id for request in pipeline.scheduler.requests_in_flight()] == ["b"]
    while pipeline.in_flight:
        pipeline.answer()
    assert pipeline.scheduler.requests_in_flight() == []


# --- admission ---


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("x", 0), "empty"),
        (make_request("x", 256), "too long"),
        (make_request("x", 255, max_tokens=1000), None),
        (make_request("x", 10, max_tokens=150), "KV cache cannot hold"),
        (make_request("a", 10), "unfinished"),
        (make_request("x", 10, max_tokens=3, begun=[5, 6]), None),
        (make_request("x", 10, max_tokens=3, begun=[5, 6, 7]), "comes with all tokens"),
        (make_request("x", 10, max_tokens=3, begun=[5, 6, 7, 8]), "comes with all tokens"),
        (make_request("x", 250, max_tokens=100, begun=[5] * 6), "comes with all tokens"),
        (make_request("x", 10, begun=[5, 9], eos=frozenset({9})), "a token that ends it"),
        (make_request("x", 10, begun=[5, 9], stop_token_ids=[9]), "a token that ends it"),
        (make_request("x", 10, begun=[5, 9], eos=frozenset({9}), ignore_eos=True), None),
        (make_request("x", 10, begun=[5, 300]), "not in the vocabulary"),
        (make_request("x", 10, begun=[-1]), "not in the vocabulary"),
    ],
)
def test_what_can_never_run_is_refused(request_, message):
    scheduler = Scheduler(make_limits(num_blocks=65 if message != "KV cache cannot hold" else 32, vocab_size=300))
    scheduler.add(make_request("a", 10))
    if message is None:
        scheduler.add(request_)
        return
    with pytest.raises(RequestError, match=message) as caught:
        scheduler.add(request_)
    assert caught.value.request_id == request_.request_id
    assert caught.value.got is not None
    assert caught.value.expected is not None
    scheduler.check_integrity()
    assert scheduler.stats().num_waiting == 1


def test_an_id_may_be_used_again_once_its_request_has_ended():
    pipeline = _pipeline(make_request("a", max_tokens=1))
    pipeline.finish()
    pipeline.scheduler.add(make_request("a", max_tokens=1))
    pipeline.finish()


def test_nobody_is_overtaken_by_a_request_that_would_fit():
    pipeline = _pipeline(num_blocks=17)
    first, large, small = make_request("a", 32), make_request("b", 40, max_tokens=9), make_request("c", 4)
    first.params = make_request(max_tokens=20).params
    small.params = make_request(max_tokens=4).params
    for request in (first, large, small):
        pipeline.scheduler.add(request)
    pipeline.dispatch_all()
    assert pipeline.scheduler.stats().num_running == 1
    pipeline.finish()
    assert [len(request.output_token_ids) for request in (first, large, small)] == [20, 9, 4]


def test_a_block_per_running_row_stays_free():
    requests = [
        make_request("a", 4, max_tokens=4),
        make_request("b", 4, max_tokens=4),
        make_request("c", 8, max_tokens=4),
    ]
    pipeline = _pipeline(*requests, num_stages=1, num_blocks=6)
    plan = pipeline.dispatch()
    assert plan.num_scheduled_tokens.tolist() == [4, 4], "c's two blocks are free, but not two more for a and b"
    pipeline.finish()


# --- prefill ---


def test_chunks_of_a_prompt_ride_on_consecutive_steps_without_any_result():
    pipeline = _pipeline(make_request(prompt=200), num_stages=4, max_num_batched_tokens=64)
    plans = pipeline.dispatch_all()
    assert len(plans) == 8  # two steps of each of the four cohorts
    assert [plan.cohort for plan in plans] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert all(plan.requires_feedback_of == NO_STEP for plan in plans)
    ends = [int(plan.num_computed_tokens[0] + plan.num_scheduled_tokens[0]) for plan in plans]
    starts = [int(plan.num_computed_tokens[0]) for plan in plans]
    assert starts == [0, *ends[:-1]]
    assert not any(plan.samples.any() for plan in plans)
    pipeline.finish()
    assert [bool(plan.samples.any()) for plan in pipeline.plans].index(True) >= 15
    assert pipeline.scheduler.stats().num_prefills == 1
    assert pipeline.scheduler.stats().num_prefill_chunks >= 16


def test_one_stage_fills_its_steps():
    pipeline = _pipeline(make_request(prompt=150), num_stages=1, max_num_batched_tokens=64)
    assert [int(plan.num_scheduled_tokens.sum()) for plan in pipeline.dispatch_all()] == [64, 64]
    pipeline.answer()
    last = pipeline.dispatch()
    assert last.num_scheduled_tokens.tolist() == [22]
    assert last.samples.tolist() == [True]


def test_a_step_holds_its_share_of_the_rows():
    requests = [make_request(str(i), 2) for i in range(7)]
    pipeline = _pipeline(*requests, num_stages=3, max_num_seqs=7)
    assert [len(plan.rows) for plan in pipeline.dispatch_all()][:3] == [3, 3, 1]


def test_short_prompts_enter_a_pipeline_many_at_a_time():
    limits = make_limits(max_num_seqs=64, max_num_batched_tokens=2048, min_prefill_chunk_tokens=512)
    pipeline = Pipeline(Scheduler(limits))
    for index in range(200):
        pipeline.scheduler.add(make_request(f"r{index}", prompt=8, max_tokens=1))
    pipeline.finish()
    assert len(pipeline.plans) < 30, "of 32 rows each; a step may take 8 times as long as one with a single token"


def test_decode_rows_come_first_and_prompts_take_what_is_left():
    pipeline = _pipeline(make_request("a", 4), num_stages=1, max_num_batched_tokens=16)
    pipeline.dispatch()
    pipeline.scheduler.add(make_request("b", 40))
    plan = pipeline.dispatch()
    assert plan.num_decode_rows == 1
    assert plan.rows.tolist() == [0, 1]
    assert plan.num_scheduled_tokens.tolist() == [1, 15]


# --- decode ---


def test_a_lone_request_is_two_steps_ahead_of_its_results():
    pipeline = _pipeline(make_request(max_tokens=5), num_stages=2)
    prefill, decode = pipeline.dispatch_all()
    assert (prefill.requires_feedback_of, decode.requires_feedback_of) == (NO_STEP, 0)
    pipeline.answer()
    (second,) = pipeline.dispatch_all()
    assert second.requires_feedback_of == 1
    assert second.num_computed_tokens.tolist() == [5]
    pipeline.finish()
    assert pipeline.scheduler.stats().num_steps == 5  # one per token: none is wasted on what the limit ends


def test_a_third_step_is_for_when_no_prompt_is_about():
    pipeline = _pipeline(make_request("a", max_tokens=20), make_request("b", max_tokens=20), max_steps_per_cohort=3)
    pipeline.dispatch_all()
    pipeline.answer()
    pipeline.dispatch_all()
    assert len(pipeline.in_flight) == 6
    pipeline.scheduler.add(make_request("late", 4))
    for num_left in (5, 4):
        pipeline.answer()
        assert not pipeline.dispatch_all(), "the prompt would come no earlier"
        assert len(pipeline.in_flight) == num_left
    pipeline.answer()
    [plan] = pipeline.dispatch_all()[:1]
    assert plan.num_decode_rows == len(plan.rows) - 1
    pipeline.finish()


def test_a_burst_is_spread_over_the_cohorts():
    requests = [make_request(str(i), 2, max_tokens=20) for i in range(8)]
    pipeline = _pipeline(*requests, num_stages=4, max_num_seqs=32, min_prefill_chunk_tokens=16)
    for _ in range(12):
        pipeline.dispatch_all()
        pipeline.answer()
    assert [len(plan.rows) for plan in pipeline.plans[:9]] == [8, 2, 2, 2, 2, 2, 2, 2, 2]
    assert [plan.requires_feedback_of for plan in pipeline.plans[4:]] == [
        max(plan.step_id - 4, 0) for plan in pipeline.plans[4:]
    ]


def test_bounds_cover_what_drafts_may_bring():
    scheduler = Scheduler(make_limits(num_stages=1, max_drafts=3, block_size=1), FixedDrafts(3))
    scheduler.add(make_request(prompt=4, max_tokens=20))
    pipeline = Pipeline(scheduler)
    prefill, decode = pipeline.dispatch_all()
    assert prefill.num_drafts == 0
    assert decode.num_drafts == 3
    assert decode.num_scheduled_tokens.tolist() == [4]
    assert decode.num_computed_tokens.tolist() == [4]
    assert len(prefill.block_ids) + len(decode.block_ids) == 8
    pipeline.answer()
    second = pipeline.dispatch()
    assert second.num_computed_tokens.tolist() == [8]  # 5 known, up to 4 more in flight, less the last one
    pipeline.in_flight.popleft()
    token_ids = np.array([[7, 7, 7, 7]], np.int32)
    num_two = np.array([2], np.int32)
    (update,) = scheduler.update(StepResult(decode.step_id, token_ids, num_two, num_two + 1, num_two - 1))
    assert update.new_token_ids == [7, 7]
    counts = update.request.draft_counts
    assert (counts.drafted_by_position, counts.accepted_by_position) == ([1, 1, 1], [1, 0, 0])
    third = pipeline.dispatch()
    assert third.num_computed_tokens.tolist() == [10]  # 7 known and up to 4 more
    scheduler.check_integrity()


def test_drafts_are_cut_to_the_tokens_of_a_step():
    requests = [make_request(str(i), 2) for i in range(4)]
    scheduler = Scheduler(
        make_limits(num_stages=1, max_num_seqs=4, max_num_batched_tokens=10, max_drafts=3), FixedDrafts(3)
    )
    for request in requests:
        scheduler.add(request)
    plans = Pipeline(scheduler).dispatch_all()
    assert plans[1].num_decode_rows == 4
    assert plans[1].num_drafts == 1
    assert plans[1].num_scheduled_tokens.sum() <= 10


# --- the end ---


def test_results_of_an_ended_request_are_ignored_and_its_row_waits_for_them():
    pipeline = _pipeline(make_request("a", eos=frozenset({7})), make_request("b"), num_stages=1, max_num_seqs=2)
    pipeline.dispatch_all()
    a, b = (update.request for update in pipeline.answer(token_id=7))
    assert (a.finish_reason, b.finish_reason) == (FinishReason.STOP, FinishReason.NONE)
    pipeline.scheduler.add(make_request("c"))
    plan = pipeline.dispatch()
    assert plan.rows.tolist() == [1], "row 0 is still in a step in flight"
    assert [update.request for update in pipeline.answer()] == [b]
    plan = pipeline.dispatch()
    assert plan.start_rows.tolist() == [0]
    assert plan.requires_feedback_of >= 1, "the old owner's last feedback must not come after the new owner"


def test_abort_frees_blocks_at_once_whatever_the_request_is_doing():
    waiting, prefilling, decoding = make_request("w", 9), make_request("p", 100), make_request("d", 3)
    pipeline = _pipeline(decoding, prefilling, waiting, max_num_seqs=2, num_stages=1, max_num_batched_tokens=32)
    pipeline.dispatch_all()
    stats = pipeline.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    for request in (waiting, prefilling, decoding):
        assert pipeline.scheduler.abort(request.request_id)
        pipeline.scheduler.check_integrity()
        assert request.finish_reason == FinishReason.ABORT
        assert not pipeline.scheduler.abort(request.request_id)
    assert not pipeline.scheduler.has_unfinished
    assert pipeline.scheduler.stats().num_free_blocks == 199
    assert pipeline.dispatch() is None
    assert pipeline.answer() == pipeline.answer() == []
    assert not pipeline.scheduler.abort("never there")


# --- prefix cache ---


def test_a_prompt_starts_from_what_was_computed_before_outputs_included():
    pipeline = _pipeline(make_request("a", 10, max_tokens=8), enable_prefix_caching=True)
    pipeline.finish()
    again = make_request("b", [*range(10), *[7] * 8, 1, 2, 3], max_tokens=2)
    pipeline.scheduler.add(again)
    plan = pipeline.dispatch()
    # 18 tokens were known at the end; the last has no KV, so blocks 0 to 3 of four tokens are full.
    assert again.num_cached_tokens == 16
    assert plan.num_computed_tokens.tolist() == [16]
    assert plan.num_scheduled_tokens.tolist() == [5]
    stats = pipeline.scheduler.stats()
    assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (31, 16)
    pipeline.finish()


def test_tokens_after_the_end_are_not_cached():
    scheduler = Scheduler(
        make_limits(num_stages=1, max_drafts=3, enable_prefix_caching=True, block_size=2), FixedDrafts(3)
    )
    scheduler.add(make_request("a", 4, eos=frozenset({5})))
    pipeline = Pipeline(scheduler)
    pipeline.dispatch_all()
    pipeline.answer(token_id=4)
    decode = pipeline.in_flight.popleft()
    result = StepResult(decode.step_id, np.array([[5, 6, 7, 8]], np.int32), np.array([4]), np.array([3]), np.array([3]))
    (update,) = scheduler.update(result)
    assert update.new_token_ids == [5]
    again = make_request("b", [0, 1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
    scheduler.add(again)
    pipeline.dispatch()
    assert again.num_cached_tokens == 4
    pipeline.finish()


def test_a_prefix_is_shared_from_the_step_after_its_dispatch():
    prompt = list(range(16))
    requests = [make_request(name, prompt) for name in "ab"]
    pipeline = _pipeline(*requests, num_stages=2, enable_prefix_caching=True, min_prefill_chunk_tokens=16)
    first, second = pipeline.dispatch(), pipeline.dispatch()
    assert first.num_scheduled_tokens.tolist() == [16]
    assert second.num_computed_tokens[-1] == 12
    assert second.num_scheduled_tokens[-1] == 4


# --- preemption ---


def _fill(num_blocks: int, num_requests: int, max_tokens: int, **limits) -> tuple[Pipeline, list]:
    requests = [make_request(str(i), 4, max_tokens=max_tokens) for i in range(num_requests)]
    return _pipeline(*requests, num_blocks=num_blocks, max_num_seqs=num_requests, **limits), requests


def test_who_came_last_is_preempted_and_everybody_ends():
    pipeline, requests = _fill(num_blocks=13, num_requests=3, max_tokens=36, num_stages=1)
    pipeline.finish()
    assert requests[0].num_preemptions == 0
    assert requests[2].num_preemptions >= 1
    assert all(request.output_token_ids == [7] * 36 for request in requests)
    stats = pipeline.scheduler.stats()
    assert stats.num_preemptions == sum(request.num_preemptions for request in requests)
    assert stats.num_prefills == 3 + stats.num_preemptions
    assert stats.num_prompt_tokens == 12
    assert stats.num_free_blocks == 12


def test_a_preempted_request_comes_back_with_all_its_tokens_and_its_first_count_of_cached_ones():
    pipeline, requests = _fill(13, 3, 36, num_stages=1, enable_prefix_caching=True)
    pipeline.finish()
    restarts = [plan for plan in pipeline.plans if len(plan.start_rows) and plan.start_num_tokens.max() > 4]
    assert restarts
    for plan in restarts:
        assert set(plan.start_prompt_lens.tolist()) == {4}
        ends = np.cumsum(plan.start_num_tokens)
        for tokens in np.split(plan.start_token_ids, ends[:-1]):
            assert tokens.tolist() == [0, 1, 2, 3] + [7] * (len(tokens) - 4)
    assert requests[2].num_cached_tokens == 0
    assert pipeline.scheduler.stats().num_prefix_hit_tokens > 0


def test_the_one_preempted_may_stand_in_the_plan_already():
    pipeline, requests = _fill(num_blocks=4, num_requests=2, max_tokens=8, num_stages=1)
    pipeline.dispatch()
    pipeline.answer()
    cohort = pipeline.scheduler._running.cohorts.in_turn()[0]
    cohort.states.reverse()  # the newer one is asked first, and gets the last block
    plan = pipeline.dispatch()
    assert plan.rows.tolist() == plan.block_rows.tolist() == [0]
    pipeline.finish()
    assert requests[1].num_preemptions == 1
    assert requests[0].num_preemptions == 0


def test_a_row_that_lacks_blocks_waits_when_steps_in_flight_must_end_a_request():
    ending, growing = make_request("a", 4, max_tokens=2), make_request("b", 4, max_tokens=8)
    pipeline = _pipeline(ending, growing, num_blocks=4, max_num_seqs=2, num_stages=1)
    pipeline.finish()
    assert pipeline.scheduler.stats().num_preemptions == 0
    assert len(growing.output_token_ids) == 8


def _preempt_in_flight() -> tuple[Pipeline, list]:
    """Return a pipeline in which request 1 has just been preempted, with a step of it in flight."""
    requests = [make_request("0", 2, max_tokens=16), make_request("1", 7, max_tokens=16)]
    pipeline = _pipeline(*requests, num_blocks=7, max_num_seqs=2, num_stages=2)
    while not requests[1].num_preemptions:
        if pipeline.dispatch() is None:
            pipeline.answer()
    assert any(1 in plan.rows for plan in pipeline.in_flight)
    return pipeline, requests


def test_a_preempted_request_comes_back_when_its_last_token_is_known():
    pipeline, requests = _preempt_in_flight()
    pipeline.scheduler.abort("0")  # all blocks are free now
    assert pipeline.dispatch() is None
    while any(1 in plan.rows for plan in pipeline.in_flight):
        assert not len(pipeline.plans[-1].start_rows)
        pipeline.answer()
    num_known = 7 + len(requests[1].output_token_ids)
    assert pipeline.dispatch().start_num_tokens.tolist() == [num_known]
    pipeline.finish()
    assert requests[1].output_token_ids == [7] * 16


def test_a_preempted_request_may_end_while_it_waits():
    pipeline, requests = _preempt_in_flight()
    requests[1].eos_token_ids = frozenset({7})
    pipeline.scheduler._states["1"].end_token_ids = frozenset({7})
    while pipeline.in_flight and not requests[1].finish_reason:
        pipeline.answer()
    assert requests[1].finish_reason == FinishReason.STOP
    assert pipeline.scheduler.stats().num_waiting == 0
    pipeline.finish()
    assert len(requests[0].output_token_ids) == 16


# --- the whole ---


def test_stats_can_be_sent():
    pipeline = _pipeline(make_request(max_tokens=3))
    pipeline.dispatch()
    stats = pipeline.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_in_flight, stats.num_steps) == (1, 0, 1, 1)
    assert stats.num_free_blocks == 198
    assert stats.kv_usage == pytest.approx(1 / 199)
    pipeline.finish()
    assert pipeline.scheduler.stats().num_generated_tokens == 3


def test_results_out_of_order_are_our_bug():
    pipeline = _pipeline(make_request())
    _, second = pipeline.dispatch_all()
    with pytest.raises(AssertionError, match="step order"):
        pipeline.scheduler.update(make_result(second))


@pytest.mark.parametrize(("num_requests", "most"), [(256, 4.0), (1, 0.4)])
def test_a_step_costs_the_driver_little(num_requests, most):
    limits = make_limits(
        max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=1024, block_size=16, num_blocks=20_000
    )
    scheduler = Scheduler(limits)
    for i in range(num_requests):
        scheduler.add(make_request(str(i), 8, max_tokens=1000))
    plans = []

    def step(result):
        scheduler.update(result)
        if (plan := scheduler.schedule()) is not None:
            plans.append(plan)

    def steps():
        for index in range(400):
            while (plan := scheduler.schedule()) is not None:
                plans.append(plan)
            result = make_result(plans.pop(0))
            if index < 50:
                step(result)  # prompts
            else:
                yield partial(step, result)

    assert relative_cost(steps()) < most
    assert num_requests == 1 or len(plans[-1].rows) == 128
