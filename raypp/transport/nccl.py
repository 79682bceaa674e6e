"""The two ends of an edge over NCCL: between nodes, and between GPUs that do not reach each other's memory.

    sender:   compute stream: write slot | edge's stream: after that, send -> compute stream: acquire waits for the send
    receiver: edge's stream: receive, once the slot was released -> compute stream: wait for it, read, release

Each directed edge has a communicator of two ranks and a stream of its own, so that no edge waits for another. A receive
is enqueued only when it is waited for: until its message comes it spins on the GPU, and takes time from what computes.
As with `ipc`, nothing here blocks the host. An end that was aborted raises; the peer's has to be aborted too.
"""

from __future__ import annotations

from typing import Protocol

import torch

from raypp.errors import EngineDeadError
from raypp.messages import NO_STEP


class EdgeStream(Protocol):
    """One end's stream and communicator. `slot` is an index; the current stream is the one that computes."""

    def send(self, slot: int, message: torch.Tensor) -> None:
        """Enqueue a send of what the current stream has written so far."""

    def receive(self, slot: int, message: torch.Tensor) -> None:
        """Enqueue a receive, after the reads that `mark_read` last marked for the slot."""

    def await_transfer(self, slot: int) -> None:
        """Let the current stream wait for the slot's last send or receive, if there was one."""

    def mark_read(self, slot: int) -> None:
        """Note that what the current stream was given so far are all reads of the slot."""

    def abort(self) -> None:
        """End the transfers in progress. From any thread."""

    def close(self) -> None:
        """Release everything, once what was enqueued is done."""


class NcclSender:
    """The sending end; see `LinkSender`.

    Args:
        stream: The edge's.
        slots: uint8 [slot_bytes] each, in this stage's memory.
    """

    def __init__(self, stream: EdgeStream, slots: tuple[torch.Tensor, ...]) -> None:
        self._stream = stream
        self._slots = slots
        self._acquired = NO_STEP
        self._is_aborted = False

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes]. What the current stream does next waits until it is out.

        Raises:
            EngineDeadError: the link was aborted.
        """
        _check(self._is_aborted, step_id)
        slot = step_id % len(self._slots)
        self._stream.await_transfer(slot)
        self._acquired = step_id
        return self._slots[slot]

    def send(self, step_id: int, num_bytes: int) -> None:
        """Enqueue the send of the first `num_bytes` of the slot, after what the current stream was given so far.

        Raises:
            EngineDeadError: the link was aborted.
        """
        assert step_id == self._acquired, f"step {step_id} is sent, but {self._acquired} was acquired"
        _check(self._is_aborted, step_id)
        slot = step_id % len(self._slots)
        self._stream.send(slot, self._slots[slot][:num_bytes])
        self._acquired = NO_STEP

    def abort(self) -> None:
        """End the edge's transfers on this end. From any thread."""
        self._is_aborted = True
        self._stream.abort()

    def close(self) -> None:
        """Release everything, once the messages that were sent are out."""
        self._stream.close()


class NcclReceiver:
    """The receiving end; see `LinkReceiver`. Arguments as of `NcclSender`."""

    def __init__(self, stream: EdgeStream, slots: tuple[torch.Tensor, ...]) -> None:
        self._stream = stream
        self._slots = slots
        self._num_bytes: dict[int, int] = {}  # step_id -> size, of steps that were posted
        self._is_aborted = False

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
        slot = step_id % len(self._slots)
        self._stream.receive(slot, self._slots[slot][: self._num_bytes.pop(step_id)])
        self._stream.await_transfer(slot)
        return self._slots[slot]

    def release(self, step_id: int) -> None:
        """Give the slot back, after what the current stream was given so far."""
        self._stream.mark_read(step_id % len(self._slots))

    def abort(self) -> None:
        """End the edge's transfers on this end. From any thread."""
        self._is_aborted = True
        self._stream.abort()

    def close(self) -> None:
        """Release everything."""
        self._stream.close()


def _check(is_aborted: bool, step_id: int) -> None:
    if is_aborted:
        raise EngineDeadError(f"the link was aborted before step {step_id}")
