"""The two ends of an edge over NCCL: between nodes, and between GPUs that do not reach each other's memory.

    sender:    current stream:  [wait until the slot's last send is out]  write the slot
               edge's stream:   after that, send
    receiver:  current stream:  receive into the slot, read it

A send has a stream of its own, because it may have to wait for its receiver. A receive needs none: nothing can go on
before its message is there. It is enqueued only when it is waited for: until its message comes it spins on the GPU, and
takes time from what computes. As with `ipc`, nothing here blocks the host. An end that was aborted raises; the peer's
has to be aborted too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from raypp.errors import EngineDeadError
from raypp.messages import NO_STEP
from raypp.transport.closing import once


class Channel(Protocol):
    """One end of what moves an edge's messages. Nothing here blocks the host."""

    def send(self, slot: int, message: torch.Tensor) -> None:
        """Send, on the edge's own stream, what the current stream has written so far. `slot` is an index."""

    def await_sent(self, slot: int) -> None:
        """Let the current stream wait until the slot's last message is out, if there was one."""

    def receive(self, message: torch.Tensor) -> None:
        """Receive on the current stream."""

    def abort(self) -> None:
        """End the transfers in progress. From any thread."""


class NcclSender:
    """The sending end; see `LinkSender`.

    Args:
        channel: The edge's.
        slots: uint8 [num_slots, slot_bytes], in this stage's memory.
        on_close: Called once, when the end is closed.
    """

    def __init__(self, channel: Channel, slots: torch.Tensor, on_close: Callable[[], None]) -> None:
        self._channel = channel
        self._all_slots = slots
        self._slots = slots.unbind()
        self._on_close = once(on_close)
        self._acquired = NO_STEP
        self._is_aborted = False

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]."""
        return self._all_slots

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes]. What the current stream does next waits until it is out.

        Raises:
            EngineDeadError: the link was aborted.
        """
        _check(self._is_aborted, step_id)
        slot = step_id % len(self._slots)
        self._channel.await_sent(slot)
        self._acquired = step_id
        return self._slots[slot]

    def send(self, step_id: int, num_bytes: int) -> None:
        """Send the first `num_bytes` of the slot, after what the current stream was given so far.

        Raises:
            EngineDeadError: the link was aborted.
        """
        assert step_id == self._acquired, f"step {step_id} is sent, but {self._acquired} was acquired"
        _check(self._is_aborted, step_id)
        slot = step_id % len(self._slots)
        self._channel.send(slot, self._slots[slot][:num_bytes])
        self._acquired = NO_STEP

    def abort(self) -> None:
        """End the edge's transfers on this end. From any thread."""
        self._is_aborted = True
        self._channel.abort()

    def close(self) -> None:
        """Give the end up; with the last end of a stage all its communicators end."""
        self._on_close()


class NcclReceiver:
    """The receiving end; see `LinkReceiver`. Arguments as of `NcclSender`."""

    def __init__(self, channel: Channel, slots: torch.Tensor, on_close: Callable[[], None]) -> None:
        self._channel = channel
        self._all_slots = slots
        self._slots = slots.unbind()
        self._on_close = once(on_close)
        self._num_bytes: dict[int, int] = {}  # step_id -> size, of steps that were posted
        self._is_aborted = False

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]."""
        return self._all_slots

    def post_recv(self, step_id: int, num_bytes: int) -> None:
        """Note the message's size; the receive is enqueued by `wait`. From any one thread."""
        assert num_bytes <= len(self._slots[0]), f"step {step_id}: {num_bytes} bytes exceed the slot"
        self._num_bytes[step_id] = num_bytes

    def wait(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes]. What the current stream does next waits for the message.

        Raises:
            EngineDeadError: the link was aborted.
        """
        _check(self._is_aborted, step_id)
        assert step_id in self._num_bytes, f"step {step_id} was never posted"
        slot = self._slots[step_id % len(self._slots)]
        self._channel.receive(slot[: self._num_bytes.pop(step_id)])
        return slot

    def release(self, step_id: int) -> None:
        """Do nothing: the slot's next receive comes later in the stream than the reads that were given to it."""

    def abort(self) -> None:
        """End the edge's transfers on this end. From any thread."""
        self._is_aborted = True
        self._channel.abort()

    def close(self) -> None:
        """Give the end up; with the last end of a stage all its communicators end."""
        self._on_close()


def _check(is_aborted: bool, step_id: int) -> None:
    if is_aborted:
        raise EngineDeadError(f"the link was aborted before step {step_id}")
