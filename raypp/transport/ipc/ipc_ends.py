"""The two ends of an edge whose sender writes into its receiver's GPU memory: the `ipc` link.

    sender's stream                              receiver's stream
      wait   released >= step - num_slots
      write  the step's slot, in the receiver's memory
      write  published = step  ----------------->  wait   published >= step
                                                   read   the step's slot
             released  <-------------------------  write  released = step

A flag is a 32-bit step id: the newest step that its writer is done with. CUDA compares flags modulo 2^32, by
`int32(flag - value) >= 0`, so step ids may grow past 32 bits as long as no flag is 2^31 steps behind.

Each flag lies in the memory of the end that waits for it. Every operation goes to the current CUDA stream: nothing here
blocks the host, and nothing raises when a peer stays away. The driver notices a pipeline that stands still and kills
it; `abort` ends the waits of a stream. Do not capture these operations in a CUDA graph, since the step ids change. Put
them before and after the replay.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from raypp.errors import RayppError
from raypp.messages import NO_STEP
from raypp.transport.edges import StreamEnd
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


def far_value(step_id: int) -> int:
    """Return a value that ends every wait for steps near `step_id`, those in flight and those still to come."""
    return flag_value(step_id + _FAR)


class FlagForcer:
    """Ends waits on flags: writes values into them from a thread of its own, again and again until it is stopped.

    Once is not enough: a stream may still hold an ordinary write of the same flag, which comes later and lowers it.

    Args:
        device: Of the flags.
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


@dataclass(frozen=True)
class IpcEdgeMemory:
    """Where one end of an edge finds the edge's memory: addresses in its own process."""

    slots: torch.Tensor  # uint8 [num_slots, slot_bytes], in the receiver's memory
    published: int  # flag in the receiver's memory: the newest step that was sent
    released: int  # flag in the sender's memory: the newest step that was read


class _IpcEnd(StreamEnd):
    """What both ends do alike.

    Args:
        device: Of this stage.
        memory: The edge's.
        forcer: Of this stage.
        on_close: Called once, when the end is closed.
    """

    def __init__(
        self, device: CudaDevice, memory: IpcEdgeMemory, forcer: FlagForcer, on_close: Callable[[], None]
    ) -> None:
        super().__init__(memory.slots, on_close)
        self._device = device
        self._memory = memory
        self._forcer = forcer
        self._last_step_id = NO_STEP

    def abort(self) -> None:
        """End all waits of the edge on the streams of both ends. From any thread."""
        if self._is_closed:
            return
        self._is_aborted = True
        # The peer's flag as well: its stream may wait for this stage, which will not go on.
        far = far_value(self._last_step_id)
        self._forcer.force({self._memory.published: far, self._memory.released: far})

    def _check(self, step_id: int) -> None:
        """Note the step; raise EngineDeadError when the link was aborted."""
        assert not self._is_closed, "the link was closed"
        super()._check(step_id)
        self._last_step_id = step_id


class IpcSender(_IpcEnd):
    """The sending end; see `LinkSender`."""

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes]. The stream's next operations wait until the receiver released it.

        Raises:
            EngineDeadError: the link was aborted.
        """
        self._check(step_id)
        slots = self._slots
        self._device.wait(self._memory.released, flag_value(step_id - len(slots)))
        self._acquired = step_id
        return slots[step_id % len(slots)]

    def send(self, step_id: int, num_bytes: int) -> None:
        """Publish the slot, after the stream's earlier operations.

        Raises:
            EngineDeadError: the link was aborted.
        """
        self._check_acquired(step_id)
        self._device.write(self._memory.published, flag_value(step_id))


class IpcReceiver(_IpcEnd):
    """The receiving end; see `LinkReceiver`."""

    _released = NO_STEP

    def post_recv(self, step_id: int, num_bytes: int) -> None:
        """Do nothing: the sender writes into the slot without being asked."""
        assert num_bytes <= len(self._slots[0]), f"step {step_id}: {num_bytes} bytes exceed the slot"

    def wait(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes]. The stream's next operations wait until the message is there.

        Raises:
            EngineDeadError: the link was aborted.
        """
        self._check(step_id)
        self._device.wait(self._memory.published, flag_value(step_id))
        return self._slots[step_id % len(self._slots)]

    def release(self, step_id: int) -> None:
        """Give the slot back, after the stream's earlier operations.

        Raises:
            EngineDeadError: the link was aborted.
        """
        assert step_id > self._released, f"step {step_id} is released after step {self._released}"
        self._check(step_id)
        self._device.write(self._memory.released, flag_value(step_id))
        self._released = step_id
