"""32-bit flags in device memory that hold step ids: their values, and ending all waits on them.

A flag holds the newest step that its writer is done with. CUDA compares flags modulo 2^32: it waits for
`int32(flag - value) >= 0`. So step ids may grow past 32 bits, as long as no flag is 2^31 steps behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from raypp.errors import RayppError
from raypp.messages import NO_STEP
from raypp.transport.ipc.cuda_device import CudaDevice

logger = logging.getLogger(__name__)

_MODULUS = 1 << 32
_FAR = 1 << 30  # further ahead than any step in flight, and less than half of _MODULUS
_FORCE_PERIOD_S = 0.01


def flag_value(step_id: int) -> int:
    """Return what a flag holds when its writer is done with `step_id`. Unsigned, 32 bits."""
    return step_id % _MODULUS


INITIAL_VALUE = flag_value(NO_STEP)
"""What a flag holds before the first step."""


def has_reached(flag: int, value: int) -> bool:
    """Return whether a wait for `value` ends when the flag holds `flag`, as CUDA decides it."""
    return (flag - value) % _MODULUS < _MODULUS // 2


def far_value(step_id: int) -> int:
    """Return a value that ends every wait for steps near `step_id`, those in flight and those still to come."""
    return flag_value(step_id + _FAR)


class FlagForcer:
    """Ends waits on flags: writes values into them from a thread of its own, again and again until it is stopped.

    Once is not enough: a stream may still hold an ordinary write of the same flag, which comes later and lowers it.

    Args:
        device: Whose flags these are.
    """

    def __init__(self, device: CudaDevice) -> None:
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
            self._stopped.wait(_FORCE_PERIOD_S)
