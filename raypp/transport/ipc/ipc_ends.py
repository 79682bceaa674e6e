"""The two ends of an edge whose sender writes into its receiver's GPU memory: the `ipc` link.

    sender's stream                              receiver's stream
      wait   released >= step - num_slots
      write  the step's slot, in the receiver's memory
      write  published = step  ----------------->  wait   published >= step
                                                   read   the step's slot
             released  <-------------------------  write  released = step

Each flag lies in the memory of the end that waits for it. Every operation goes to the current CUDA stream: nothing here
blocks the host, and nothing raises when a peer stays away. The driver notices a pipeline that stands still and kills
it; `abort` ends the waits of a stream. Do not capture these operations in a CUDA graph, since the step ids change. Put
them before and after the replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raypp.errors import EngineDeadError
from raypp.messages import NO_STEP
from raypp.transport.ipc.cuda_device import CudaDevice
from raypp.transport.ipc.flags import FlagForcer, far_value, flag_value


@dataclass(frozen=True)
class IpcEdgeMemory:
    """Where one end of an edge finds the edge's memory: addresses in its own process."""

    slots: torch.Tensor  # uint8 [num_slots, slot_bytes], in the receiver's memory
    published: int  # flag in the receiver's memory: the newest step that was sent
    released: int  # flag in the sender's memory: the newest step that was read


class _IpcEnd:
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
        self._device = device
        self._memory = memory
        self._slots = memory.slots.unbind()
        self._forcer = forcer
        self._on_close = on_close
        self._last_step_id = NO_STEP
        self._is_aborted = False
        self._is_closed = False

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]."""
        return self._memory.slots

    def abort(self) -> None:
        """End all waits of the edge on the streams of both ends. From any thread."""
        if self._is_closed:
            return
        self._is_aborted = True
        # The peer's flag as well: its stream may wait for this stage, which will not go on.
        far = far_value(self._last_step_id)
        self._forcer.force({self._memory.published: far, self._memory.released: far})

    def close(self) -> None:
        """Give the end up. The stage's memory is freed with the last of its ends."""
        if not self._is_closed:
            self._is_closed = True
            self._on_close()

    def _check(self, step_id: int) -> None:
        """Note the step; raise EngineDeadError when the link was aborted."""
        assert not self._is_closed, "the link was closed"
        if self._is_aborted:
            raise EngineDeadError(f"the link was aborted before step {step_id}")
        self._last_step_id = step_id


class IpcSender(_IpcEnd):
    """The sending end; see `LinkSender`."""

    _acquired = NO_STEP

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
        assert step_id == self._acquired, f"step {step_id} is sent, but {self._acquired} was acquired"
        self._check(step_id)
        self._device.write(self._memory.published, flag_value(step_id))
        self._acquired = NO_STEP


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
