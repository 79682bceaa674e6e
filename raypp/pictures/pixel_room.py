"""How many pixels are decoded at once, over all requests: each is bytes while it is, and a small file may hold many."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from raypp.config.sections import ImagesSection
from raypp.errors import QueueFullError, RequestError

_RETRY_AFTER_S = 5


class PixelRoom:
    """Lets prompts in as long as there is room for their pixels, in the order in which they come. For many threads.

    Args:
        limits: What the configuration allows.
    """

    def __init__(self, limits: ImagesSection) -> None:
        self._limit = limits.max_pixels_in_flight
        self._timeout_s = limits.image_wait_timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self.num_held = 0
        """Pixels of those that are in."""

    @property
    def num_waiting(self) -> int:
        """Prompts that wait."""
        return len(self._waiting)

    @contextmanager
    def hold(self, num_pixels: int) -> Iterator[None]:
        """Wait until there is room, and hold it. Who holds some must not ask for more.

        Raises:
            RequestError: there is never room for so many.
            QueueFullError: others did not make room in time.
        """
        if num_pixels > self._limit:
            raise RequestError(
                "the images of a prompt have too many pixels together",
                got=f"{num_pixels} pixels",
                expected=f"at most max_pixels_in_flight = {self._limit}",
                hint="make them smaller, or raise max_pixels_in_flight",
            )
        self._enter(num_pixels)
        try:
            yield
        finally:
            with self._changed:
                self.num_held -= num_pixels
                self._changed.notify_all()

    def _enter(self, num_pixels: int) -> None:
        ticket = object()

        def is_next() -> bool:
            return self._waiting[0] is ticket and self.num_held + num_pixels <= self._limit

        with self._changed:
            self._waiting.append(ticket)
            try:
                if not self._changed.wait_for(is_next, self._timeout_s):
                    raise QueueFullError(
                        "too many pixels are being decoded",
                        retry_after_s=_RETRY_AFTER_S,
                        got=f"{num_pixels} pixels beside {self.num_held} of other requests",
                        expected=f"max_pixels_in_flight = {self._limit} together, "
                        f"within image_wait_timeout_s = {self._timeout_s:g} s",
                    )
                self.num_held += num_pixels
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
