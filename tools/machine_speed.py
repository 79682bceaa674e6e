"""How slow this machine is now: limits of tests in milliseconds of computing are those of an ordinary machine."""

from __future__ import annotations

import statistics
import time

_NUM_OBJECTS = 10_000
_ORDINARY_S = 0.0035
"""What making and reading as many objects takes on a server's core that nothing else uses."""
_NUM_TRIES = 15


class _Pair:
    __slots__ = ("first", "second")

    def __init__(self, first: int, second: tuple[int, int]) -> None:
        self.first, self.second = first, second


def slowness() -> float:
    """Return how many times the processor time of an ordinary machine computing takes now, at least 1.

    Other processes slow one down, too: they take caches, and half of a core.
    """
    return max(1.0, statistics.median(_object_seconds() for _ in range(_NUM_TRIES)) / _ORDINARY_S)


def _object_seconds() -> float:
    started_s = time.thread_time()
    pairs = {number: _Pair(number, (number, number + 1)) for number in range(_NUM_OBJECTS)}
    sum(pairs[number].second[1] for number in list(pairs))
    return time.thread_time() - started_s
