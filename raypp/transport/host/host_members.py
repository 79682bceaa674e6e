"""The members of a stage on CPUs: as processes, over gloo, or as threads of one process, for tests.

See `raypp.members.Members`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (  # torch.distributed has them without types
    AllgatherOptions,
    BroadcastOptions,
    Work,
)

from raypp.errors import DeadlineError, EngineDeadError, RayppError, StageDiedError
from raypp.transport.host.gloo import GlooDevice
from raypp.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)
_NEVER_SENT = 1 << 20  # a tag


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, in their order."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


class _Table:
    """Where the threads meet: a place for each one's tensor, and what the last one to come makes of all."""

    def __init__(self, count: int, deadline_s: float, turn: threading.Condition | None) -> None:
        self.places: list[Any] = [None] * count
        self._turn = turn or threading.Condition()
        self._deadline_s = deadline_s
        self._num_here = self._num_meetings = 0
        self._result: Any = None
        self._is_aborted = self._is_late = False

    def meet(self, rank: int, own: Any, compute: Callable[[list[Any]], torch.Tensor]) -> torch.Tensor:
        """Leave a tensor, wait for all, and return what is made of them; all share it, and none may change it."""
        with self._turn:
            self._check()
            self.places[rank], meeting = own, self._num_meetings
            self._num_here += 1
            if self._num_here == len(self.places):
                self._result = compute(self.places)
                self._num_here, self._num_meetings = 0, meeting + 1
                self._turn.notify_all()
            elif not self._turn.wait_for(lambda: self._num_meetings > meeting or self._has_failed, self._deadline_s):
                self._is_late = True
                self._turn.notify_all()
            if self._num_meetings == meeting:
                self._check()
            result: torch.Tensor = self._result  # the next meeting makes another, and this thread comes to it first
            return result

    def abort(self) -> None:
        with self._turn:
            self._is_aborted = True
            self._turn.notify_all()

    @property
    def _has_failed(self) -> bool:
        return self._is_aborted or self._is_late

    def _check(self) -> None:
        if self._is_aborted:
            raise EngineDeadError("the stage's members were aborted while one waited for the others")
        if self._is_late:
            raise DeadlineError("a member of the stage did not come", got=f"nothing within {self._deadline_s:g} s")


class ThreadMembers:
    """One thread's."""

    memory = None
    is_alone = False

    def __init__(self, table: _Table, rank: int) -> None:
        self._table = table
        self.rank = rank
        self.count = len(table.places)

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._table.meet(self.rank, x, in_order))

    def gathered(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        parts = self._table.meet(self.rank, x, torch.stack)
        return parts.clone() if out is None else out.copy_(parts)

    def from_first(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        made = make() if self.rank == 0 else None
        return self._table.meet(self.rank, made, lambda parts: parts[0].clone()).clone()

    def abort(self) -> None:
        self._table.abort()

    def close(self) -> None:
        """Do nothing: nothing is held."""


def thread_members(count: int, deadline_s: float, turn: threading.Condition | None = None) -> list[ThreadMembers]:
    """Return the members of a stage, by rank; each is one thread's.

    Args:
        count: Of the members.
        deadline_s: How long one waits for the others.
        turn: A thread that holds it lets others have it while it waits for them.
    """
    table = _Table(count, deadline_s, turn)
    return [ThreadMembers(table, rank) for rank in range(count)]


class GlooMembers:
    """One process's. It is made before the members meet, and they may meet again: weights refer to it.

    Args:
        stage_index: Theirs.
        rank: This process's.
        count: Of the members.
    """

    memory = None
    is_alone = False

    def __init__(self, stage_index: int, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._stage_index = stage_index
        self._group: Any = None
        self._deadline_s = 0.0
        self._aborted = threading.Event()

    def open(self, meeting: Meeting, *, own_host: str, deadline_s: float) -> None:
        """Meet the other members, and wait for them.

        Args:
            meeting: Of these members alone.
            own_host: An address of this node.
            deadline_s: How long an operation may take.

        Raises:
            DeadlineError: one did not come.
        """
        self._deadline_s = deadline_s
        self._aborted.clear()
        timeout_s = meeting.remaining_s
        try:
            self._group = GlooDevice(own_host).connect(meeting.store, self.rank, timeout_s, self.count)
        except RuntimeError as error:
            raise DeadlineError(
                f"the members of stage {self._stage_index} did not meet",
                got=str(error),
                expected=f"a connection of all {self.count} within {timeout_s:.1f} s",
                hint="they run on one node, and reach each other over TCP",
            ) from error

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(in_order(self._all_gather(x, x.new_empty(self.count, *x.shape))))

    def gathered(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        parts = x.new_empty(self.count, *x.shape) if out is None else out
        self._all_gather(x, parts)
        return parts

    def from_first(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        made = make() if self.rank == 0 else None
        size = torch.tensor([0 if made is None else len(made)])
        self._wait(lambda group: group.broadcast([size], self._options(BroadcastOptions())))
        found = torch.empty(int(size), dtype=torch.int32) if made is None else made
        self._wait(lambda group: group.broadcast([found], self._options(BroadcastOptions())))
        return found

    def building(self) -> AbstractContextManager[None]:
        """Return nothing special: on CPUs, nothing is tried before the first step."""
        return nullcontext()

    def abort(self) -> None:
        self._aborted.set()
        if (group := self._group) is not None:
            self._break_off(group)

    def close(self) -> None:
        self._group = None

    def _all_gather(self, x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        parts = list(out.unbind())
        self._wait(lambda group: group.allgather([parts], [x.contiguous()], self._options(AllgatherOptions())))
        return parts

    def _options(self, options: Any) -> Any:
        """Return options of an operation, with its own time: without, the group's is that of meeting."""
        options.timeout = timedelta(seconds=self._deadline_s)
        return options

    def _break_off(self, group: Any) -> None:
        """Close all connections, as an edge over gloo does: a wait that runs out closes them.

        A wait for a peer that is gone fails at once and closes nothing else, so each peer is waited for.
        """
        for peer in range(self.count):
            if peer == self.rank:
                continue
            try:
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
            except RuntimeError:
                logger.debug("member %d of stage %d has left member %d", self.rank, self._stage_index, peer)

    def _wait(self, begin: Callable[[Any], Work]) -> None:
        group, started = self._group, time.monotonic()
        if group is None or self._aborted.is_set():
            raise EngineDeadError(f"the members of stage {self._stage_index} were aborted")
        try:
            begin(group).wait(timedelta(seconds=self._deadline_s))
        except RuntimeError as error:
            waited_s = time.monotonic() - started
            self._break_off(group)  # those that wait for this one need not wait for its process to end
            raise self._failure(waited_s, error) from error

    def _failure(self, waited_s: float, error: RuntimeError) -> RayppError:
        if self._aborted.is_set():
            return EngineDeadError(f"the members of stage {self._stage_index} were aborted")
        if waited_s >= self._deadline_s:
            return DeadlineError(
                f"a member of stage {self._stage_index} did not answer the others",
                got=f"nothing within {waited_s:.1f} s",
                hint="it is frozen, or its steps take longer than faults.step_timeout_s",
            )
        return StageDiedError(
            f"a member of stage {self._stage_index} is gone", stage_index=self._stage_index, got=str(error)
        )
