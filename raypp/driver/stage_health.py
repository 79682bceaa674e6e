"""Finds stages that stand still, by their heartbeats and a clock; and of several reports of a failure, the cause.

Two rules. Steps are in flight and no stage has finished another one for `step_timeout_s`: the pipeline is frozen. A
stage has said nothing at all for `silence_timeout_s`, busy or idle: it is frozen, or its machine is gone.

One stage that ends takes the others' waits with it, so several reports come within milliseconds, in any order, from Ray
and from the stages themselves. The driver waits a moment before it believes one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from raypp.errors import RayppError, StageDiedError, name_process
from raypp.messages import NO_STEP, Bools, Int32s, StageReport, StepPlan, Unrecorded
from raypp.scheduler.step_budget import StageTimes, StepPredictor, StepWork, amounts, step_ms, step_work

_MAX_SPANS = 2048  # per stage
_MAX_STEPS = 4096
_LEARNED = 6  # of a report's steps of either kind, with prompts and without: a driver has other things to do


class _Span(NamedTuple):
    step_id: int
    start_us: int
    end_us: int
    form: int
    times: StageTimes  # as they were known when it was planned, or little later


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
    num_scheduled_tokens: Int32s  # these are added up only when a timeline is asked for
    num_computed_tokens: Int32s
    samples: Bools

    @property
    def work(self) -> StepWork:
        return step_work(self.num_decode_rows, self.num_scheduled_tokens, self.num_computed_tokens, self.samples)


class StageActivity:
    """Keeps the stages' sums, their last forwards, and for how long any step was in flight.

    Args:
        predictor: Of the stages that report; it learns from that.
    """

    def __init__(self, predictor: StepPredictor) -> None:
        self._predictor = predictor
        self._stages = [_Stage() for _ in predictor.stages]
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
        """Remember the step's cohort, rows and tokens."""
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
        times = self._predictor.stages[stage_index]
        columns = (report.step_ids, report.start_us, report.end_us, report.forms)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        spans = [_Span(step_id, start_us, end_us, form, times) for step_id, start_us, end_us, form in rows]
        stage.spans.extend(spans)
        known = [(step, span) for span in spans if (step := self._steps.get(span.step_id)) is not None]
        with_prompts = [found for found in known if len(found[0].samples) > found[0].num_decode_rows]
        others = [found for found in known if len(found[0].samples) == found[0].num_decode_rows]
        taken = with_prompts[-_LEARNED:] + others[-_LEARNED:]
        self._predictor.learn(
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
                    work = step.work
                    predicted_us = round(step_ms(span.times, amounts(work, self._predictor.roofline)) * 1e3)
                    of_step = (step.cohort, len(step.samples), work.num_tokens)
                    found.append([stage_index, *span[:3], *of_step, span.form, list(work), predicted_us])
        return found


_MAX_GAP_S = 5.0
BLAME_S = 0.2
"""How long after the first report a better one may come."""


class AwakeClock:
    """Monotonic time without long gaps between two calls: then this process was stopped (Ctrl-Z) or starved.

    Silence of others meanwhile shows nothing. Must be called at least every few seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_gap_s: float = _MAX_GAP_S) -> None:
        self._clock = clock
        self._max_gap_s = max_gap_s
        self._asleep_s = 0.0
        self._asked_s = clock()

    def __call__(self) -> float:
        """Return the time, seconds."""
        now_s = self._clock()
        gap_s, self._asked_s = now_s - self._asked_s, now_s
        if gap_s > self._max_gap_s:
            self._asleep_s += gap_s
        return now_s - self._asleep_s


class StageHealth:
    """What is known of the stages' progress."""

    def __init__(
        self,
        num_stages: int,
        num_members: int = 1,
        *,
        step_timeout_s: float,
        silence_timeout_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Begin with all stages just heard of.

        Args:
            num_stages: P.
            num_members: Of each stage; where there are several, each is watched.
            step_timeout_s: See above.
            silence_timeout_s: See above.
            clock: Seconds; by default an `AwakeClock`.
        """
        self._step_timeout_s = step_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._clock = clock or AwakeClock()
        self._num_members = num_members
        self._heard_s = [self._clock()] * (num_stages * num_members)
        self._last_step_ids = [NO_STEP] * (num_stages * num_members)
        self._progress_s = self._clock()

    def heard(self, stage_index: int, step_id: int) -> None:
        """Note a sign of a stage, which has finished `step_id` by now."""
        self._heard_s[stage_index] = self._clock()
        if step_id > self._last_step_ids[stage_index]:
            self._last_step_ids[stage_index] = step_id
            self._progress_s = self._clock()

    def silent_s(self) -> list[float]:
        """Return how long ago each stage was heard of, seconds."""
        now_s = self._clock()
        return [now_s - heard_s for heard_s in self._heard_s]

    def check(self, *, is_busy: bool) -> StageDiedError | None:
        """Return the error of a stage that stands still, if one does. To be called again and again, also while idle.

        Args:
            is_busy: Whether steps are in flight.
        """
        silent_s = self.silent_s()
        if max(silent_s) > self._silence_timeout_s:
            index = silent_s.index(max(silent_s))
            name, stage_index = name_process(index, self._num_members)
            return StageDiedError(
                f"{name} is frozen: nothing has been heard of it",
                stage_index=stage_index,
                got=f"no sign of it for {silent_s[index]:.1f} s",
                expected=f"a heartbeat within {self._silence_timeout_s:g} s",
                hint="its process is stopped or starved, or its machine cannot be reached",
                silent_s=silent_s[index],
            )
        if not is_busy:
            self._progress_s = self._clock()
        stalled_s = self._clock() - self._progress_s
        if stalled_s <= self._step_timeout_s:
            return None
        index, is_one = self._slowest(silent_s)
        name, stage_index = name_process(index, self._num_members)
        name = name if is_one else f"a member of stage {stage_index}"
        return StageDiedError(
            f"{name} is frozen: steps are in flight and none has ended",
            stage_index=stage_index,
            got=f"no progress for {stalled_s:.1f} s, no sign of it for {silent_s[index]:.1f} s",
            expected=f"progress within step_timeout_s={self._step_timeout_s:g}",
            hint="raise step_timeout_s if steps of this model really take that long",
            silent_s=stalled_s,
        )

    def _slowest(self, silent_s: list[float]) -> tuple[int, bool]:
        """Return which process keeps the others waiting, and whether it is known to be that member of its stage.

        A process that is stopped also stops saying so. Else it is the one with the fewest steps, of equals the first:
        those behind it wait for its output. Members of its stage wait for it within the same step.
        """
        longest_s = max(silent_s)
        if longest_s > self._step_timeout_s / 2 and longest_s > 2 * min(silent_s):
            return silent_s.index(longest_s), True
        index = self._last_step_ids.index(min(self._last_step_ids))
        first = index - index % self._num_members
        of_stage = self._last_step_ids[first : first + self._num_members]
        return index, of_stage.count(self._last_step_ids[index]) == 1


class Witness(IntEnum):
    """What a report rests on; the greatest is believed, and of equals the first."""

    NEIGHBOUR = 0  # a stage that is well found another one gone, late, or silent
    OWN_FAILURE = 1  # a stage says that it failed itself
    DEATH = 2  # Ray saw the process end, or the driver saw a stage stand still: nothing will say it better


class FailureReports:
    """The reports of one engine. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._best: tuple[Witness, RayppError] | None = None
        self._first_at_s = 0.0

    def add(self, error: RayppError, witness: Witness) -> None:
        """Take in a report."""
        with self._lock:
            if self._best is None:
                self._first_at_s = self._clock()
            if self._best is None or witness > self._best[0]:
                self._best = (witness, error)

    @property
    def best(self) -> RayppError | None:
        """The error that is believed so far."""
        return None if self._best is None else self._best[1]

    def verdict(self) -> RayppError | None:
        """Return the error to end with; None while there is no report, or a better one may still come."""
        with self._lock:
            if self._best is None:
                return None
            witness, error = self._best
            is_settled = witness is Witness.DEATH or self._clock() - self._first_at_s >= BLAME_S
            return error if is_settled else None
