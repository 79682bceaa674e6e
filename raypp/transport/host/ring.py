"""The two ends of an edge between host memories, over any connection that moves a slot's bytes (gloo, Ray).

Each end has slots of its own. A message stays in the sender's slot until the receiver has posted a buffer for it.

    sender:   slot free -> acquired -> in flight (a transfer) -> free
    receiver: slot free -> posted (a transfer) -> received -> released, and posted again if that was asked for already

Where a stage computes on a GPU, each message is copied to the host, and back on the other side. Every copy waits for
the GPU: such links are for users who ask for them, or GPUs that have no other.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Generic, Protocol, TypeVar

import torch

from raypp.errors import RayppError
from raypp.messages import NO_STEP

MAX_SLOTS = 1 << 16
_FLUSH_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)

TransferT = TypeVar("TransferT")


class Connection(Protocol[TransferT]):
    """Moves the bytes of one edge, and turns failures into raypp's errors. A transfer is a message on its way."""

    def send(self, tensor: torch.Tensor, tag: int) -> TransferT:
        """Begin to send; the transfer must be kept until it was waited for. `tag` is the slot."""

    def recv(self, tensor: torch.Tensor, tag: int) -> TransferT:
        """Begin to receive; the message may be shorter than the tensor. Otherwise as `send`."""

    def wait(self, transfer: TransferT, what: str, deadline_s: float | None = None) -> None:
        """Wait for a transfer to end, without the GIL. `what` says for the error what was being done with the peer.

        Raises:
            DeadlineError: it took longer than `deadline_s`, or than the connection's own deadline.
            StageDiedError: the peer is gone.
            EngineDeadError: `abort` was called.
        """

    def abort(self) -> None:
        """End all waits of this edge, here and at the peer. From any thread."""

    def close(self) -> None:
        """Release everything."""


class _RingEnd(Generic[TransferT]):
    """What both ends do alike.

    Args:
        connection: To the other end.
        num_slots: Of the edge.
        slot_bytes: Of the edge.
        device: Where a stage that computes on a GPU has its slots; None: they are in host memory.
        num_device_slots: How many it has there.
    """

    def __init__(
        self,
        connection: Connection[TransferT],
        num_slots: int,
        slot_bytes: int,
        device: torch.device | None,
        num_device_slots: int,
    ) -> None:
        assert 2 <= num_slots <= MAX_SLOTS, "one slot cannot be written while it is read"
        self._connection = connection
        self._all_slots = torch.zeros(num_slots, slot_bytes, dtype=torch.uint8)
        self._slots = self._all_slots.unbind()
        self._device_slots: torch.Tensor | None = None
        if device is not None:
            self._device_slots = torch.zeros(num_device_slots, slot_bytes, dtype=torch.uint8, device=device)

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]."""
        return self._all_slots if self._device_slots is None else self._device_slots

    def abort(self) -> None:
        """End waits in progress, here and at the peer. From any thread."""
        self._connection.abort()


class RingSender(_RingEnd[TransferT]):
    """The sending end; see `LinkSender`. One slot on a device is enough: `send` waits until it is copied."""

    def __init__(
        self, connection: Connection[TransferT], num_slots: int, slot_bytes: int, device: torch.device | None = None
    ) -> None:
        super().__init__(connection, num_slots, slot_bytes, device, 1)
        self._in_flight: list[TransferT | None] = [None] * num_slots
        self._acquired = NO_STEP

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes], once its previous message is out."""
        slot = step_id % len(self._slots)
        if (transfer := self._in_flight[slot]) is not None:
            self._connection.wait(transfer, f"sending step {step_id - len(self._slots)} to")
            self._in_flight[slot] = None
        self._acquired = step_id
        return self._slots[slot] if self._device_slots is None else self._device_slots[0]

    def send(self, step_id: int, num_bytes: int) -> None:
        """Begin to send the first `num_bytes` of the step's slot."""
        assert step_id == self._acquired, f"step {step_id} is sent, but {self._acquired} was acquired"
        slot = step_id % len(self._slots)
        message = self._slots[slot][:num_bytes]
        if self._device_slots is not None:
            message.copy_(self._device_slots[0, :num_bytes])
        self._in_flight[slot] = self._connection.send(message, slot)
        self._acquired = NO_STEP

    def close(self) -> None:
        """Release everything, once the messages that were sent are out, or cannot get out."""
        try:
            for transfer in self._in_flight:
                if transfer is not None:
                    self._connection.wait(transfer, "sending the last steps to", _FLUSH_TIMEOUT_S)
        except RayppError as error:
            logger.warning("closing a link with messages that were not received: %s", error)
        self._in_flight.clear()
        self._connection.close()


class RingReceiver(_RingEnd[TransferT]):
    """The receiving end; see `LinkReceiver`."""

    def __init__(
        self, connection: Connection[TransferT], num_slots: int, slot_bytes: int, device: torch.device | None = None
    ) -> None:
        super().__init__(connection, num_slots, slot_bytes, device, num_slots)
        self._num_bytes: dict[int, int] = {}  # of posted steps, if slots are on a device
        self._posted: list[TransferT | None] = [None] * num_slots
        self._steps = [NO_STEP] * num_slots  # whose message is in the slot, or will be
        self._queued: list[deque[int]] = [deque() for _ in range(num_slots)]  # steps that wait for the slot
        self._lock = threading.Lock()  # between the thread that posts and the one that waits and releases

    def post_recv(self, step_id: int, num_bytes: int) -> None:
        """Receive the step's message as soon as its slot is free: now, or when the slot is released."""
        slot = step_id % len(self._slots)
        assert num_bytes <= len(self._slots[slot]), f"step {step_id}: {num_bytes} bytes exceed the slot"
        if self._device_slots is not None:
            self._num_bytes[step_id] = num_bytes
        with self._lock:
            if self._steps[slot] == NO_STEP:
                self._post(step_id, slot)
            else:
                self._queued[slot].append(step_id)

    def wait(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes], once its message is there."""
        slot = step_id % len(self._slots)
        assert self._steps[slot] == step_id, f"step {step_id} is waited for; its slot has {self._steps[slot]}"
        if (transfer := self._posted[slot]) is not None:
            self._connection.wait(transfer, f"receiving step {step_id} from")
            self._posted[slot] = None
        if self._device_slots is None:
            return self._slots[slot]
        num_bytes = self._num_bytes[step_id]
        self._device_slots[slot, :num_bytes].copy_(self._slots[slot][:num_bytes])
        return self._device_slots[slot]

    def release(self, step_id: int) -> None:
        """Give the slot to the next step that was posted for it."""
        slot = step_id % len(self._slots)
        assert self._steps[slot] == step_id, f"step {step_id} is released; its slot has {self._steps[slot]}"
        assert self._posted[slot] is None, f"step {step_id} is released before it was waited for"
        self._num_bytes.pop(step_id, None)
        with self._lock:
            self._steps[slot] = NO_STEP
            if self._queued[slot]:
                self._post(self._queued[slot].popleft(), slot)

    def close(self) -> None:
        """Release everything."""
        self._posted.clear()
        self._connection.close()

    def _post(self, step_id: int, slot: int) -> None:
        # The whole slot, not num_bytes of it: gloo ends the process when a message is larger than its buffer, and both
        # ends agreed on the size of slots when they met.
        self._posted[slot] = self._connection.recv(self._slots[slot], slot)
        self._steps[slot] = step_id
