"""An edge over `ray.util.collective` with its gloo backend: the `ray_collective` link, for users who ask for it.

It is slower than `gloo`: Ray's calls block, so every edge has a thread. Ray's `send` and `recv` ignore the group that
they are given and use torch's default one. So one group holds all stages, and an abort ends all edges of its stage.

It works only inside Ray actors, and only where torch.distributed has not been initialized.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ray.util import collective
from ray.util.collective.types import Backend

from raypp.errors import ConfigError, DeadlineError, EngineDeadError, StageDiedError
from raypp.transport.host.ring import MAX_SLOTS

logger = logging.getLogger(__name__)


class CollectiveGroup:
    """The group of all stages, in this process; ends with its last connection.

    Args:
        name: The same for all stages, and for no other engine.
        stage_index: This stage.
        num_stages: Of the pipeline; the constructor waits for all of them.
        timeout_s: How long they may take to come.

    Raises:
        ConfigError: this is not a Ray actor, or torch.distributed is in use.
        DeadlineError: the stages did not come.
    """

    def __init__(self, name: str, stage_index: int, num_stages: int, timeout_s: float) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "ray_collective links need torch.distributed to be unused",
                got="an initialized default process group",
                hint="use transport=gloo",
            )
        self.name = name
        self.aborted = False
        self._num_open = 0
        try:
            collective.init_collective_group(
                num_stages, stage_index, Backend("gloo"), name, gloo_timeout=math.ceil(timeout_s * 1000)
            )
        except TimeoutError as error:
            raise DeadlineError("the stages did not form a collective group", got=str(error)) from error
        except RuntimeError as error:
            raise ConfigError("ray_collective links cannot be opened here", got=str(error)) from error

    def connect(self, peer_index: int, deadline_s: float) -> CollectiveConnection:
        """Return this end of the edge that joins this stage to another."""
        self._num_open += 1
        return CollectiveConnection(self, peer_index, deadline_s)

    def abort(self, peer_index: int) -> None:
        """End all waits of this stage's edges, by way of the connection to any other stage. From any thread."""
        self.aborted = True
        if not dist.is_initialized():
            return
        # As in gloo.py, a wait that runs out makes gloo close the group's connections.
        try:
            work = dist.irecv(torch.empty(1, dtype=torch.uint8), peer_index, tag=MAX_SLOTS)
            assert work is not None
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            logger.debug("links of group %s aborted", self.name)

    def leave(self) -> None:
        """One connection was closed; with the last one the group ends."""
        self._num_open -= 1
        if self._num_open == 0:
            collective.destroy_collective_group(self.name)
            dist.destroy_process_group()  # Ray leaves torch's default group behind


class CollectiveConnection:
    """One end's half of an edge.

    Args:
        group: Of all stages.
        peer_index: The stage at the other end.
        deadline_s: How long a message may take.
    """

    def __init__(self, group: CollectiveGroup, peer_index: int, deadline_s: float) -> None:
        self._group, self._peer_index, self._deadline_s = group, peer_index, deadline_s
        self._thread = ThreadPoolExecutor(1, f"link to stage {peer_index}")
        self._transfers: set[Future[None]] = set()
        self._closed = False

    def send(self, tensor: torch.Tensor, tag: int) -> Future[None]:
        """Begin to send. Messages of an edge keep their order; Ray has no tags."""
        return self._start(collective.send, tensor)

    def recv(self, tensor: torch.Tensor, tag: int) -> Future[None]:
        """Begin to receive."""
        return self._start(collective.recv, tensor)

    def wait(self, transfer: Future[None], what: str, deadline_s: float | None = None) -> None:
        """Wait for a transfer to end; see `Connection.wait`."""
        deadline_s = deadline_s or self._deadline_s
        try:
            transfer.result(deadline_s)
        except FutureTimeoutError as error:
            raise DeadlineError(
                f"{what} stage {self._peer_index} took too long",
                got=f"nothing within {deadline_s:.1f} s",
                hint="the stage is frozen, or its steps take longer than faults.step_timeout_s",
            ) from error
        except (RuntimeError, CancelledError) as error:
            if self._group.aborted:
                raise EngineDeadError(f"the link was aborted while {what} stage {self._peer_index}") from error
            raise StageDiedError(
                f"stage {self._peer_index} is gone: {what} it failed", stage_index=self._peer_index, got=str(error)
            ) from error

    def abort(self) -> None:
        """End all waits of this stage's edges, and of its neighbours on them. From any thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._group.abort(self._peer_index)

    def close(self) -> None:
        """End the thread, and with the last edge the group."""
        if self._closed:
            return
        self._closed = True
        if self._transfers:
            self.abort()  # what is still to be received will not be sent
        self._thread.shutdown()
        self._group.leave()

    def _start(self, function: Callable[..., Any], tensor: torch.Tensor) -> Future[None]:
        try:
            transfer = self._thread.submit(function, tensor, self._peer_index, self._group.name)
        except RuntimeError as error:
            raise EngineDeadError(f"the link to stage {self._peer_index} was aborted") from error
        self._transfers.add(transfer)
        transfer.add_done_callback(self._transfers.discard)
        return transfer
