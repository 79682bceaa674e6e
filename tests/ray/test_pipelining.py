"""Pipelining is real: stages that only take time are busy at once, and one cohort alone leaves them idle."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from machine_speed import slowness
from sizes import sized

from raypp import LLM, SamplingParams, bubble_fraction
from raypp.testing import FakeStage
from raypp.tracing import DRIVER_LANE, Lane, now_ns, read_chrome_trace, write_chrome_trace

pytestmark = pytest.mark.ray

NUM_STAGES = sized(3, 4)
NUM_STEPS = 25 * NUM_STAGES
MAX_BUBBLE = sized(0.5, 0.25)
"""What a pipeline that waits where it need not exceeds: on a machine of its own, as in soak, 0.25. In CI other tests
run beside it, and make bubbles. The aim is 0.10, see benchmarks/pipeline_bubble.py."""
STEP_MS = 5.0
"""Of an ordinary machine; where the driver takes longer for a step, stages do, too."""
QUICK = 1.35
"""A burst that takes no longer than this many times its steps, to the driver and back, has hardly any bubbles."""
DEADLINE_S = sized(5.0, 30.0)


@dataclass(frozen=True)
class Burst:
    """Requests that ran at once, and when."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9

    def cut_out(self, path: Path) -> Path:
        """Return the path of a trace that has only this part of another one."""
        lanes = [
            Lane(lane.name, [event for event in lane.events if self.start_ns <= event.start_ns < self.end_ns])
            for lane in read_chrome_trace(path)
        ]
        part = path.with_name(f"{self.start_ns}.json")
        write_chrome_trace(part, lanes)
        return part


def _run(llm: LLM, num_requests: int) -> Burst:
    params = SamplingParams(max_tokens=NUM_STEPS // NUM_STAGES, temperature=0.0, ignore_eos=True)
    started = now_ns()
    outputs = llm.generate([{"prompt_token_ids": [100 * (1 + i)]} for i in range(num_requests)], params)
    for index, output in enumerate(outputs):
        first = 100 * (1 + index) + 1
        assert output.outputs[0].token_ids == list(range(first, first + NUM_STEPS // NUM_STAGES))
    return Burst(started, now_ns())


@dataclass(frozen=True)
class Traced:
    """What an engine did, one burst after the other."""

    one_request: Path
    as_many_as_stages: Path


@pytest.fixture(scope="module")
def traced(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Run one request alone, then as many as there are stages, again and again until the stages were busy.

    Other load on a small machine only ever adds bubbles: the quickest burst counts.
    """
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    step_ms = STEP_MS * slowness()
    quick_s = QUICK * NUM_STEPS * step_ms / 1e3
    with LLM(
        "tiny",
        num_stages=NUM_STAGES,
        max_num_seqs=NUM_STAGES,
        device="cpu",
        stage_factory=FakeStage(step_ms),
        trace=str(path),
    ) as llm:
        one_request, bursts = _run(llm, 1), [_run(llm, NUM_STAGES)]
        ends_s = time.monotonic() + DEADLINE_S
        while min(burst.seconds for burst in bursts) > quick_s and time.monotonic() < ends_s:
            bursts.append(_run(llm, NUM_STAGES))
    quickest = min(bursts, key=lambda burst: burst.seconds)
    print(f"\nsteps of {step_ms:.1f} ms; seconds of bursts: {[round(burst.seconds, 2) for burst in bursts]}")
    return Traced(one_request.cut_out(path), quickest.cut_out(path))


def test_as_many_cohorts_as_stages_keep_them_busy(traced: Traced) -> None:
    lanes = read_chrome_trace(traced.as_many_as_stages)
    assert [lane.name for lane in lanes] == [DRIVER_LANE, *(f"stage {i}" for i in range(NUM_STAGES))]
    assert len({event.step_id for event in lanes[-1].events}) >= NUM_STEPS
    fraction = bubble_fraction(traced.as_many_as_stages)
    print(f"\nbubble fraction, {NUM_STAGES} cohorts: {fraction:.3f}")
    assert fraction < MAX_BUBBLE


def test_one_cohort_leaves_the_others_idle(traced: Traced) -> None:
    fraction = bubble_fraction(traced.one_request)
    print(f"\nbubble fraction, 1 cohort: {fraction:.3f}")
    assert fraction > 0.60
