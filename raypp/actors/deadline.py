"""Deadlines: one time limit shared by several waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Deadline:
    """A moment that was `seconds` away when this was made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends_s = time.monotonic() + seconds

    @property
    def remaining_s(self) -> float:
        """Seconds left, never less than 0."""
        return max(self._ends_s - time.monotonic(), 0.0)


def in_time(function: Callable[[], object], timeout_s: float) -> bool:
    """Call a function that may never return, in a thread of its own; return whether it did in time.

    Args:
        function: What to call. What it raises counts as an answer, and goes to `threading.excepthook`.
        timeout_s: How long it is waited for. It goes on after that.
    """
    thread = threading.Thread(target=function, name="bounded-call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
