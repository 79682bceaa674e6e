"""A stream and a two-rank NCCL communicator for one end of an edge.

Calls NCCL through nccl4py's bindings: its core layer looks at every tensor anew, which takes longer than the transfer.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from typing import Any

import torch

from raypp.errors import ConfigError, DeadlineError, EngineDeadError, ResourceError
from raypp.transport.bounded_call import BoundedCall
from raypp.transport.edges import Edge, EdgeEnds
from raypp.transport.nccl import NcclReceiver, NcclSender
from raypp.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
_POLL_S = 0.001


class NcclEdgeStream:
    """See `EdgeStream`. Rank 0 sends, rank 1 receives.

    Args:
        edge: Which one.
        stage_index: Of this end.
        device: Of this stage.
        meeting: Where the ends meet; the constructor waits for the peer.

    Raises:
        ConfigError: nccl4py is not installed.
        DeadlineError: the peer did not come.
        ResourceError: NCCL cannot join the two.
    """

    def __init__(self, edge: Edge, stage_index: int, device: torch.device, meeting: Meeting) -> None:
        self._nccl = _import_nccl()
        self._name = f"{edge.name} between stages {edge.sender} and {edge.receiver}"
        self._data_type = int(self._nccl.DataType.Uint8)
        self._rank = 0 if stage_index == edge.sender else 1
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._written = torch.cuda.Event()
        self._transfers: list[torch.cuda.Event | None] = [None] * edge.num_slots
        self._reads: list[torch.cuda.Event | None] = [None] * edge.num_slots
        self._lock = threading.Lock()  # around the end of the communicator
        self._communicator: Any = self._join(edge, meeting)

    def warm_up(self, slots: tuple[torch.Tensor, ...], timeout_s: float) -> None:
        """Send or receive a small and a full message: NCCL connects on the first transfer of a kind.

        Raises:
            DeadlineError: the peer does not do the same.
        """
        for num_bytes in (8, len(slots[0])):
            (self.send if self._rank == 0 else self.receive)(0, slots[0][:num_bytes])
        if not self._is_done_within(timeout_s):
            raise DeadlineError(
                f"NCCL moved nothing over {self._name}",
                got=f"nothing within {timeout_s:.1f} s",
                hint="set NCCL_DEBUG=INFO to see how NCCL tries to connect",
            )

    def send(self, slot: int, message: torch.Tensor) -> None:
        """Enqueue a send of what the current stream has written so far."""
        self._written.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._written)
        self._transfer(self._nccl.send, slot, message)

    def receive(self, slot: int, message: torch.Tensor) -> None:
        """Enqueue a receive, after the reads that `mark_read` last marked for the slot."""
        if (read := self._reads[slot]) is not None:
            self._stream.wait_event(read)
        self._transfer(self._nccl.recv, slot, message)

    def await_transfer(self, slot: int) -> None:
        """Let the current stream wait for the slot's last send or receive, if there was one."""
        if (transfer := self._transfers[slot]) is not None:
            torch.cuda.current_stream(self._device).wait_event(transfer)

    def mark_read(self, slot: int) -> None:
        """Note that what the current stream was given so far are all reads of the slot."""
        read = self._reads[slot]
        if read is None:
            read = self._reads[slot] = torch.cuda.Event()
        read.record(torch.cuda.current_stream(self._device))

    def abort(self) -> None:
        """End the transfers in progress: their kernels look at a flag that NCCL sets."""
        self._end_communicator(self._nccl.comm_abort, "abort")

    def close(self) -> None:
        """Wait, with a deadline, until what was enqueued is done; then leave the communicator."""
        if self._communicator is None:
            return
        if self._is_done_within(_CLOSE_TIMEOUT_S):
            self._end_communicator(self._nccl.comm_destroy, "leave")
        else:
            logger.warning("closing %s with transfers in progress", self._name)
            self.abort()

    def _transfer(self, function: Any, slot: int, message: torch.Tensor) -> None:
        communicator, stream = self._communicator, self._stream.cuda_stream
        if communicator is None:
            raise EngineDeadError(f"the link was aborted: {self._name}")
        if message.numel():  # NCCL is asked for nothing when there is nothing, on both ends
            try:
                function(message.data_ptr(), message.numel(), self._data_type, 1 - self._rank, communicator, stream)
            except self._nccl.NCCLError as error:
                raise self._failed("transfer", error) from error
        done = self._transfers[slot]
        if done is None:
            done = self._transfers[slot] = torch.cuda.Event()
        done.record(self._stream)

    def _join(self, edge: Edge, meeting: Meeting) -> Any:
        key = f"nccl {edge.name}"
        if self._rank == 0:
            meeting.tell(key, bytes(self._nccl.get_unique_id()).hex())
        unique_id = bytearray.fromhex(meeting.ask(key, edge.sender))

        def join() -> Any:
            torch.cuda.set_device(self._device)
            return self._nccl.comm_init_rank_scalable(2, self._rank, 1, unique_id, 0)

        try:
            return BoundedCall(join, "nccl-init").result(meeting.remaining_s)
        except TimeoutError as error:
            raise DeadlineError(
                f"no NCCL connection over {self._name}",
                got=str(error),
                hint="set NCCL_DEBUG=INFO to see how NCCL tries to connect; NCCL_SOCKET_IFNAME names the interface",
            ) from error
        except self._nccl.NCCLError as error:
            raise self._failed("connect", error) from error

    def _is_done_within(self, timeout_s: float) -> bool:
        ends = time.monotonic() + timeout_s
        try:
            while not self._stream.query():
                if time.monotonic() > ends:
                    return False
                time.sleep(_POLL_S)
        except RuntimeError:
            return False  # the device has failed
        return True

    def _end_communicator(self, function: Any, what: str) -> None:
        with self._lock:
            communicator, self._communicator = self._communicator, None
        if communicator is None:
            return

        def end() -> None:
            torch.cuda.set_device(self._device)
            function(communicator)

        try:
            BoundedCall(end, f"nccl-{what}").result(_CLOSE_TIMEOUT_S)
        except (TimeoutError, self._nccl.NCCLError) as error:
            logger.warning("could not %s the communicator of %s: %s", what, self._name, error)

    def _failed(self, what: str, error: Exception) -> ResourceError:
        return ResourceError(
            f"NCCL could not {what} over {self._name}", got=str(error), hint="set NCCL_DEBUG=WARN for its reasons"
        )


def open_nccl_ends(
    stage_index: int, edges: list[Edge], device: torch.device, meeting: Meeting, opened: ExitStack
) -> EdgeEnds:
    """Return a stage's ends of `edges`, connected and warm; waits for the peers.

    Args:
        stage_index: Of this stage.
        edges: Those that have an end here, in the order in which all stages open theirs.
        device: Of this stage.
        meeting: Where the stages meet.
        opened: Told how to undo it.

    Raises:
        ConfigError, DeadlineError, ResourceError: as `NcclEdgeStream`.
    """
    ends = EdgeEnds()
    torch.cuda.set_device(device)
    for edge in edges:
        slots = torch.zeros(edge.num_slots, edge.slot_bytes, dtype=torch.uint8, device=device).unbind()
        torch.cuda.synchronize(device)  # the edge's stream does not wait for the zeros
        stream = NcclEdgeStream(edge, stage_index, device, meeting)
        opened.callback(stream.abort)
        stream.warm_up(slots, meeting.remaining_s)
        if stage_index == edge.sender:
            ends.senders[edge.name] = NcclSender(stream, slots)
        else:
            ends.receivers[edge.name] = NcclReceiver(stream, slots)
    return ends


def _import_nccl() -> Any:
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise ConfigError(
            "nccl links need the package nccl4py", got=str(error), hint="pip install 'raypp[gpu]'"
        ) from error
    return nccl
