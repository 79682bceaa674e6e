"""How often a decode step calls its device: each call costs a GPU's host several microseconds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from idle_stages import DeviceCalls, build_idle_stages

from raypp.config.engine_config import EngineConfig
from raypp.messages import StepPlan
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.stage import Stage
from raypp.stage.step_result import PendingResult
from raypp.testing import LocalEngine, LocalPipeline
from raypp.types import SamplingParams


class CountedStage:
    """A stage, and the calls of each of its steps of decode rows alone."""

    def __init__(self, stage: Stage, calls: DeviceCalls) -> None:
        self._stage = stage
        self._calls = calls
        self.counts: list[Counter[str]] = []

    def bind_thread(self) -> None:
        self._stage.bind_thread()

    def announce(self, plan: StepPlan) -> None:
        self._stage.announce(plan)

    def catch_up(self) -> bool:
        return self._stage.catch_up()

    def take_masks(self, update) -> None:
        self._stage.take_masks(update)

    def step(self, plan: StepPlan) -> PendingResult | None:
        before = self._calls.counts.copy()
        with self._calls:
            result = self._stage.step(plan)
        if plan.num_decode_rows == len(plan.rows):
            self.counts.append(self._calls.counts - before)
        return result


def _last_counts(num_stages: int, num_requests: int, **settings: object) -> list[Counter[str]]:
    """Return the calls of each stage's steps once the same rows have decoded for a while; they are the same for all."""
    sizes = {"num_stages": num_stages, "max_num_seqs": max(num_requests, num_stages), "max_num_batched_tokens": 64}
    plan = plan_engine(EngineConfig.from_flat("tiny", mode="full", **sizes, **settings), Hardware(2))
    calls = DeviceCalls()
    stages = [CountedStage(stage, calls) for stage in build_idle_stages(plan, calls)]
    engine = LocalEngine(plan, pipeline=LocalPipeline(stages))
    with torch.inference_mode():
        engine.generate([[5, 6, 7]] * num_requests, SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0))
    last = [stage.counts[-20:-6] for stage in stages]
    assert all(len(of_stage) == 14 and all(counts == of_stage[0] for counts in of_stage) for of_stage in last)
    return [of_stage[0] for of_stage in last]


@pytest.mark.parametrize("num_requests", [1, 6])
def test_a_stage_uploads_replays_and_hands_on(num_requests):
    first, middle, last = _last_counts(3, num_requests)
    assert first == middle == {"kernels": 1, "replays": 1, "flags": 4}
    assert last == {"kernels": 2, "replays": 2, "flags": 4}, "its result is the second copy"


def test_drafts_are_in_the_same_copies():
    first, last = _last_counts(2, 4, speculative={"method": "ngram", "num_speculative_tokens": 3})
    assert first == {"kernels": 1, "replays": 1, "flags": 4}
    assert last == {"kernels": 2, "replays": 2, "flags": 4}
