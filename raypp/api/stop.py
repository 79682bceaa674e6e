"""Stop strings: where a text ends, and what of it may be shown before that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class StopMatch(NamedTuple):
    """A stop string that was found."""

    text_len: int  # characters before it: all that remains of the text
    stop: str


class StopScope(Protocol):
    """Knows which parts of a growing text stop strings are about."""

    @property
    def content_spans(self) -> Sequence[tuple[int, int]]:
        """Start and end of each of these parts, as far as they have become clear; the last one may grow."""

    @property
    def num_settled(self) -> int:
        """How many characters are certain to be in one of these parts, or certain to be in none."""

    def feed(self, text: str, *, is_last: bool = False) -> object:
        """Read on. With the last text, all becomes clear."""


class WholeText:
    """All of the text."""

    def __init__(self) -> None:
        self.num_settled = 0

    @property
    def content_spans(self) -> Sequence[tuple[int, int]]:
        """One part."""
        return ((0, self.num_settled),)

    def feed(self, text: str, *, is_last: bool = False) -> None:
        """Read on."""
        self.num_settled += len(text)


class StopChecker:
    """Watches one growing text.

    The stop string that is complete first ends the text (of several complete at once, the longest), so the result does
    not depend on the pieces in which the text arrives.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._longest = len(self._stops[0])

    def find(self, text: str, span: tuple[int, int], num_old: int) -> StopMatch | None:
        """Return the first match in a span of `text` that ends behind the first `num_old` characters, or None."""
        start, end = span
        if end <= num_old:
            return None
        best: tuple[int, StopMatch] | None = None
        for stop in self._stops:
            at = text.find(stop, max(start, num_old - len(stop) + 1), end)
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = (at + len(stop), StopMatch(at, stop))
        return best[1] if best is not None else None

    def num_safe(self, text: str) -> int:
        """Return how many characters of `text` no stop string can take back any more."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
