"""What moves the messages of one end of an `nccl` edge: a communicator of two ranks, and a stream.

Calls NCCL through nccl4py's bindings: its core layer inspects every tensor again, which takes longer than the transfer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from raypp.errors import ConfigError, DeadlineError, EngineDeadError, ResourceError, install
from raypp.transport.current_stream import CurrentStream
from raypp.transport.edges import Edge
from raypp.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)

_POLL_S = 0.001

ResultT = TypeVar("ResultT")


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
        self._nccl = _import_nccl()
        self._data_type = int(self._nccl.DataType.Uint8)
        self._name = f"{edge.name} between stages {edge.sender} and {edge.receiver}"
        self._rank = 0 if stage_index == edge.sender else 1
        self._device = device
        self._current = CurrentStream(device)
        self._last_received_on: torch.cuda.Stream | None = None
        self._stream = torch.cuda.Stream(device)
        self._written = torch.cuda.Event()
        self._sent: list[torch.cuda.Event | None] = [None] * edge.num_slots
        self._lock = threading.Lock()  # only one thread ends the communicator
        self._communicator: Any = self._join(edge, meeting)

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
        """End the transfers in progress: their kernels look at a flag that NCCL sets. Returns at once; from any thread.

        Freeing what the communicator holds may wait for the peer, and for kernels of the other edges' communicators
        (NVIDIA/nccl issue 863, pull request 564). A thread does it, so that all edges can be aborted together.
        """
        self._end_communicator(self._nccl.comm_abort, "abort")

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

    def leave(self) -> BoundedCall[None] | None:
        """Begin to end the communicator, which waits for the peer to do the same. None when it has ended before."""
        return self._end_communicator(self._nccl.comm_destroy, "leave")

    def _is_done(self) -> bool:
        received = self._last_received_on is None or self._last_received_on.query()
        return bool(received and self._stream.query())

    def _transfer(self, function: Any, message: torch.Tensor, stream: torch.cuda.Stream) -> None:
        num_bytes, communicator = message.numel(), self._communicator
        if communicator is None:
            raise EngineDeadError(f"the link was aborted: {self._name}")
        if not num_bytes:
            return  # both ends leave an empty message out
        try:
            function(message.data_ptr(), num_bytes, self._data_type, 1 - self._rank, communicator, stream.cuda_stream)
        except self._nccl.NCCLError as error:
            raise self._failed("transfer", error) from error

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

    def _end_communicator(self, function: Any, what: str) -> BoundedCall[None] | None:
        with self._lock:
            communicator, self._communicator = self._communicator, None
        if communicator is None:
            return None

        def end() -> None:
            torch.cuda.set_device(self._device)
            try:
                function(communicator)
            except self._nccl.NCCLError as error:
                logger.warning("could not %s the communicator of %s: %s", what, self._name, error)

        return BoundedCall(end, f"nccl-{what}")

    def _failed(self, what: str, error: Exception) -> ResourceError:
        return ResourceError(
            f"NCCL could not {what} over {self._name}", got=str(error), hint="set NCCL_DEBUG=WARN for its reasons"
        )


class BoundedCall(Generic[ResultT]):
    """Runs a function on a thread of its own, and gives the thread up when the function takes too long.

    Args:
        function: What to call.
        name: The name of the thread.
    """

    def __init__(self, function: Callable[[], ResultT], name: str) -> None:
        self._function = function
        self._results: list[ResultT] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> ResultT:
        """Return what the function returned.

        Raises:
            TimeoutError: it did not return in time.
            BaseException: whatever it raised.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name} did not return within {timeout_s:.1f} s")
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # handed to whoever asks for the result
            self._error = error


def _import_nccl() -> Any:
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise ConfigError("nccl links need the package nccl4py", got=str(error), hint=install("gpu")) from error
    return nccl
