"""An edge between two processes over gloo (TCP): the link of stages on CPUs.

Each directed edge has a process group of its own, of two ranks: 0 sends, 1 receives. gloo closes all connections of a
group when one wait runs out, so a shared group would let one slow edge take the others with it. Nothing here touches
torch's default process group.

gloo sends a message once the receiver has posted its buffer; until then it stays in the sender's slot.

    sender:   slot free -> acquired -> in flight (a Work, which must be kept: dropping it drops the message) -> free
    receiver: slot free -> posted (a Work) -> received -> released, and posted again if that was asked for already
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work  # torch.distributed has them without types

from raypp.errors import DeadlineError, EngineDeadError, RayppError, StageDiedError
from raypp.messages import NO_STEP

_SENDER_RANK, _RECEIVER_RANK = 0, 1
_FLUSH_TIMEOUT_S = 5.0
_MAX_SLOTS = 1 << 16

logger = logging.getLogger(__name__)


class GlooDevice:
    """What all edges of a process share: one listening socket and one thread that moves the bytes.

    Args:
        host: The address of this process's own node that its neighbours can reach.
    """

    def __init__(self, host: str) -> None:
        self._device = ProcessGroupGloo.create_device(hostname=host)

    def connect(self, store: Store, rank: int, timeout_s: float) -> Any:
        """Meet the other rank over `store` and return the group of the two. Waits for the other."""
        group: Any = ProcessGroupGloo  # its type declarations lack the options and point-to-point messages
        options = group._Options()
        options._devices = [self._device]
        options._threads = 1  # they run collectives, of which there are none
        options._timeout = timedelta(seconds=timeout_s)
        return group(store, rank, 2, options)


class GlooConnection:
    """One end's half of an edge: posts messages, waits for them, and says what its errors mean.

    Args:
        device: This process's.
        store: A store that the two ends of this edge share with nobody else.
        rank: 0 for the sender, 1 for the receiver.
        peer_index: The stage at the other end.
        open_timeout_s: How long the other end may take to come.
        deadline_s: How long a message may take. An edge on which a wait ran out cannot be used again.

    Raises:
        DeadlineError: the other end did not come.
    """

    def __init__(
        self,
        device: GlooDevice,
        store: Store,
        rank: int,
        *,
        peer_index: int,
        open_timeout_s: float,
        deadline_s: float,
    ) -> None:
        self._peer_rank, self._peer_index = 1 - rank, peer_index
        # gloo counts milliseconds, and takes 0 for "no limit".
        self._deadline_s = max(math.ceil(deadline_s * 1000), 1) / 1000
        self._aborted = threading.Event()
        try:
            self._group: Any = device.connect(store, rank, open_timeout_s)
        except RuntimeError as error:
            raise DeadlineError(
                f"no connection to stage {peer_index}",
                got=str(error),
                expected=f"a connection within {open_timeout_s} s",
                hint="the stages' nodes must reach each other over TCP",
            ) from error

    def send(self, tensor: torch.Tensor, tag: int) -> Work:
        """Begin to send; the returned Work must be kept until it was waited for."""
        try:
            work: Work = self._open_group().send([tensor], self._peer_rank, tag)
        except RuntimeError as error:
            raise self._lost("sending to", error) from error
        return work

    def recv(self, tensor: torch.Tensor, tag: int) -> Work:
        """Begin to receive; the returned Work must be kept until it was waited for."""
        try:
            work: Work = self._open_group().recv([tensor], self._peer_rank, tag)
        except RuntimeError as error:
            raise self._lost("receiving from", error) from error
        return work

    def wait(self, work: Work, what: str, deadline_s: float | None = None) -> None:
        """Wait for a message. Blocks in gloo, without the GIL.

        Raises:
            DeadlineError: it took longer than the deadline.
            StageDiedError: the peer is gone.
            EngineDeadError: `abort` was called.
        """
        deadline_s = deadline_s or self._deadline_s
        started = time.monotonic()
        try:
            work.wait(timedelta(seconds=deadline_s))
        except RuntimeError as error:
            waited_s = time.monotonic() - started
            if self._aborted.is_set() or waited_s < deadline_s:
                raise self._lost(what, error) from error
            raise DeadlineError(
                f"{what} stage {self._peer_index} took too long",
                got=f"nothing within {waited_s:.1f} s",
                hint="the stage is frozen, or its steps take longer than faults.step_timeout_s",
            ) from error

    def abort(self) -> None:
        """End all waits of this edge, here and at the peer. From any thread."""
        self._aborted.set()
        group = self._group
        if group is None:
            return
        # ProcessGroupGloo.abort() does nothing; but a wait that runs out makes gloo close the group's connections,
        # which ends the waits of all other threads. So wait in vain, for one millisecond.
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], self._peer_rank, _MAX_SLOTS).wait(timedelta(milliseconds=1))
        except RuntimeError:
            logger.debug("link to stage %d aborted", self._peer_index)

    def close(self) -> None:
        """Drop the group: gloo closes its sockets and ends its threads."""
        self._group = None

    def _open_group(self) -> Any:
        assert self._group is not None, "the link was closed"
        return self._group

    def _lost(self, what: str, error: RuntimeError) -> RayppError:
        if self._aborted.is_set():
            return EngineDeadError(f"the link was aborted while {what} stage {self._peer_index}")
        return StageDiedError(
            f"stage {self._peer_index} is gone: {what} it failed", stage_index=self._peer_index, got=str(error)
        )


class GlooSender:
    """The sending end; see `LinkSender`."""

    def __init__(self, connection: GlooConnection, num_slots: int, slot_bytes: int) -> None:
        self._connection = connection
        self._slots = _make_slots(num_slots, slot_bytes)
        self._in_flight: list[Work | None] = [None] * num_slots
        self._acquired = NO_STEP

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes], once its previous message is out."""
        slot = step_id % len(self._slots)
        if (work := self._in_flight[slot]) is not None:
            self._connection.wait(work, f"sending step {step_id - len(self._slots)} to")
            self._in_flight[slot] = None
        self._acquired = step_id
        return self._slots[slot]

    def send(self, step_id: int, num_bytes: int) -> None:
        """Begin to send the first `num_bytes` of the step's slot."""
        assert step_id == self._acquired, f"step {step_id} is sent, but {self._acquired} was acquired"
        slot = step_id % len(self._slots)
        self._in_flight[slot] = self._connection.send(self._slots[slot][:num_bytes], slot)
        self._acquired = NO_STEP

    def abort(self) -> None:
        """End waits in progress, here and at the peer. From any thread."""
        self._connection.abort()

    def close(self) -> None:
        """Release everything, once the messages that were sent are out, or cannot get out."""
        try:
            for work in self._in_flight:
                if work is not None:
                    self._connection.wait(work, "sending the last steps to", _FLUSH_TIMEOUT_S)
        except RayppError as error:
            logger.warning("closing a link with messages that were not received: %s", error)
        self._in_flight.clear()
        self._connection.close()


class GlooReceiver:
    """The receiving end; see `LinkReceiver`."""

    def __init__(self, connection: GlooConnection, num_slots: int, slot_bytes: int) -> None:
        self._connection = connection
        self._slots = _make_slots(num_slots, slot_bytes)
        self._posted: list[Work | None] = [None] * num_slots
        self._steps = [NO_STEP] * num_slots  # whose message is in the slot, or will be
        self._queued: list[deque[int]] = [deque() for _ in range(num_slots)]  # steps that wait for the slot

    def post_recv(self, step_id: int, num_bytes: int) -> None:
        """Receive the step's message as soon as its slot is free: now, or when the slot is released."""
        slot = step_id % len(self._slots)
        assert num_bytes <= len(self._slots[slot]), f"step {step_id}: {num_bytes} bytes exceed the slot"
        if self._steps[slot] == NO_STEP:
            self._post(step_id, slot)
        else:
            self._queued[slot].append(step_id)

    def wait(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes], once its message is there."""
        slot = step_id % len(self._slots)
        assert self._steps[slot] == step_id, f"step {step_id} is waited for; its slot has {self._steps[slot]}"
        if (work := self._posted[slot]) is not None:
            self._connection.wait(work, f"receiving step {step_id} from")
            self._posted[slot] = None
        return self._slots[slot]

    def release(self, step_id: int) -> None:
        """Give the slot to the next step that was posted for it."""
        slot = step_id % len(self._slots)
        assert self._steps[slot] == step_id, f"step {step_id} is released; its slot has {self._steps[slot]}"
        assert self._posted[slot] is None, f"step {step_id} is released before it was waited for"
        self._steps[slot] = NO_STEP
        if self._queued[slot]:
            self._post(self._queued[slot].popleft(), slot)

    def abort(self) -> None:
        """End waits in progress, here and at the peer. From any thread."""
        self._connection.abort()

    def close(self) -> None:
        """Release everything."""
        self._posted.clear()
        self._connection.close()

    def _post(self, step_id: int, slot: int) -> None:
        # The whole slot is offered, not num_bytes of it: gloo ends the process when a message is larger than its
        # buffer, and the ends agreed on the slots' size when they met.
        self._posted[slot] = self._connection.recv(self._slots[slot], slot)
        self._steps[slot] = step_id


def _make_slots(num_slots: int, slot_bytes: int) -> tuple[torch.Tensor, ...]:
    assert 2 <= num_slots <= _MAX_SLOTS, "one slot cannot be written while it is read"
    return torch.zeros(num_slots, slot_bytes, dtype=torch.uint8).unbind()
