"""Where the marks of a syntax stand in a text that is still coming."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from raypp.openai_api.syntax import Mark

MAX_INSIDE_CHARS = 256
"""Between the opening and the closing of a mark. What is longer is text: a stream must not be held back for ever."""


@dataclass(frozen=True, slots=True)
class Found:
    """A mark in a text."""

    mark: Mark
    start: int
    end: int  # where the text goes on
    name: str | None  # of a function


class MarkFinder:
    """Finds the first of some marks."""

    def __init__(self, among: Sequence[Mark]) -> None:
        self.marks = tuple(among)
        self._by_opening: dict[str, list[Mark]] = {}
        for mark in among:
            self._by_opening.setdefault(mark.opening, []).append(mark)
        openings = sorted(self._by_opening, key=len, reverse=True)
        self._openings = re.compile("|".join(map(re.escape, openings)) or r"(?!)")
        self._longest = len(openings[0]) if openings else 0

    def __bool__(self) -> bool:
        return bool(self._by_opening)

    def find(self, text: str, *, is_last: bool) -> tuple[int, Found | None]:
        """Return how many characters are certainly no mark, and the mark behind them.

        Without a mark, the characters behind those may become one: more text tells. With the last text they do not.
        """
        undecided = len(text) if is_last else self._first_beginning(text)
        at = 0
        while (match := self._openings.search(text, at)) is not None and match.start() < undecided:
            found, may_be = self._whole(text, match, is_last)
            if found is not None:
                return found.start, found
            if may_be:
                return match.start(), None
            at = match.end()
        return undecided, None

    def _first_beginning(self, text: str) -> int:
        """Return where the text's end begins that may be the beginning of an opening; its length if none may."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(len(opening) > len(end) and opening.startswith(end) for opening in self._by_opening):
                return start
        return len(text)

    def _whole(self, text: str, opening: re.Match[str], is_last: bool) -> tuple[Found | None, bool]:
        """Return the mark that begins here; if there is none yet, whether there may be one."""
        for mark in self._by_opening[opening.group()]:
            inside, name = opening.end(), None
            end = inside
            if mark.closing:
                most = inside + MAX_INSIDE_CHARS + len(mark.closing)
                closing = text.find(mark.closing, inside, most)
                if closing < 0:
                    return None, not is_last and len(text) < most
                match = re.search(mark.pattern, text[inside:closing])
                if match is None:
                    continue
                name = match.groupdict().get("name")
                end = closing if mark.closing == "{" else closing + len(mark.closing)
            return Found(mark, opening.start(), end, name), False
        return None, False
