"""Fewer sizes where memory is short: evenly fewer, so that a step still finds one that is not much larger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def thinned(remaining: Sequence[T], room_bytes: int, bytes_each: float) -> list[T]:
    """Return as many of the sizes that are still to be recorded as there is room for, the last (smallest) among them.

    Args:
        remaining: The largest first.
        room_bytes: What they may take.
        bytes_each: What one takes.
    """
    count = len(remaining) if bytes_each <= 0 else min(len(remaining), max(0, int(room_bytes / bytes_each)))
    if count == 0:
        return []
    # The i-th of `count` is the last of its share.
    return [remaining[len(remaining) * (index + 1) // count - 1] for index in range(count)]
