"""What engines count of a request: each begins at zero, and a request may have had several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

Counters = tuple[int, int, list[int], list[int], int]
"""Cached tokens, preemptions, drafted and accepted tokens by position, and microseconds queued, so far."""

NOTHING_COUNTED: Counters = (0, 0, [], [], 0)
"""Of a request that an engine has told nothing of."""


def sum_over_engines(earlier: Counters | None, now: Counters, waited_us: int) -> Counters:
    """Return the counters of a request. What it found cached, and how long it queued, is told of its first run.

    Args:
        earlier: The sum over the engines that had it before, if one of them ran it.
        now: Of the engine that has it now.
        waited_us: Microseconds before it was handed to that engine, if none ran it before.
    """
    if earlier is None:
        return *now[:4], waited_us + now[4]
    drafted, accepted = sum_by_position((earlier[2], now[2])), sum_by_position((earlier[3], now[3]))
    return earlier[0], earlier[1] + now[1], drafted, accepted, earlier[4]


def sum_by_position(lists: Iterable[Sequence[int]]) -> list[int]:
    """Return the sums by position; lists that are shorter have nothing there."""
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]
