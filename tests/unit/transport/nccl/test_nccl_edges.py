"""Opening, using and leaving `nccl` edges, with stand-ins for NCCL and for CUDA's streams.

The stand-in leaves a communicator as NCCL does: only together with the other rank.
"""

from __future__ import annotations

import ctypes
import gc
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Any

import pytest
import torch

from raypp.errors import DeadlineError, EngineDeadError, ResourceError
from raypp.transport.edges import edges_at, pipeline_edges
from raypp.transport.nccl import communicator, nccl_ends
from raypp.transport.nccl.nccl_ends import NcclEdges
from raypp.transport.rendezvous import Meeting, RendezvousServer

DEADLINE_S = 20.0
CPU = torch.device("cpu")


class FakeStream:
    cuda_stream = 7

    def __init__(self, device: object = None) -> None:
        self.is_done = True

    def wait_event(self, event: object) -> None:
        pass

    def query(self) -> bool:
        return self.is_done


class FakeEvent:
    def record(self, stream: object) -> None:
        pass


class FakeCurrentStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = FakeStream()

    def get(self) -> FakeStream:
        return self._stream


class FakeCommunicator:
    """What both ranks of one unique id share."""

    def __init__(self) -> None:
        self.messages: queue.Queue[bytes] = queue.Queue()
        self.joined = threading.Barrier(2)
        self.left = threading.Barrier(2)


class FakeNccl:
    """The part of nccl4py's bindings that is used."""

    class NCCLError(Exception):
        """Its error."""

    class DataType(IntEnum):
        Uint8 = 1

    def __init__(self) -> None:
        self._communicators: dict[bytes, FakeCommunicator] = {}
        self._lock = threading.Lock()
        self._num_ids = 0
        self.ended: list[str] = []

    def get_unique_id(self) -> bytes:
        with self._lock:
            self._num_ids += 1
            return self._num_ids.to_bytes(128, "little")

    def comm_init_rank_scalable(
        self, num_ranks: int, rank: int, num_ids: int, ids: bytearray, config: int
    ) -> FakeCommunicator:
        assert (num_ranks, num_ids, len(ids), config) == (2, 1, 128, 0)
        with self._lock:
            communicator = self._communicators.setdefault(bytes(ids), FakeCommunicator())
        communicator.joined.wait(DEADLINE_S)
        return communicator

    def send(self, address: int, count: int, kind: int, peer: int, communicator: Any, stream: int) -> None:
        assert (kind, peer, stream) == (1, 1, 7)
        communicator.messages.put(ctypes.string_at(address, count))

    def recv(self, address: int, count: int, kind: int, peer: int, communicator: Any, stream: int) -> None:
        assert (kind, peer, stream) == (1, 0, 7)
        message = communicator.messages.get(timeout=DEADLINE_S)
        if len(message) != count:
            raise self.NCCLError("sizes differ")
        ctypes.memmove(address, message, count)

    def comm_destroy(self, communicator: FakeCommunicator) -> None:
        communicator.left.wait(DEADLINE_S)
        self.ended.append("left")

    def comm_abort(self, communicator: FakeCommunicator) -> None:
        self.ended.append("aborted")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    fake = FakeNccl()
    monkeypatch.setattr(communicator, "import_nccl", lambda: fake)
    monkeypatch.setattr(nccl_ends, "CurrentStream", FakeCurrentStream)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    return fake


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer()
    yield server
    server.close()


def open_stages(server: RendezvousServer, num_stages: int) -> list[NcclEdges]:
    edges = pipeline_edges(num_stages, [1024] * (num_stages - 1), 64)

    def open_stage(index: int) -> NcclEdges:
        return NcclEdges(index, edges_at(index, edges), CPU, Meeting(server.address, DEADLINE_S))

    with ThreadPoolExecutor(num_stages) as pool:
        return list(pool.map(open_stage, range(num_stages)))


def close_as_a_stage_does(stage: NcclEdges) -> float:
    """Close a stage's ends, senders first; return the seconds that it took."""
    started = time.monotonic()
    for end in (*stage.ends.senders.values(), *stage.ends.receivers.values()):
        end.close()
    return time.monotonic() - started


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_that_close_in_crossed_order_do_not_wait_for_each_other(
    nccl: FakeNccl, server: RendezvousServer, num_stages: int
) -> None:
    stages = open_stages(server, num_stages)
    with ThreadPoolExecutor(num_stages) as pool:
        seconds = list(pool.map(close_as_a_stage_does, stages))
    assert nccl.ended == ["left"] * 2 * num_stages
    assert max(seconds) < nccl_ends._CLOSE_TIMEOUT_S


def test_what_was_closed_keeps_no_memory(nccl: FakeNccl, server: RendezvousServer) -> None:
    stages = open_stages(server, 2)
    slots = [weakref.ref(stage.ends.senders[name].slots) for stage in stages for name in stage.ends.senders]
    gc.disable()  # a cycle of references would keep the slots until the collector comes, of which GPUs know nothing
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(close_as_a_stage_does, stages))
        del stages
        assert [kept() for kept in slots] == [None, None]
    finally:
        gc.enable()


def test_messages_and_their_sizes(nccl: FakeNccl, server: RendezvousServer) -> None:
    first, second = open_stages(server, 2)
    sender, receiver = first.ends.senders["forward 0"], second.ends.receivers["forward 0"]
    for step_id in range(10):
        num_bytes = 0 if step_id == 4 else step_id * 100 + 1
        sender.acquire(step_id)[:num_bytes] = step_id + 1
        sender.send(step_id, num_bytes)
        receiver.post_recv(step_id, num_bytes)
        assert receiver.wait(step_id)[:num_bytes].tolist() == [step_id + 1] * num_bytes
        receiver.release(step_id)
    sender.acquire(10)
    sender.send(10, 8)
    receiver.post_recv(10, 9)
    with pytest.raises(ResourceError, match="NCCL could not transfer over forward 0"):
        receiver.wait(10)


def test_a_neighbour_that_does_not_leave_costs_the_deadline_and_no_more(
    nccl: FakeNccl, server: RendezvousServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl_ends, "_CLOSE_TIMEOUT_S", 0.3)
    first, second = open_stages(server, 2)
    assert close_as_a_stage_does(first) < DEADLINE_S / 2
    assert "did not leave" in caplog.text
    close_as_a_stage_does(second)


def test_transfers_in_progress_at_close_are_aborted(
    nccl: FakeNccl, server: RendezvousServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl_ends, "_CLOSE_TIMEOUT_S", 0.2)
    first, _ = open_stages(server, 2)
    for channel in first._channels:
        channel._stream.is_done = False  # type: ignore[attr-defined]
    close_as_a_stage_does(first)
    assert caplog.text.count("transfers in progress") == 2


def test_abort_ends_both_edges_and_only_once(nccl: FakeNccl, server: RendezvousServer) -> None:
    first, _ = open_stages(server, 2)
    for _ in range(2):
        for end in (*first.ends.senders.values(), *first.ends.receivers.values()):
            end.abort()
    ends = time.monotonic() + DEADLINE_S
    while len(nccl.ended) < 2 and time.monotonic() < ends:
        time.sleep(0.01)
    assert nccl.ended == ["aborted"] * 2
    with pytest.raises(EngineDeadError):
        first.ends.senders["forward 0"].acquire(0)
    close_as_a_stage_does(first)
    assert nccl.ended == ["aborted"] * 2, "an aborted communicator is not left"


def test_a_peer_that_never_joins_is_a_deadline_error(nccl: FakeNccl, server: RendezvousServer) -> None:
    edges = pipeline_edges(2, [1024], 64)
    with pytest.raises(DeadlineError, match="no NCCL connection over forward 0 between stages 0 and 1"):
        NcclEdges(0, edges, CPU, Meeting(server.address, 0.3))
