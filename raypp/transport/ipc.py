"""The two ends of an edge between GPUs of one node, or between processes that share one: the `ipc` link.

    sender's stream                              receiver's stream
      wait   released >= step - num_slots
      write  the step's slot, in the receiver's memory
      write  published = step  ----------------->  wait   published >= step
                                                   read   the step's slot
             released  <-------------------------  write  released = step

Each flag lies in its waiter's memory. Every operation is one of the current CUDA stream: nothing here blocks the host,
and nothing raises when a peer stays away. The driver notices a pipeline that stands still, and kills it; `abort` lets
go of a stream that waits. Not to be captured in a CUDA graph: the step ids change. Put it around the replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raypp.errors import EngineDeadError
from raypp.messages import NO_STEP
from raypp.transport.closing import once
from raypp.transport.flag_forcer import FlagForcer
from raypp.transport.flags import far_value, flag_value
from raypp.transport.stream_device import StreamDevice


@dataclass(frozen=True)
class IpcEdgeMemory:
    """Where one end of an edge finds the edge's memory: addresses in its own process."""

    slots: torch.Tensor  # uint8 [num_slots, slot_bytes], in the receiver's memory
    published: int  # flag in the receiver's memory: the newest step that was sent
    released: int  # flag in the sender's memory: the newest step that was read


class IpcSender:
    """The sending end; see `LinkSender`.

    Args:
        device: Of this stage.
        memory: The edge's.
        forcer: Of this stage.
        on_close: Called once, when the end is closed.
    """

    def __init__(
        self, device: StreamDevice, memory: IpcEdgeMemory, forcer: FlagForcer, on_close: Callable[[], None]
    ) -> None:
        self._device = device
        self._memory = memory
        self._slots = memory.slots.unbind()
        self._life = _EndLife(memory, forcer, on_close)
        self._acquired = NO_STEP

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]."""
        return self._memory.slots

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes]. What the stream does next waits until the receiver released it.

        Raises:
            EngineDeadError: the link was aborted.
        """
        self._life.check(step_id)
        slots = self._slots
        self._device.wait(self._memory.released, flag_value(step_id - len(slots)))
        self._acquired = step_id
        return slots[step_id % len(slots)]

    def send(self, step_id: int, num_bytes: int) -> None:
        """Publish the slot, after all that the stream was given before.

        Raises:
            EngineDeadError: the link was aborted.
        """
        assert step_id == self._acquired, f"step {step_id} is sent, but {self._acquired} was acquired"
        self._life.check(step_id)
        self._device.write(self._memory.published, flag_value(step_id))
        self._acquired = NO_STEP

    def abort(self) -> None:
        """End all waits of the edge on the streams of both ends. From any thread."""
        self._life.abort()

    def close(self) -> None:
        """Give the end up; with the last end of a stage its memory goes."""
        self._life.close()


class IpcReceiver:
    """The receiving end; see `LinkReceiver`. Arguments as of `IpcSender`."""

    def __init__(
        self, device: StreamDevice, memory: IpcEdgeMemory, forcer: FlagForcer, on_close: Callable[[], None]
    ) -> None:
        self._device = device
        self._memory = memory
        self._slots = memory.slots.unbind()
        self._life = _EndLife(memory, forcer, on_close)
        self._released = NO_STEP

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]."""
        return self._memory.slots

    def post_recv(self, step_id: int, num_bytes: int) -> None:
        """Do nothing: the sender writes into the slot without being asked."""
        assert num_bytes <= len(self._slots[0]), f"step {step_id}: {num_bytes} bytes exceed the slot"

    def wait(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes]. What the stream does next waits until the message is there.

        Raises:
            EngineDeadError: the link was aborted.
        """
        self._life.check(step_id)
        self._device.wait(self._memory.published, flag_value(step_id))
        return self._slots[step_id % len(self._slots)]

    def release(self, step_id: int) -> None:
        """Give the slot back, after all that the stream was given before.

        Raises:
            EngineDeadError: the link was aborted.
        """
        assert step_id > self._released, f"step {step_id} is released after step {self._released}"
        self._life.check(step_id)
        self._device.write(self._memory.released, flag_value(step_id))
        self._released = step_id

    def abort(self) -> None:
        """End all waits of the edge on the streams of both ends. From any thread."""
        self._life.abort()

    def close(self) -> None:
        """Give the end up; with the last end of a stage its memory goes."""
        self._life.close()


class _EndLife:
    """Whether an end may still be used, and how far it came."""

    def __init__(self, memory: IpcEdgeMemory, forcer: FlagForcer, on_close: Callable[[], None]) -> None:
        self._flags = (memory.published, memory.released)
        self._forcer = forcer
        self._on_close = once(on_close)
        self._last_step_id = NO_STEP
        self._is_aborted = False
        self._is_closed = False

    def check(self, step_id: int) -> None:
        assert not self._is_closed, "the link was closed"
        if self._is_aborted:
            raise EngineDeadError(f"the link was aborted before step {step_id}")
        self._last_step_id = step_id

    def abort(self) -> None:
        if self._is_closed:
            return
        self._is_aborted = True
        # The peer's flag as well: its stream may wait for this stage, which will not go on.
        self._forcer.force(dict.fromkeys(self._flags, far_value(self._last_step_id)))

    def close(self) -> None:
        self._is_closed = True
        self._on_close()
