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
from concurrent.futures import Future
from typing import Any

import torch

from raypp.errors import DeadlineError
from raypp.transport.edges import Edge, EdgeEnds, StreamEnd, after_last
from raypp.transport.gpu_access import CurrentStream
from raypp.transport.nccl.communicator import Communicator
from raypp.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
_POLL_S = 0.001


class NcclChannel:
    """One end's half of an edge; rank 0 sends, rank 1 receives. Only the constructor and `warm_up` block the host.

    Args:
        edge: Which one.
        stage_index: Of this end.
        device: Of this stage, with an index.
        meeting: Where the ends meet; the constructor waits for the peer.

    Raises:
        ConfigError: nccl4py is not installed.
        DeadlineError: the peer did not come.
        ResourceError: NCCL cannot join the two.
    """

    def __init__(self, edge: Edge, stage_index: int, device: torch.device, meeting: Meeting) -> None:
        self._name = f"{edge.name} between stages {edge.sender} and {edge.receiver}"
        self._rank = 0 if stage_index == edge.sender else 1
        self._current = CurrentStream(device)
        self._last_received_on: torch.cuda.Stream | None = None
        self._stream = torch.cuda.Stream(device)
        self._written = torch.cuda.Event()
        self._sent: list[torch.cuda.Event | None] = [None] * edge.num_slots
        self._communicator = Communicator(
            self._name, self._rank, 2, first_index=edge.sender, device=device, meeting=meeting
        )
        self._nccl = self._communicator.nccl
        self._data_type = int(self._nccl.DataType.Uint8)

    def warm_up(self, slot: torch.Tensor, timeout_s: float) -> None:
        """Send or receive a small and a full message: NCCL connects on the first transfer of a kind.

        Raises:
            DeadlineError: the peer does not do the same.
        """
        for num_bytes in (8, len(slot)):
            if self._rank == 0:
                self.send(0, slot[:num_bytes])
            else:
                self.receive(slot[:num_bytes])
        if not self.is_done_within(timeout_s):
            raise DeadlineError(
                f"NCCL moved nothing over {self._name}",
                got=f"nothing within {timeout_s:.1f} s",
                hint="set NCCL_DEBUG=INFO to see how NCCL tries to connect",
            )

    def send(self, slot: int, message: torch.Tensor) -> None:
        """Send, on the edge's own stream, what the current stream has written so far. `slot` is an index."""
        self._written.record(self._current.get())
        self._stream.wait_event(self._written)
        self._transfer(self._nccl.send, message, self._stream)
        sent = self._sent[slot]
        if sent is None:
            sent = self._sent[slot] = torch.cuda.Event()
        sent.record(self._stream)

    def await_sent(self, slot: int) -> None:
        """Let the current stream wait until the slot's last message is out, if there was one."""
        if (sent := self._sent[slot]) is not None:
            self._current.get().wait_event(sent)

    def receive(self, message: torch.Tensor) -> None:
        """Receive on the current stream."""
        stream = self._last_received_on = self._current.get()
        self._transfer(self._nccl.recv, message, stream)

    def abort(self) -> None:
        """End the transfers in progress. Returns at once; from any thread."""
        self._communicator.abort()

    def is_done_within(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until what this end enqueued is done; return whether it is."""
        ends = time.monotonic() + timeout_s
        try:
            while not self._is_done():
                if time.monotonic() > ends:
                    return False
                time.sleep(_POLL_S)
        except RuntimeError:
            return False  # the device has failed
        return True

    def leave(self) -> Future[None] | None:
        """Begin to end the communicator, which waits for the peer to do the same. None when it has ended before."""
        return self._communicator.leave()

    def _is_done(self) -> bool:
        received = self._last_received_on is None or self._last_received_on.query()
        return bool(received and self._stream.query())

    def _transfer(self, function: Any, message: torch.Tensor, stream: torch.cuda.Stream) -> None:
        num_bytes = message.numel()
        if num_bytes:  # both ends leave an empty message out
            self._communicator.call(
                function, message.data_ptr(), num_bytes, self._data_type, 1 - self._rank, stream=stream
            )


class _NcclEnd(StreamEnd):
    """What both ends do alike.

    Args:
        channel: The edge's.
        slots: uint8 [num_slots, slot_bytes], in this stage's memory.
        on_close: Called once, when the end is closed.
    """

    def __init__(self, channel: NcclChannel, slots: torch.Tensor, on_close: Callable[[], None]) -> None:
        super().__init__(slots, on_close)
        self._channel = channel

    def abort(self) -> None:
        """End the edge's transfers on this end. From any thread."""
        self._is_aborted = True
        self._channel.abort()


class NcclSender(_NcclEnd):
    """The sending end; see `LinkSender`."""

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
        self._check_acquired(step_id)
        slot = step_id % len(self._slots)
        self._channel.send(slot, self._slots[slot][:num_bytes])


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
