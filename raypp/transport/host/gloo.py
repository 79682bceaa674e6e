"""An edge between two processes over gloo (TCP): the `gloo` link, mostly for stages on CPUs.

Each directed edge has a process group of its own, of two ranks: 0 sends, 1 receives. gloo closes all connections of a
group when one wait runs out, so in a shared group one slow edge would end the others. Nothing here touches torch's
default process group.

A message on its way is a Work. Keep it until it was waited for: gloo drops the message with it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work  # torch.distributed has them without types

from raypp.errors import DeadlineError, EngineDeadError, RayppError, StageDiedError
from raypp.transport.host.ring import MAX_SLOTS

logger = logging.getLogger(__name__)


class GlooDevice:
    """What all edges of a process share: one listening socket and one thread that moves the bytes.

    Args:
        host: The address of this process's own node that its neighbours can reach.
    """

    def __init__(self, host: str) -> None:
        self._device = ProcessGroupGloo.create_device(hostname=host)

    def connect(self, store: Store, rank: int, timeout_s: float, count: int = 2) -> Any:
        """Meet the other ranks over `store` and return the group of them. Waits for the others."""
        group: Any = ProcessGroupGloo  # its type declarations lack the options and point-to-point messages
        options = group._Options()
        options._devices = [self._device]
        options._threads = 1  # for collectives
        options._timeout = timedelta(seconds=timeout_s)
        return group(store, rank, count, options)


class GlooConnection:
    """One end's half of an edge; see `Connection`.

    Args:
        device: This process's.
        store: A store that the two ends of this edge share with no other edge.
        rank: 0 for the sender, 1 for the receiver.
        peer_index: The stage at the other end.
        peer_name: What the process there is called; by default that stage.
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
        peer_name: str = "",
        open_timeout_s: float,
        deadline_s: float,
    ) -> None:
        self._peer_rank, self._peer_index = 1 - rank, peer_index
        self._peer_name = peer_name or f"stage {peer_index}"
        # gloo counts milliseconds, and takes 0 for "no limit".
        self._deadline_s = max(math.ceil(deadline_s * 1000), 1) / 1000
        self._aborted = threading.Event()
        try:
            self._group: Any = device.connect(store, rank, open_timeout_s)
        except RuntimeError as error:
            raise DeadlineError(
                f"no connection to {self._peer_name}",
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
                f"{what} {self._peer_name} took too long",
                got=f"nothing within {waited_s:.1f} s",
                hint="the stage is frozen, or its steps take longer than faults.step_timeout_s",
            ) from error

    def abort(self) -> None:
        """End all waits of this edge, here and at the peer. From any thread."""
        self._aborted.set()
        group = self._group
        if group is None:
            return
        # ProcessGroupGloo.abort() does nothing. But a wait that runs out makes gloo close the group's connections, and
        # that ends all other waits. So wait one millisecond for a message that is never sent.
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], self._peer_rank, MAX_SLOTS).wait(timedelta(milliseconds=1))
        except RuntimeError:
            logger.debug("link to %s aborted", self._peer_name)

    def close(self) -> None:
        """Drop the group: gloo closes its sockets and ends its threads."""
        self._group = None

    def _open_group(self) -> Any:
        assert self._group is not None, "the link was closed"
        return self._group

    def _lost(self, what: str, error: RuntimeError) -> RayppError:
        if self._aborted.is_set():
            return EngineDeadError(f"the link was aborted while {what} {self._peer_name}")
        return StageDiedError(
            f"{self._peer_name} is gone: {what} it failed", stage_index=self._peer_index, got=str(error)
        )
