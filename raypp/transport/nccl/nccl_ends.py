"""The ends of edges over NCCL, between nodes and between GPUs that do not reach each other's memory: the `nccl` link.

    sender:    current stream:  [wait until the slot's last send is out]  write the slot
               edge's stream:   after that, send
    receiver:  current stream:  receive into the slot, read it

A send has a stream of its own, because it may have to wait for its receiver. A receive needs none: nothing can go on
before its message is there. It is enqueued only when it is waited for: until its message comes it spins on the GPU, and
takes time from what computes. As with `ipc`, nothing here blocks the host. An end that was aborted raises; the peer's
end has to be aborted too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from raypp.errors import EngineDeadError
from raypp.messages import NO_STEP
from raypp.transport.edges import Edge, EdgeEnds, after_last
from raypp.transport.nccl.channel import NcclChannel
from raypp.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class _NcclEnd:
    """What both ends do alike.

    Args:
        channel: The edge's.
        slots: uint8 [num_slots, slot_bytes], in this stage's memory.
        on_close: Called once, when the end is closed.
    """

    def __init__(self, channel: NcclChannel, slots: torch.Tensor, on_close: Callable[[], None]) -> None:
        self._channel = channel
        self._all_slots = slots
        self._slots = slots.unbind()
        self._on_close = on_close
        self._is_aborted = False
        self._is_closed = False

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]."""
        return self._all_slots

    def abort(self) -> None:
        """End the edge's transfers on this end. From any thread."""
        self._is_aborted = True
        self._channel.abort()

    def close(self) -> None:
        """Give the end up. All communicators of a stage end with the last of its ends."""
        if not self._is_closed:
            self._is_closed = True
            self._on_close()

    def _check(self, step_id: int) -> None:
        if self._is_aborted:
            raise EngineDeadError(f"the link was aborted before step {step_id}")


class NcclSender(_NcclEnd):
    """The sending end; see `LinkSender`."""

    _acquired = NO_STEP

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes]. The stream's next operations wait until its last send is out.

        Raises:
            EngineDeadError: the link was aborted.
        """
        self._check(step_id)
        slot = step_id % len(self._slots)
        self._channel.await_sent(slot)
        self._acquired = step_id
        return self._slots[slot]

    def send(self, step_id: int, num_bytes: int) -> None:
        """Send the first `num_bytes` of the slot, after the current stream's earlier operations.

        Raises:
            EngineDeadError: the link was aborted.
        """
        assert step_id == self._acquired, f"step {step_id} is sent, but {self._acquired} was acquired"
        self._check(step_id)
        slot = step_id % len(self._slots)
        self._channel.send(slot, self._slots[slot][:num_bytes])
        self._acquired = NO_STEP


class NcclReceiver(_NcclEnd):
    """The receiving end; see `LinkReceiver`."""

    def __init__(self, channel: NcclChannel, slots: torch.Tensor, on_close: Callable[[], None]) -> None:
        super().__init__(channel, slots, on_close)
        self._num_bytes: dict[int, int] = {}  # step_id -> size, of steps that were posted

    def post_recv(self, step_id: int, num_bytes: int) -> None:
        """Note the message's size; the receive is enqueued by `wait`. From any one thread."""
        assert num_bytes <= len(self._slots[0]), f"step {step_id}: {num_bytes} bytes exceed the slot"
        self._num_bytes[step_id] = num_bytes

    def wait(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes]. The stream's next operations wait for the message.

        Raises:
            EngineDeadError: the link was aborted.
        """
        self._check(step_id)
        assert step_id in self._num_bytes, f"step {step_id} was never posted"
        slot = self._slots[step_id % len(self._slots)]
        self._channel.receive(slot[: self._num_bytes.pop(step_id)])
        return slot

    def release(self, step_id: int) -> None:
        """Do nothing: the slot's next receive comes later in the stream than what reads the slot now."""


class NcclEdges:
    """All ends of one stage: opened in the same order by all stages, and closed all at once.

    Args:
        stage_index: Of this stage.
        edges: Those that have an end here, in the order in which all stages open theirs.
        device: Of this stage, with an index. It becomes the current one.
        meeting: Where the stages meet; the constructor waits for the peers.

    Raises:
        ConfigError, DeadlineError, ResourceError: as `NcclChannel`.
    """

    def __init__(self, stage_index: int, edges: list[Edge], device: torch.device, meeting: Meeting) -> None:
        self._stage_index = stage_index
        self._channels: list[NcclChannel] = []
        self.ends = EdgeEnds()
        """The ends by the names of their edges. The communicators end with the last of them."""
        on_close = after_last(len(edges), self.close)
        torch.cuda.set_device(device)
        try:
            for edge in edges:
                slots = torch.zeros(edge.num_slots, edge.slot_bytes, dtype=torch.uint8, device=device)
                torch.cuda.synchronize(device)  # the edge's stream does not wait for the zeros
                channel = NcclChannel(edge, stage_index, device, meeting)
                self._channels.append(channel)
                channel.warm_up(slots[0], meeting.remaining_s)
                if stage_index == edge.sender:
                    self.ends.senders[edge.name] = NcclSender(channel, slots, on_close)
                else:
                    self.ends.receivers[edge.name] = NcclReceiver(channel, slots, on_close)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End all transfers."""
        for channel in self._channels:
            channel.abort()

    def close(self) -> None:
        """Leave all communicators, once what was enqueued is done; give up after five seconds.

        All at once, because leaving one waits for its peer: stages that left theirs one after the other, each in its
        own order, would wait for each other.
        """
        ends = time.monotonic() + _CLOSE_TIMEOUT_S
        leaving = []
        for channel in self._channels:
            if channel.is_done_within(max(ends - time.monotonic(), 0.0)):
                leaving.append(channel.leave())
            else:
                logger.warning("stage %d closes a link with transfers in progress", self._stage_index)
                channel.abort()
        for call in leaving:
            try:
                if call is not None:
                    call.result(max(ends - time.monotonic(), 0.1))
            except TimeoutError as error:
                logger.warning("a neighbour of stage %d did not leave: %s", self._stage_index, error)
        # The ends know this object: while it knew them, their slots would stay until Python's collector comes.
        self.ends.senders.clear()
        self.ends.receivers.clear()
