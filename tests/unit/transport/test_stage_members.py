"""The contract of a stage's members: over gloo, in threads, and over NCCL with a stand-in for it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from raypp.errors import DeadlineError, EngineDeadError, RayppError
from raypp.transport.host.host_members import GlooMembers, thread_members
from raypp.transport.nccl import communicator, nccl_members
from raypp.transport.nccl.nccl_members import NcclMembers
from raypp.transport.rendezvous import Meeting, RendezvousServer

COUNT = 3
DEADLINE_S = 20.0


class FakeNccl:
    """Adds and joins in host memory; all ranks of an operation meet twice."""

    class NCCLError(Exception):
        """Its error."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(COUNT, timeout=DEADLINE_S)
        self._parts: dict[int, torch.Tensor] = {}
        self._total: torch.Tensor | None = None

    def get_unique_id(self) -> bytes:
        return bytes(128)

    def comm_init_rank_scalable(self, count: int, rank: int, num_ids: int, ids: bytearray, config: int) -> int:
        assert (count, num_ids, len(ids), config) == (COUNT, 1, 128, 0)
        return rank

    def all_reduce(self, source: int, to: int, count: int, kind: int, op: int, rank: int, stream: int) -> None:
        assert (kind, op) == (7, 0)
        parts = self._meet(rank, source, count)
        total = parts[0] + parts[1] + parts[2]
        self._barrier.wait()
        self._write(to, total)

    def all_gather(self, source: int, to: int, count: int, kind: int, rank: int, stream: int) -> None:
        whole = torch.cat(self._meet(rank, source, count))
        self._barrier.wait()
        self._write(to, whole)

    def comm_destroy(self, rank: int) -> None:
        pass

    comm_abort = comm_destroy

    def _meet(self, rank: int, source: int, count: int) -> list[torch.Tensor]:
        values = (ctypes.c_float * count).from_address(source)
        self._parts[rank] = torch.tensor(list(values))
        self._barrier.wait()
        return [self._parts[each] for each in range(COUNT)]

    def _write(self, to: int, values: torch.Tensor) -> None:
        ctypes.memmove(to, values.data_ptr(), values.nbytes)


class _FakeStream:
    cuda_stream = 7


class _FakeCurrentStream:
    def __init__(self, device: torch.device) -> None:
        pass

    def get(self) -> _FakeStream:
        return _FakeStream()


@pytest.fixture(params=["threads", "gloo", "nccl"])
def members(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    if request.param == "threads":
        yield list(thread_members(COUNT, DEADLINE_S))
        return
    made: list[Any] = [GlooMembers(1, rank, COUNT) for rank in range(COUNT)]
    if request.param == "nccl":
        fake = FakeNccl()
        monkeypatch.setattr(communicator, "import_nccl", lambda: fake)
        monkeypatch.setattr(nccl_members, "CurrentStream", _FakeCurrentStream)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        made = [NcclMembers(each, 1, torch.device("cuda", each.rank)) for each in made]
    server = RendezvousServer()
    open_all(made, server)
    yield made
    for each in made:
        each.close()
    server.close()


def open_all(members: list[Any], server: RendezvousServer, prefix: str = "members/") -> None:
    def open_one(each: Any) -> None:
        each.open(Meeting(server.address, DEADLINE_S, prefix), own_host="127.0.0.1", deadline_s=DEADLINE_S)

    by_all(members, open_one)


def by_all(members: list[Any], function: Callable[[Any], Any]) -> list[Any]:
    """Return what a function returns of each member, called at the same time."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(function, members))


def test_sums_have_the_same_bits_everywhere(members):
    parts = [torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)) for rank in range(COUNT)]
    sums = by_all(members, lambda each: each.sum_(parts[each.rank].clone()))
    for found in sums:
        assert torch.equal(found, parts[0] + parts[1] + parts[2])


def test_an_empty_tensor_has_an_empty_sum(members):
    assert [len(found) for found in by_all(members, lambda each: each.sum_(torch.zeros(0, 4)))] == [0] * COUNT


def test_tensors_are_gathered_by_rank(members):
    expected = torch.stack([torch.full((2, 3), float(rank)) for rank in range(COUNT)])
    for found in by_all(members, lambda each: each.gathered(torch.full((3, 2), float(each.rank)).T)):
        assert torch.equal(found, expected)


def test_tensors_are_gathered_where_they_are_wanted(members):
    wanted = [torch.zeros(COUNT, 4) for _ in range(COUNT)]
    parts = [torch.full((4,), float(rank)) for rank in range(COUNT)]
    by_all(members, lambda each: each.gathered(parts[each.rank], out=wanted[each.rank]))
    for found in wanted:
        assert torch.equal(found, torch.stack(parts))


@pytest.mark.parametrize("members", ["nccl"], indirect=True)  # on CPUs nothing is tried before the first step
def test_while_a_stage_is_built_each_is_alone_but_where_a_graph_is_captured(members, monkeypatch):
    is_capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    with members[0].building():
        assert members[0].sum_(torch.ones(2)).tolist() == [1.0, 1.0]  # and does not wait
        assert members[0].gathered(torch.ones(2, 3)).shape == (3, 2, 3)
        assert members[0].is_alone
    with members[0].building():
        is_capturing[0] = True
        sums = by_all(members, lambda each: each.sum_(torch.ones(2)).tolist())
    assert sums == by_all(members, lambda each: each.sum_(torch.ones(2)).tolist()) == [[3.0, 3.0]] * COUNT


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_the_first_one_decides(members, size):
    made = torch.arange(size, dtype=torch.int32)

    def ask(each: Any) -> torch.Tensor:
        return each.from_first(lambda: made if each.rank == 0 else pytest.fail("not the first one"))

    assert all(torch.equal(found, made) for found in by_all(members, ask))


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_abort_ends_a_wait(kind):
    made: list[Any] = list(thread_members(2, DEADLINE_S))
    server = RendezvousServer()
    if kind == "gloo":
        made = [GlooMembers(0, rank, 2) for rank in range(2)]
        open_all(made, server)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made[0].sum_, torch.zeros(3))
        begun_s = time.monotonic()
        while not waiting.running():
            assert time.monotonic() - begun_s < DEADLINE_S
        made[0].abort()
        with pytest.raises(RayppError) as raised:
            waiting.result(DEADLINE_S)
    assert isinstance(raised.value, EngineDeadError)
    assert time.monotonic() - begun_s < DEADLINE_S / 2
    server.close()


def test_members_over_gloo_meet_again():
    made, server = [GlooMembers(0, rank, 2) for rank in range(2)], RendezvousServer()
    for life in range(2):
        open_all(made, server, f"life {life}/")
        assert by_all(made, lambda each: each.sum_(torch.ones(1)).item()) == [2.0, 2.0]
        made[0].abort()
        for each in made:
            each.close()
    server.close()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_member_that_does_not_come_is_an_error(kind):
    made: list[Any] = list(thread_members(2, 0.2))
    server = RendezvousServer()
    if kind == "gloo":
        made = [GlooMembers(0, rank, 2) for rank in range(2)]

        def open_one(each: Any) -> None:
            each.open(Meeting(server.address, DEADLINE_S), own_host="127.0.0.1", deadline_s=0.2)

        by_all(made, open_one)
    with pytest.raises(DeadlineError):
        made[0].sum_(torch.zeros(3))
    server.close()


def test_a_late_member_is_waited_for_as_long_as_an_operation_may_take():
    """However little time was left when they met."""
    made, server, at_work = [GlooMembers(0, rank, 2) for rank in range(2)], RendezvousServer(), threading.Event()

    def open_one(each: GlooMembers) -> None:
        each.open(Meeting(server.address, 1.0), own_host="127.0.0.1", deadline_s=DEADLINE_S)

    def add(each: GlooMembers) -> float:
        if each.rank:
            at_work.wait(1.5)  # longer than the meeting had; nothing sets it
        return each.sum_(torch.ones(1)).item()

    by_all(made, open_one)
    assert by_all(made, add) == [2.0, 2.0]
    server.close()
