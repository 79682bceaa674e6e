"""How many requests a replica takes at once: those that run, and a bounded number that wait."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from serve_app.errors import QueueFullError

_NEWEST_SHARE = 0.1  # of the newest request in the mean duration
_MAX_RETRY_AFTER_S = 60


class Admission:
    """Counts the unfinished sequences of one replica. Lives on one event loop."""

    def __init__(self, max_running: int, max_queued: int) -> None:
        """Begin empty.

        Args:
            max_running: Sequences that the engine runs at once.
            max_queued: Sequences that may wait beside them.
        """
        self._max_running = max_running
        self._max_queued = max_queued
        self._mean_s = 1.0
        self.num_unfinished = 0
        self.num_refused = 0

    @contextmanager
    def admit(self, num_sequences: int) -> Iterator[None]:
        """Count a request's sequences while it runs.

        Raises:
            QueueFullError: too many wait already.
        """
        # A request larger than the whole queue is let in when nothing waits: it would else never be.
        room = self._max_running + self._max_queued - self.num_unfinished
        if num_sequences > room and self.num_unfinished >= self._max_running:
            self.num_refused += 1
            raise QueueFullError(
                "too many requests are waiting",
                retry_after_s=self._retry_after_s(),
                got=f"{self.num_unfinished} unfinished",
                expected=f"at most {self._max_running} running and {self._max_queued} waiting",
            )
        self.num_unfinished += num_sequences
        started = time.monotonic()
        try:
            yield
        finally:
            self.num_unfinished -= num_sequences
            self._mean_s += _NEWEST_SHARE * (time.monotonic() - started - self._mean_s)

    def _retry_after_s(self) -> int:
        """Return about how long it takes until as many have ended as wait now."""
        waves = max(self.num_unfinished - self._max_running, 1) / self._max_running
        return max(1, min(math.ceil(self._mean_s * waves), _MAX_RETRY_AFTER_S))
