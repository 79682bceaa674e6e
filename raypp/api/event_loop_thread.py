"""An event loop in a thread of its own, for callers that have none, or that are inside one that they cannot leave."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from raypp.errors import EngineDeadError

T = TypeVar("T")

_LAST_TASKS_TIMEOUT_S = 1.0
_SIGNALS_S = 0.5  # a signal that comes just before a wait does not end it: this late it is taken notice of


class EventLoopThread:
    """Runs coroutines on its own thread. A daemon, so that a caller who forgets it can still exit."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._is_closed = False
        self._lock = threading.RLock()  # between the last coroutine that is begun and the end of the loop
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), name=name, daemon=True)
        self._thread.start()
        started.wait()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result. What interrupts the caller, Ctrl-C above all, cancels it.

        Raises:
            EngineDeadError: the thread was closed.
            Exception: whatever the coroutine raises.
        """
        work = _Work(coroutine)
        try:
            self._hand_over(work)
            is_alive = True
            while not (ended := work.await_end(_SIGNALS_S)):
                if not is_alive:  # for that long: in a forked process, say
                    raise _closed()
                is_alive = self._thread.is_alive()
        except BaseException:
            try:
                self._loop.call_soon_threadsafe(work.cancel)
            except RuntimeError:  # the loop has ended, and cancelled what was in it
                coroutine.close()
            raise
        if ended.cancelled():
            raise _closed()
        return ended.result()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the loop and return its result."""
        if self._is_current():
            return function()

        async def run() -> T:
            return function()

        return self.run(run())

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end. In the loop itself it is only begun: nobody could wait for it there."""
        if self._is_current():
            _Work(coroutine).begin()  # held by nobody but the loop, so its first step must be its last
        else:
            self.run(coroutine)

    def close(self) -> None:
        """End the thread, once what was begun has ended; what does not end soon is cancelled."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
        if not self._is_current():
            self._thread.join()

    def _is_current(self) -> bool:
        """Return whether this is the loop's thread: the garbage collector may bring anybody there."""
        return threading.current_thread() is self._thread

    def _hand_over(self, work: _Work[T]) -> None:
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._loop.call_soon_threadsafe(work.begin)

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._stop.wait()
        if last_tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(last_tasks, timeout=_LAST_TASKS_TIMEOUT_S)


class _Work(Generic[T]):
    """A coroutine on its way into the loop, through it, or out of it again.

    Ctrl-C may strike anywhere, also while the coroutine is handed over. So what it is cancelled by is there before, and
    the caller waits in C: a future of `concurrent.futures` can be left locked, and the loop would wait for it for ever.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._ended: queue.SimpleQueue[asyncio.Task[T]] = queue.SimpleQueue()
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def await_end(self, timeout_s: float) -> asyncio.Task[T] | None:
        """Return its task as soon as it has ended, or None when it does not in time. For the caller."""
        try:
            return self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def begin(self) -> None:
        """Start it. In the loop."""
        self._task = asyncio.create_task(self._coroutine)
        self._task.add_done_callback(self._ended.put)

    def cancel(self) -> None:
        """Cancel it, whether it has begun or not. In the loop."""
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()


def _closed() -> EngineDeadError:
    return EngineDeadError("the engine was closed", hint="start a new engine")
