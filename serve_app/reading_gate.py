"""How many requests may have their images read at a time, and for how long: what is too much is refused with 429."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from raypp.errors import QueueFullError

_RETRY_AFTER_S = 1


class ReadingGate:
    """Counts the requests whose images are read, waiting ones included. Lives on one event loop.

    Args:
        max_reading: The most of them.
        timeout_s: How long each may take, the wait for others included.
    """

    def __init__(self, max_reading: int, timeout_s: float) -> None:
        self._max_reading = max_reading
        self._timeout_s = timeout_s
        self._num_reading = 0

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Count a request while its images are read.

        Raises:
            QueueFullError: too many are counted already, or it took too long.
        """
        if self._num_reading >= self._max_reading:
            raise QueueFullError(
                "too many requests have their images read",
                retry_after_s=_RETRY_AFTER_S,
                got=f"{self._num_reading} requests",
                expected=f"fewer than max_encodes + max_encodes_waiting = {self._max_reading}",
            )
        self._num_reading += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise QueueFullError(
                "the images of a request were not read in time",
                retry_after_s=_RETRY_AFTER_S,
                got=f"{self._num_reading} requests whose images are read",
                expected=f"image_wait_timeout_s = {self._timeout_s:g} s",
            ) from None
        finally:
            self._num_reading -= 1
