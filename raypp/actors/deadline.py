"""One deadline for something that takes several waits."""

from __future__ import annotations

import time


class Deadline:
    """A moment that was `seconds` away when this was made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends_s = time.monotonic() + seconds

    @property
    def remaining_s(self) -> float:
        """Seconds left, never less than 0."""
        return max(self._ends_s - time.monotonic(), 0.0)
