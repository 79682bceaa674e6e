"""How much may be at the engine at once: enough to keep it busy, little enough to stay in memory."""

from __future__ import annotations

import asyncio


class Window:
    """Counts requests and their bytes. One task enters, any task leaves; all on one event loop."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._num_requests = 0
        self._num_bytes = 0
        self._changed = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Wait for room. A request larger than all the room there is enters alone."""
        while self._num_requests >= self._max_requests or (
            self._num_requests and self._num_bytes + num_bytes > self._max_bytes
        ):
            self._changed.clear()
            await self._changed.wait()
        self._num_requests += 1
        self._num_bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        """Make room."""
        self._num_requests -= 1
        self._num_bytes -= num_bytes
        self._changed.set()

    async def wait_until_empty(self) -> None:
        """Wait until all have left."""
        while self._num_requests:
            self._changed.clear()
            await self._changed.wait()
