"""Members over gloo: sums, waits that are ended, members that die or freeze, and meeting again."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from raypp.errors import DeadlineError, EngineDeadError, RayppError, StageDiedError
from raypp.transport.host.host_members import GlooMembers
from raypp.transport.open import make_members, open_members
from raypp.transport.rendezvous import Rendezvous, RendezvousServer

WAIT_S = 20.0
SOON_S = 1.0
COUNT = 3


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(COUNT) as pool:
        yield pool


def _make(count: int = COUNT) -> list[GlooMembers]:
    made = [make_members(1, rank, count, torch.device("cpu")) for rank in range(count)]
    return [one for one in made if isinstance(one, GlooMembers)]


def _open(one: GlooMembers, at: Rendezvous, deadline_s: float) -> None:
    open_members(one, 1, at, own_host="127.0.0.1", open_timeout_s=WAIT_S, deadline_s=deadline_s)


def _meet(members: list[GlooMembers], pool: ThreadPoolExecutor, deadline_s: float = WAIT_S) -> None:
    server = RendezvousServer()
    for opening in [pool.submit(_open, one, server.address, deadline_s) for one in members]:
        opening.result(WAIT_S)
    server.close()


def _all(members: list[GlooMembers], pool: ThreadPoolExecutor, call: Callable[[GlooMembers], torch.Tensor]) -> list:
    return [each.result(WAIT_S) for each in [pool.submit(call, one) for one in members]]


def _check_sums(members: list[GlooMembers], pool: ThreadPoolExecutor) -> None:
    parts = torch.randn(len(members), 5, 7)
    sums = _all(members, pool, lambda one: one.sum_(parts[one.rank].clone()))
    assert all(torch.equal(each, sums[0]) for each in sums), "bits are the same on all members"
    torch.testing.assert_close(sums[0], parts.sum(0))
    gathered = _all(members, pool, lambda one: one.gathered(parts[one.rank]))
    assert all(torch.equal(each, torch.stack(list(parts))) for each in gathered)
    of_first = _all(members, pool, lambda one: one.from_first(lambda: torch.arange(4 + one.rank, dtype=torch.int32)))
    assert [each.tolist() for each in of_first] == [[0, 1, 2, 3]] * len(members)


def _end_of(pending: Future[torch.Tensor], within_s: float) -> RayppError:
    error = pending.exception(within_s)
    assert isinstance(error, RayppError), error
    return error


def test_an_abort_ends_waits_and_members_meet_again(pool: ThreadPoolExecutor) -> None:
    members = _make()
    for aborted in range(COUNT):
        _meet(members, pool)
        _check_sums(members, pool)
        waiting = [pool.submit(one.sum_, torch.ones(2, 2)) for one in members if one.rank != aborted]
        with pytest.raises(TimeoutError):
            waiting[0].result(0.05)
        began_s = time.monotonic()
        members[aborted].abort()
        errors = [_end_of(each, SOON_S) for each in waiting]
        assert time.monotonic() - began_s < SOON_S
        assert all(isinstance(error, StageDiedError) for error in errors), errors
        with pytest.raises(EngineDeadError, match="aborted"):
            members[aborted].sum_(torch.ones(2, 2))
        for one in members:
            one.close()


def test_an_abort_ends_the_own_wait(pool: ThreadPoolExecutor) -> None:
    members = _make()
    _meet(members, pool)
    waiting = pool.submit(members[0].sum_, torch.ones(2, 2))
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    members[0].abort()
    error = _end_of(waiting, SOON_S)
    assert type(error) is EngineDeadError
    for one in members:
        one.close()


def test_an_abort_ends_waits_for_one_that_stands_still_beside_one_that_is_gone(pool: ThreadPoolExecutor) -> None:
    members = _make()
    _meet(members, pool)
    members[1].close()  # it is gone
    waiting = pool.submit(members[0]._wait, lambda group: group.recv([torch.ones(1)], 2, 7))
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    members[0].abort()
    assert type(_end_of(waiting, SOON_S)) is EngineDeadError
    _close(members[:1])
    members[2].close()


def test_one_that_does_not_come_is_noticed_and_close_does_not_wait(pool: ThreadPoolExecutor) -> None:
    members = _make()
    _meet(members, pool, deadline_s=0.3)
    waiting = [pool.submit(one.sum_, torch.ones(2, 2)) for one in members[:2]]
    errors = [_end_of(each, 0.3 + SOON_S) for each in waiting]
    assert any(isinstance(error, DeadlineError) for error in errors), errors
    assert all("stage 1" in str(error) for error in errors)
    _close(members[:2])
    members[2].close()


def test_nothing_is_left_of_meetings(pool: ThreadPoolExecutor, request: pytest.FixtureRequest) -> None:
    members = _make()

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def live() -> None:
        _meet(members, pool)
        _check_sums(members, pool)
        waiting = [pool.submit(one.sum_, torch.ones(2, 2)) for one in members[:2]]
        with pytest.raises(TimeoutError):
            waiting[0].result(0.02)
        for one in members:
            one.abort()
        for each in waiting:
            _end_of(each, SOON_S)
        for one in members:
            one.close()

    live()
    before = counts()
    gc.disable()  # an error that refers to itself would keep a group, which a stage's collector may leave alone
    request.addfinalizer(gc.enable)
    for _ in range(5):
        live()
    ends = time.monotonic() + WAIT_S
    while (now := counts()) > before and time.monotonic() < ends:  # threads of torch's store end a moment later
        threading.Event().wait(0.01)
    assert now <= before, "files and threads"


def _close(members: list[GlooMembers]) -> None:
    """Close some, at once: none of their threads waits for the others any more."""
    began_s = time.monotonic()
    for one in members:
        one.close()
    assert time.monotonic() - began_s < SOON_S


MEMBER = """
import sys, torch
from raypp.transport.open import make_members, open_members
from raypp.transport.rendezvous import Rendezvous
rank, count, port = map(int, sys.argv[1:])
members = make_members(1, rank, count, torch.device("cpu"))
open_members(members, 1, Rendezvous("127.0.0.1", port), own_host="127.0.0.1", open_timeout_s=20.0, deadline_s=20.0)
members.sum_(torch.ones(2, 2))
print("met", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("number", "deadline_s"), [(signal.SIGKILL, WAIT_S), (signal.SIGSTOP, 1.0)])
def test_a_process_that_dies_or_freezes_ends_the_others_waits(
    number: int, deadline_s: float, pool: ThreadPoolExecutor
) -> None:
    members, server = _make(), RendezvousServer()
    last = COUNT - 1
    command = [sys.executable, "-c", MEMBER, str(last), str(COUNT), str(server.address.port)]
    path = os.pathsep.join([str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    ) as process:
        try:
            for opening in [pool.submit(_open, one, server.address, deadline_s) for one in members[:last]]:
                opening.result(WAIT_S)
            for each in [pool.submit(one.sum_, torch.ones(2, 2)) for one in members[:last]]:
                assert each.result(WAIT_S).tolist() == [[COUNT] * 2] * 2
            assert process.stdout is not None
            assert process.stdout.readline() == b"met\n"
            waiting = [pool.submit(one.sum_, torch.ones(2, 2)) for one in members[:last]]
            process.send_signal(number)
            errors = [_end_of(each, SOON_S + (deadline_s if number == signal.SIGSTOP else 0.0)) for each in waiting]
            _close(members[:last])  # before a process that is stopped has gone
        finally:
            process.kill()
    kind = StageDiedError if number == signal.SIGKILL else DeadlineError
    assert any(isinstance(error, kind) for error in errors), errors
    assert all("stage 1" in str(error) for error in errors)
    server.close()
