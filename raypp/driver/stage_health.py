"""Finds stages that stand still, by their heartbeats and a clock; and of several reports of a failure, the cause.

Two rules. Steps are in flight and no stage has finished another one for `step_timeout_s`: the pipeline is frozen. A
stage has said nothing at all for `silence_timeout_s`, busy or idle: it is frozen, or its machine is gone.

One stage that ends takes the others' waits with it, so several reports come within milliseconds, in any order, from Ray
and from the stages themselves. The driver waits a moment before it believes one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import IntEnum

from raypp.errors import RayppError, StageDiedError
from raypp.messages import NO_STEP

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
        *,
        step_timeout_s: float,
        silence_timeout_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Begin with all stages just heard of.

        Args:
            num_stages: P.
            step_timeout_s: See above.
            silence_timeout_s: See above.
            clock: Seconds; by default an `AwakeClock`.
        """
        self._step_timeout_s = step_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._clock = clock or AwakeClock()
        self._heard_s = [self._clock()] * num_stages
        self._last_step_ids = [NO_STEP] * num_stages
        self._progress_s = self._clock()

    @property
    def num_stages(self) -> int:
        """P."""
        return len(self._heard_s)

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
            stage_index = silent_s.index(max(silent_s))
            return StageDiedError(
                f"stage {stage_index} is frozen: nothing has been heard of it",
                stage_index=stage_index,
                got=f"no sign of it for {silent_s[stage_index]:.1f} s",
                expected=f"a heartbeat within {self._silence_timeout_s:g} s",
                hint="its process is stopped or starved, or its machine cannot be reached",
                silent_s=silent_s[stage_index],
            )
        if not is_busy:
            self._progress_s = self._clock()
        stalled_s = self._clock() - self._progress_s
        if stalled_s <= self._step_timeout_s:
            return None
        stage_index = self._slowest(silent_s)
        return StageDiedError(
            f"stage {stage_index} is frozen: steps are in flight and none has ended",
            stage_index=stage_index,
            got=f"no progress for {stalled_s:.1f} s, no sign of the stage for {silent_s[stage_index]:.1f} s",
            expected=f"progress within step_timeout_s={self._step_timeout_s:g}",
            hint="raise step_timeout_s if steps of this model really take that long",
            silent_s=stalled_s,
        )

    def _slowest(self, silent_s: list[float]) -> int:
        """Return the stage that keeps the others waiting.

        A stage that is stopped also stops saying so. Else it is the one with the fewest steps, of equals the first:
        those behind it wait for its output.
        """
        longest_s = max(silent_s)
        if longest_s > self._step_timeout_s / 2 and longest_s > 2 * min(silent_s):
            return silent_s.index(longest_s)
        return self._last_step_ids.index(min(self._last_step_ids))


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
