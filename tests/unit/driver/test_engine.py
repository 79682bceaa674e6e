"""The engine loop against a pipeline that only pretends."""

from __future__ import annotations

import math

import numpy as np

from raypp.driver.engine_loop import Engine
from raypp.driver.grammars import Grammars
from raypp.grammar.vocabulary import VocabularySource
from raypp.messages import BlockGroup, StepPlan, StepResult
from raypp.request import Request
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.scheduler import Scheduler
from raypp.testing.local_engine import InlineGrammars
from raypp.tracing import Tracer
from raypp.types import FinishReason, SamplingParams


class PretendedPipeline:
    """Answers each plan with its step id as every token, when told to."""

    def __init__(self) -> None:
        self.in_flight: list[StepPlan] = []
        self.num_released = 0

    def submit(self, plan: StepPlan) -> None:
        self.in_flight.append(plan)

    def collect(self) -> list[StepResult]:
        released, self.num_released = self.num_released, 0
        plans, self.in_flight = self.in_flight[:released], self.in_flight[released:]
        return [
            StepResult(
                plan.step_id,
                np.full((len(plan.rows), 1), plan.step_id, np.int32),
                plan.samples.astype(np.int32),
            )
            for plan in plans
        ]

    def close(self) -> None:
        self.in_flight.clear()


def _engine(num_stages: int) -> tuple[Engine, PretendedPipeline]:
    limits = SchedulerLimits(
        num_stages=num_stages,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        block_size=8,
        groups=(BlockGroup(65),),
        enable_prefix_caching=False,
        min_prefill_chunk_tokens=16,
    )
    pipeline = PretendedPipeline()
    grammars = Grammars(InlineGrammars(VocabularySource("", 0, ())), math.inf, lambda _: None)
    return Engine(Scheduler(limits), pipeline, Tracer("driver", enabled=False), None, grammars), pipeline


def _request(name: str, max_tokens: int = 4) -> Request:
    return Request(name, np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=max_tokens, temperature=0.0), seed=0)


def test_two_steps_are_dispatched_before_any_result():
    engine, pipeline = _engine(num_stages=2)
    engine.add(_request("a"))
    engine.step()
    assert [plan.step_id for plan in pipeline.in_flight] == [0, 1]
    assert pipeline.in_flight[1].requires_feedback_of == 0


def test_a_request_runs_to_its_end_and_nothing_is_left_in_flight():
    engine, pipeline = _engine(num_stages=3)
    requests = [_request(f"r{i}", max_tokens=1 + i) for i in range(5)]
    for request in requests:
        engine.add(request)
    num_calls = 0
    while engine.has_unfinished or pipeline.in_flight:
        engine.step()
        pipeline.num_released = 1
        num_calls += 1
        assert num_calls < 200
    assert [len(request.output_token_ids) for request in requests] == [1, 2, 3, 4, 5]
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
    assert engine.stats().num_in_flight == 0


def test_the_engine_is_busy_only_while_steps_are_in_flight():
    engine, pipeline = _engine(num_stages=1)
    engine.step()
    assert not engine.is_busy
    engine.add(_request("a", max_tokens=1))
    engine.step()
    assert engine.is_busy
    pipeline.num_released = 9
    engine.step()
    assert not engine.is_busy


def test_queue_times_end_with_the_first_row(monkeypatch):
    now = 0
    monkeypatch.setattr("raypp.driver.engine_loop.now_ns", lambda: now)
    engine, pipeline = _engine(num_stages=1)
    requests = [_request(f"r{i}", max_tokens=3) for i in range(10)]  # two more than there are rows
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        pipeline.num_released = 1
        engine.step()
        now += 1_000_000
    # The last two have waited through three steps of the others.
    assert [request.queue_us for request in requests] == [0] * 8 + [3000] * 2
