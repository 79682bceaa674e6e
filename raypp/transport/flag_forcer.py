"""Ending all waits on flags, whatever the streams still hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from raypp.errors import RayppError
from raypp.transport.stream_device import StreamDevice

logger = logging.getLogger(__name__)

_PERIOD_S = 0.01


class FlagForcer:
    """Writes values into flags from a thread of its own, again and again until it is stopped.

    Once is not enough: a stream may still hold an ordinary write of the same flag, which lands later and lowers it.

    Args:
        device: Whose flags these are.
    """

    def __init__(self, device: StreamDevice) -> None:
        self._device = device
        self._values: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def force(self, values: Mapping[int, int]) -> None:
        """Keep these flags at these values from now on. Returns at once; from any thread."""
        with self._lock:
            self._values = {**self._values, **values}
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="link-abort", daemon=True)
                self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return whether it has ended. Afterwards the flags' memory may go away."""
        with self._lock:
            self._stopped.set()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.is_set():
            for flag, value in self._values.items():  # replaced as a whole, never changed
                try:
                    self._device.force(flag, value)
                except RayppError as error:
                    logger.warning("an aborted link could not be released: %s", error)
                    return
            self._stopped.wait(_PERIOD_S)
