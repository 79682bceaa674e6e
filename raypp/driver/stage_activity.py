"""Keeps what stages reported lately: busy time, and their last forwards for a live image."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raypp.messages import Bools, Int32s, StageReport, StepPlan, Unrecorded
from raypp.scheduler.step_predictor import StageTimes, StepPredictor, StepWork, amounts, step_ms, step_work

_MAX_SPANS = 2048  # per stage
_MAX_STEPS = 4096
_LEARNED = 6  # of a report's steps of either kind, with prompts and without: a driver has other things to do


class _Span(NamedTuple):
    step_id: int
    start_us: int
    end_us: int
    form: int
    times: StageTimes | None  # as they were known when it was planned, or little later


@dataclass(slots=True)
class _Stage:
    num_steps: int = 0
    busy_ns: int = 0
    copy_wait_ns: int = 0
    graphs: dict[str, dict[str, float]] = field(default_factory=dict)
    num_unrecorded: dict[str, int] = field(default_factory=lambda: {why.name.lower(): 0 for why in Unrecorded})
    spans: deque[_Span] = field(default_factory=lambda: deque(maxlen=_MAX_SPANS))


@dataclass(frozen=True, slots=True)
class _Step:
    cohort: int
    num_decode_rows: int
    num_scheduled_tokens: Int32s  # these are added up only when somebody looks
    num_computed_tokens: Int32s
    samples: Bools

    @property
    def work(self) -> StepWork:
        return step_work(self.num_decode_rows, self.num_scheduled_tokens, self.num_computed_tokens, self.samples)


class StageActivity:
    """Keeps the stages' sums, their last forwards, and for how long any step was in flight.

    Args:
        num_stages: That report.
        predictor: Learns from what they report; None: nobody does.
    """

    def __init__(self, num_stages: int, predictor: StepPredictor | None = None) -> None:
        self._predictor = predictor
        self._stages = [_Stage() for _ in range(num_stages)]
        self._steps: dict[int, _Step] = {}
        self._num_in_flight = 0
        self._active_ns = 0
        self._active_since_ns = 0

    @property
    def active_s(self) -> float:
        """Seconds in which steps were in flight, since the start. A stage that is not busy then waits for another."""
        running_ns = time.monotonic_ns() - self._active_since_ns if self._num_in_flight else 0
        return (self._active_ns + running_ns) / 1e9

    def note_graphs(self, of_stages: Sequence[dict[str, dict[str, float]]]) -> None:
        """Take in what the stages' CUDA graphs cost: by mode, see `raypp.graphs.graph_manager.GraphCost`."""
        for stage, graphs in zip(self._stages, of_stages, strict=True):
            stage.graphs = graphs

    def note_dispatched(self, plan: StepPlan) -> None:
        """Remember whose step this is."""
        if not self._num_in_flight:
            self._active_since_ns = time.monotonic_ns()
        self._num_in_flight += 1
        self._steps[plan.step_id] = _Step(
            plan.cohort, plan.num_decode_rows, plan.num_scheduled_tokens, plan.num_computed_tokens, plan.samples
        )
        self._steps.pop(plan.step_id - _MAX_STEPS, None)

    def note_collected(self) -> None:
        """Count a result."""
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self._active_ns += time.monotonic_ns() - self._active_since_ns

    def note_report(self, stage_index: int, report: StageReport) -> None:
        """Take in a stage's report."""
        stage = self._stages[stage_index]
        stage.num_steps, stage.busy_ns = report.num_steps, report.busy_ns
        stage.copy_wait_ns = report.copy_wait_ns
        stage.num_unrecorded = {why.name.lower(): int(report.num_unrecorded[why]) for why in Unrecorded}
        times = None if self._predictor is None else self._predictor.stages[stage_index]
        columns = (report.step_ids, report.start_us, report.end_us, report.forms)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        spans = [_Span(step_id, start_us, end_us, form, times) for step_id, start_us, end_us, form in rows]
        stage.spans.extend(spans)
        if self._predictor is not None:
            self._learn(self._predictor, stage_index, spans)

    def _learn(self, predictor: StepPredictor, stage_index: int, spans: Sequence[_Span]) -> None:
        known = [(step, span) for span in spans if (step := self._steps.get(span.step_id)) is not None]
        with_prompts = [found for found in known if len(found[0].samples) > found[0].num_decode_rows]
        others = [found for found in known if len(found[0].samples) == found[0].num_decode_rows]
        taken = with_prompts[-_LEARNED:] + others[-_LEARNED:]
        predictor.learn(
            stage_index, [step.work for step, _ in taken], [(span.end_us - span.start_us) / 1e3 for _, span in taken]
        )

    def sums(self) -> list[dict[str, Any]]:
        """Return num_steps, busy_s and copy_wait_s of every stage, since the start, and what its graphs took.

        And num_unrecorded: how many steps of a stage that makes graphs ran without one, by the name of `Unrecorded`.
        """
        return [
            {
                "num_steps": stage.num_steps,
                "busy_s": stage.busy_ns / 1e9,
                "copy_wait_s": stage.copy_wait_ns / 1e9,
                "num_unrecorded": stage.num_unrecorded,
                "graphs": stage.graphs,
            }
            for stage in self._stages
        ]

    def spans_after(self, end_us: int) -> list[list[Any]]:
        """Return the kept forwards that ended later, each the fields of `raypp.api.timeline.Forward`.

        Args:
            end_us: Microseconds since the epoch. A stage reports its forwards in order; stages report independently.
        """
        found: list[list[Any]] = []
        for stage_index, stage in enumerate(self._stages):
            for span in reversed(stage.spans):
                if span.end_us <= end_us:
                    break
                step = self._steps.get(span.step_id)
                if step is not None:
                    work, predicted_us = step.work, 0
                    if self._predictor is not None and span.times is not None:
                        predicted_us = round(step_ms(span.times, amounts(work, self._predictor.roofline)) * 1e3)
                    of_step = (step.cohort, len(step.samples), work.num_tokens)
                    found.append([stage_index, *span[:3], *of_step, span.form, list(work), predicted_us])
        return found
