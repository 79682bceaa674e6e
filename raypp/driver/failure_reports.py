"""Collects the reports of a failing pipeline, and finds the one that is the cause.

One stage that ends takes the others' waits with it, so several reports come within milliseconds, in any order, from Ray
and from the stages themselves. The driver waits a moment before it believes one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import IntEnum

from raypp.errors import RayppError

BLAME_S = 0.2
"""How long after the first report a better one may come."""


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
