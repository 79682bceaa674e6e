"""Stop strings: where a text ends, and what of it may be shown before that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that was found."""

    text_len: int  # characters before it: all that remains of the text
    stop: str


class StopChecker:
    """Watches one growing text.

    The stop string that is complete first ends the text (of several complete at once, the longest), so the result does
    not depend on the pieces in which the text arrives.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._longest = len(self._stops[0])

    def find(self, text: str, num_new: int) -> StopMatch | None:
        """Return the match in `text` that the last `num_new` characters completed, or None."""
        if not num_new:
            return None
        old_len = len(text) - num_new
        best: tuple[int, StopMatch] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, old_len - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), StopMatch(start, stop))
        return best[1] if best is not None else None

    def num_safe(self, text: str) -> int:
        """Return how many characters of `text` no stop string can take back any more."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
