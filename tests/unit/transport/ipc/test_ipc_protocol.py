"""The protocol of `ipc` links, on streams that are threads: the GPU runs the same code with CUDA's streams."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from fake_stream_device import FakeMemory, FakeStreamDevice
from link_harness import DEADLINE_S, content_of, sizes_of

from raypp.errors import EngineDeadError
from raypp.transport.edges import Edge, EdgeEnds, edges_at, pipeline_edges
from raypp.transport.ipc.ipc_ends import IpcReceiver, IpcSender
from raypp.transport.ipc.region import IpcRegion, RegionLayout
from raypp.transport.rendezvous import Meeting, RendezvousServer

SLOT_BYTES = 4096


@dataclass
class FakeStage:
    device: FakeStreamDevice
    region: IpcRegion
    ends: EdgeEnds

    def send(self, edge: str, step_id: int, num_bytes: int) -> None:
        sender = self.ends.senders[edge]
        slot = sender.acquire(step_id)
        self.device.run(lambda: slot[:num_bytes].copy_(content_of(step_id, num_bytes)))
        sender.send(step_id, num_bytes)

    def receive(self, edge: str, step_id: int, num_bytes: int, pause_s: float = 0.0) -> None:
        receiver = self.ends.receivers[edge]
        receiver.post_recv(step_id, num_bytes)
        slot = receiver.wait(step_id)

        def check() -> None:
            time.sleep(pause_s)
            assert torch.equal(slot[:num_bytes], content_of(step_id, num_bytes)), f"step {step_id}"

        self.device.run(check)
        receiver.release(step_id)

    def finish(self) -> None:
        assert self.device.drain(DEADLINE_S), "the stream hangs"
        assert not self.device.errors, self.device.errors

    def close(self) -> None:
        for end in (*self.ends.senders.values(), *self.ends.receivers.values()):
            end.close()
        self.device.close()


class FakeStages:
    """Stages of one process, each with a device of its own."""

    def __init__(self) -> None:
        self.memory = FakeMemory()
        self._server = RendezvousServer()
        self._open: list[FakeStage] = []

    def open(self, num_stages: int, edges: list[Edge]) -> list[FakeStage]:
        def open_stage(index: int) -> FakeStage:
            device = FakeStreamDevice(self.memory)
            region = IpcRegion(device, index, edges, Meeting(self._server.address, DEADLINE_S))
            return FakeStage(device, region, region.ends())

        with ThreadPoolExecutor(num_stages) as pool:
            self._open = list(pool.map(open_stage, range(num_stages)))
        return self._open

    def close(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(FakeStage.close, self._open))
        self._server.close()


@pytest.fixture
def stages() -> Iterator[FakeStages]:
    stages = FakeStages()
    yield stages
    stages.close()
    assert not stages.memory.allocations, "memory was left behind"
    assert not stages.memory.mapped
    assert not stages.memory.freed_while_mapped


def one_edge(num_slots: int = 3) -> list[Edge]:
    return [Edge("edge", 0, 1, num_slots, SLOT_BYTES)]


@pytest.mark.parametrize("first", [0, (1 << 32) - 20], ids=["from 0", "past 32 bits"])
@pytest.mark.parametrize(("send_pause", "receive_pause"), [(0.0, 0.0), (0.002, 0.0), (0.0, 0.002)])
def test_messages_arrive_whole_and_in_order(
    stages: FakeStages, first: int, send_pause: float, receive_pause: float
) -> None:
    sender, receiver = stages.open(2, one_edge())
    sizes = sizes_of(60, SLOT_BYTES)
    if first:  # as if all steps before had passed
        for stage in (sender, receiver):
            for end in (*stage.ends.senders.values(), *stage.ends.receivers.values()):
                assert isinstance(end, IpcSender | IpcReceiver)
                for flag in (end._memory.published, end._memory.released):
                    stage.device.force(flag, (first - 1) % (1 << 32))
    started = time.monotonic()
    for step_id, num_bytes in enumerate(sizes, first):
        if send_pause:
            sender.device.run(lambda: time.sleep(send_pause))
        sender.send("edge", step_id, num_bytes)
        receiver.receive("edge", step_id, num_bytes, receive_pause)
    assert time.monotonic() - started < DEADLINE_S / 2, "a call waited for the other end"
    sender.finish()
    receiver.finish()


def test_a_receiver_that_comes_late_finds_all_that_fits_and_the_rest_follows(stages: FakeStages) -> None:
    sender, receiver = stages.open(2, one_edge(num_slots=4))
    for step_id in range(20):
        sender.send("edge", step_id, 100)
    assert not sender.device.drain(0.05), "the sender's stream has to wait for slots"
    for step_id in range(20):
        receiver.receive("edge", step_id, 100)
    sender.finish()
    receiver.finish()


def test_a_ring_of_three_with_its_reverse_edge_full_does_not_deadlock(stages: FakeStages) -> None:
    """Stage 0 takes feedback only when the last stage has filled every slot of it, and late then."""
    edges = pipeline_edges(3, [SLOT_BYTES] * 2, 64)
    opened = stages.open(3, edges)
    ring = edges[-1].num_slots
    for step_id in range(40):
        if step_id == ring:
            time.sleep(0.1)
        if step_id >= ring:
            opened[0].receive("feedback", step_id - ring, 16)
        opened[0].send("forward 0", step_id, 100)
        opened[1].receive("forward 0", step_id, 100)
        opened[1].send("forward 1", step_id, 200)
        opened[2].receive("forward 1", step_id, 200)
        opened[2].send("feedback", step_id, 16)
    for step_id in range(40 - ring, 40):
        opened[0].receive("feedback", step_id, 16)
    for stage in opened:
        stage.finish()


@pytest.mark.parametrize("aborting", [0, 1], ids=["sender", "receiver"])
def test_abort_lets_go_of_both_streams_whatever_they_hold(stages: FakeStages, aborting: int) -> None:
    opened = stages.open(2, one_edge())
    sender, receiver = opened
    # The sender waits for slots, with many writes still to come; the receiver for a message that never comes.
    for step_id in range(20):
        sender.send("edge", step_id, 8)
    for step_id in range(3):
        receiver.receive("edge", step_id, 8)
    receiver.ends.receivers["edge"].post_recv(40, 8)
    receiver.ends.receivers["edge"].wait(40)
    ends = [sender.ends.senders["edge"], receiver.ends.receivers["edge"]]
    aborter = threading.Thread(target=ends[aborting].abort)
    aborter.start()
    aborter.join()
    assert sender.device.drain(DEADLINE_S)
    assert receiver.device.drain(DEADLINE_S)
    with pytest.raises(EngineDeadError, match="aborted"):
        ends[0].acquire(20) if aborting == 0 else ends[1].wait(41)  # type: ignore[union-attr]
    ends[aborting].abort()


def test_memory_is_freed_only_when_the_neighbour_has_unmapped_it(stages: FakeStages) -> None:
    sender, receiver = stages.open(2, one_edge())
    closing = ThreadPoolExecutor(1).submit(receiver.close)
    time.sleep(0.1)
    assert not closing.done()
    assert len(stages.memory.allocations) == 2
    sender.close()
    closing.result(DEADLINE_S)


def test_a_neighbour_that_never_closes_costs_memory_but_no_hang(caplog: pytest.LogCaptureFixture) -> None:
    stages = FakeStages()
    sender, receiver = stages.open(2, one_edge())
    sender.region.close(0.2)
    assert "still use the link memory" in caplog.text
    assert len(stages.memory.allocations) == 2, "memory that a neighbour may use was freed"
    receiver.close()


def test_work_that_hangs_at_close_keeps_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    stages = FakeStages()
    _, receiver = stages.open(2, one_edge())
    receiver.ends.receivers["edge"].wait(0)
    receiver.region.close(0.2)
    assert "work in flight" in caplog.text
    assert len(stages.memory.allocations) == 2
    receiver.ends.receivers["edge"].abort()


def test_misuse_is_caught(stages: FakeStages) -> None:
    sender, receiver = stages.open(2, one_edge())
    with pytest.raises(AssertionError, match="was acquired"):
        sender.ends.senders["edge"].send(0, 8)
    with pytest.raises(AssertionError, match="exceed the slot"):
        receiver.ends.receivers["edge"].post_recv(0, SLOT_BYTES + 1)
    receiver.ends.receivers["edge"].release(0)
    with pytest.raises(AssertionError, match="released after"):
        receiver.ends.receivers["edge"].release(0)


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_nothing_in_a_region_overlaps(num_stages: int) -> None:
    draw = random.Random(num_stages)
    edges = pipeline_edges(num_stages, [draw.randint(1, 5000)] * (num_stages - 1), draw.randint(1, 5000))
    for index in range(num_stages):
        layout = RegionLayout.of(index, edges)
        parts = [(offset, 4) for offset in layout.flags.values()]
        for edge in edges_at(index, edges):
            if edge.receiver == index:
                first, stride = layout.slots[edge.name], layout.slot_stride[edge.name]
                parts += [(first + slot * stride, edge.slot_bytes) for slot in range(edge.num_slots)]
        parts.sort()
        assert all(start + size <= after for (start, size), (after, _) in pairwise(parts))
        assert parts[-1][0] + parts[-1][1] <= layout.num_bytes
        assert set(layout.flags) == {edge.name for edge in edges_at(index, edges)}
        assert all(offset % 512 == 0 for offset in layout.slots.values())
