"""A communicator of NCCL: joined by all ranks, aborted from any thread, left by all.

Calls NCCL through nccl4py's bindings: its core layer inspects every tensor again, which takes longer than a transfer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from raypp.errors import ConfigError, DeadlineError, EngineDeadError, ResourceError, install
from raypp.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class Communicator:
    """One rank's. Only the constructor blocks the host.

    Args:
        name: For errors: what it joins.
        rank: Of this process.
        count: Of the ranks.
        first_index: The stage of rank 0, for an error if it does not come.
        device: Of this process, with an index.
        meeting: Where the ranks meet; the constructor waits for the others.

    Raises:
        ConfigError: nccl4py is not installed.
        DeadlineError: another rank did not come.
        ResourceError: NCCL cannot join them.
    """

    def __init__(
        self, name: str, rank: int, count: int, *, first_index: int, device: torch.device, meeting: Meeting
    ) -> None:
        self.nccl = import_nccl()
        self._name = name
        self._device = device
        self._lock = threading.Lock()  # only one thread ends it
        self._handle: Any = self._join(rank, count, first_index, meeting)

    def call(self, function: Any, *args: Any, stream: torch.cuda.Stream) -> None:
        """Enqueue an operation of NCCL on a stream.

        Raises:
            EngineDeadError: it was aborted.
            ResourceError: NCCL refuses.
        """
        handle = self._handle
        if handle is None:
            raise EngineDeadError(f"the link was aborted: {self._name}")
        try:
            function(*args, handle, stream.cuda_stream)
        except self.nccl.NCCLError as error:
            raise self._failed("transfer", error) from error

    def abort(self) -> None:
        """End the operations in progress: their kernels look at a flag that NCCL sets. Returns at once; any thread.

        Freeing what it holds may wait for the other ranks, and for kernels of other communicators (NVIDIA/nccl issue
        863, pull request 564). A thread does it, so that all can be aborted together.
        """
        self._end(self.nccl.comm_abort, "abort")

    def leave(self) -> Future[None] | None:
        """Begin to end it, which waits for the other ranks to do the same. None when it has ended before."""
        return self._end(self.nccl.comm_destroy, "leave")

    def _join(self, rank: int, count: int, first_index: int, meeting: Meeting) -> Any:
        key = f"nccl {self._name}"
        if rank == 0:
            meeting.tell(key, bytes(self.nccl.get_unique_id()).hex())
        unique_id = bytearray.fromhex(meeting.ask(key, first_index))

        def join() -> Any:
            torch.cuda.set_device(self._device)
            return self.nccl.comm_init_rank_scalable(count, rank, 1, unique_id, 0)

        timeout_s = meeting.remaining_s
        try:
            return _in_thread(join, "nccl-init").result(timeout_s)
        except TimeoutError as error:
            raise DeadlineError(
                f"no NCCL connection over {self._name}",
                got=f"nccl-init did not return within {timeout_s:.1f} s",
                hint="set NCCL_DEBUG=INFO to see how NCCL tries to connect; NCCL_SOCKET_IFNAME names the interface",
            ) from error
        except self.nccl.NCCLError as error:
            raise self._failed("connect", error) from error

    def _end(self, function: Any, what: str) -> Future[None] | None:
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return None

        def end() -> None:
            torch.cuda.set_device(self._device)
            try:
                function(handle)
            except self.nccl.NCCLError as error:
                logger.warning("could not %s the communicator of %s: %s", what, self._name, error)

        return _in_thread(end, f"nccl-{what}")

    def _failed(self, what: str, error: Exception) -> ResourceError:
        return ResourceError(
            f"NCCL could not {what} over {self._name}", got=str(error), hint="set NCCL_DEBUG=WARN for its reasons"
        )


def _in_thread(function: Callable[[], ResultT], name: str) -> Future[ResultT]:
    """Run a function on a daemon thread of its own, which nothing has to wait for."""
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def import_nccl() -> Any:
    """Return nccl4py's bindings.

    Raises:
        ConfigError: nccl4py is not installed.
    """
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise ConfigError("nccl links need the package nccl4py", got=str(error), hint=install("gpu")) from error
    return nccl
