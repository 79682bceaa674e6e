"""How often the engine of a client was started again, and what its requests noticed of that."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from raypp.supervision.supervisor import Recovery

_log = logging.getLogger(__name__)


class RecoveryLog:
    """Times the pauses of one client, from the moment that it hears of a death until it has handed its requests over.

    Args:
        clock: Monotonic, seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._paused_s = 0.0
        self._last_paused_s = self._hand_over_s = 0.0
        self._num_carried_over = 0

    @property
    def is_paused(self) -> bool:
        """Whether the engine is being started again."""
        return self._began_s is not None

    def begin(self) -> None:
        """Take in that the engine died."""
        if self._began_s is None:
            self._began_s = self._clock()

    def end(self, num_requests: int, back_s: float) -> None:
        """Take in that requests go on.

        Args:
            num_requests: How many were unfinished.
            back_s: When the engine was heard to run again, by the clock.
        """
        assert self._began_s is not None
        now_s = self._clock()
        self._last_paused_s, self._began_s = now_s - self._began_s, None
        self._paused_s += self._last_paused_s
        self._hand_over_s = now_s - back_s
        self._num_carried_over += num_requests
        _log.info("%d requests go on after %.1f s", num_requests, self._last_paused_s)

    def figures(self, recoveries: Sequence[Recovery]) -> dict[str, Any]:
        """Return them as `stats()` has them.

        `recoveries.last` is the engine's `Recovery`, with `hand_over_s`, what handing over the requests took, and
        `paused_s`, from the moment that this client heard of the death to the end of that.

        Args:
            recoveries: Of the engine.
        """
        paused_s = self._paused_s + (0.0 if self._began_s is None else self._clock() - self._began_s)
        last = None
        if recoveries:
            last = {**asdict(recoveries[-1]), "hand_over_s": self._hand_over_s, "paused_s": self._last_paused_s}
        return {
            "is_recovering": self.is_paused,
            "recoveries": {
                "count": len(recoveries),
                "paused_s": paused_s,
                "num_carried_over": self._num_carried_over,
                "last": last,
            },
        }
