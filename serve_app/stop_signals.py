"""SIGINT and SIGTERM as a request to stop, which is granted in time: a stopped Ray job has three seconds.

SIGHUP asks to read the configuration again, unless the terminal is gone: then it is a request to stop, too.
"""

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
        self._wants_reload = False
        self._had_terminal = _has_terminal()
        self._timer: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Take the signals, again if somebody else took them meanwhile."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_hangup)

    def take_reload(self) -> bool:
        """Return whether the configuration is to be read again, since the last call."""
        wanted, self._wants_reload = self._wants_reload, False
        return wanted

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
        self._before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGHUP)}
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

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        if self._had_terminal and not _has_terminal():
            self._on_signal(number, frame)
            return
        self._wants_reload = True
        self._changes.put(None)


def _has_terminal() -> bool:
    """Return whether this process has a terminal that signals can come from."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _exit_now(number: int) -> NoReturn:
    """End without ado; a local Ray ends with this process."""
    print(f"raypp: stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)
