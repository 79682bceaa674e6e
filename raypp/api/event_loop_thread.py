"""An event loop in a thread of its own, for callers that have none, or that are inside one that they cannot leave."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from raypp.errors import EngineDeadError

T = TypeVar("T")

_LAST_TASKS_TIMEOUT_S = 1.0


class EventLoopThread:
    """Runs coroutines on its own thread. A daemon, so that a caller who forgets it can still exit."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._is_closed = False
        self._lock = threading.RLock()  # between the last submission and the end of the loop
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), name=name, daemon=True)
        self._thread.start()
        started.wait()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine; cancelling the future cancels it.

        Raises:
            EngineDeadError: the thread was closed.
        """
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise EngineDeadError("the engine was closed", hint="make a new one")

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the loop and return its result."""
        if threading.current_thread() is self._thread:  # the garbage collector may bring us here
            return function()

        async def run() -> T:
            return function()

        return self.submit(run()).result()

    def close(self) -> None:
        """End the thread, once what was submitted has ended; what does not end soon is cancelled."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._stop.wait()
        if last_tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(last_tasks, timeout=_LAST_TASKS_TIMEOUT_S)
