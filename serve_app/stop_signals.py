"""SIGINT and SIGTERM as a request to stop, which is granted in time: a stopped Ray job has three seconds."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

STOP_TIMEOUT_S = 2.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Notes the first signal; the second one ends the process. To be entered in the main thread."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.is_connected = False
        """Whether there is anything to take down; without, the process ends at once."""
        self.has_started = False
        """Whether something is served: its end may take the time that it takes, while what starts is not waited for."""
        # Not an Event: a handler that ran while its own thread held the Event's lock would wait for itself.
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._timer: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Take the signals, again if somebody else took them meanwhile."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return after a signal, and when another thread calls `wake`. Look for what has changed after every return.

        Args:
            timeout_s: The longest to wait; None: for ever.
        """
        with contextlib.suppress(queue.Empty):
            self._changes.get(timeout=timeout_s)

    def wake(self) -> None:
        """Have the waiting thread look."""
        self._changes.put(None)

    def exit(self) -> NoReturn:
        """End the process with the signal's exit code, 130 or 143."""
        assert self.received is not None
        _exit_now(self.received)

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.listen()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None or not self.is_connected:
            _exit_now(number)
        self.received = signal.Signals(number)
        if not self.has_started:  # what starts may hang: it is not waited for
            self._timer = threading.Timer(STOP_TIMEOUT_S, _exit_now, [number])
            self._timer.daemon = True
            self._timer.start()
        self._changes.put(None)


def _exit_now(number: int) -> NoReturn:
    """End without ado; a local Ray ends with this process."""
    print(f"raypp: stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)
