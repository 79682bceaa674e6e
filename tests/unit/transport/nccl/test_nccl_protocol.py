"""The ends of `nccl` links, on streams that are threads: what is ordered after what, without a GPU and without NCCL.

The stand-in for NCCL has no buffers of its own: a send ends only when its receive has taken the message.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from fake_stream_device import FakeMemory, FakeStreamDevice
from link_harness import DEADLINE_S, content_of, sizes_of

from raypp.errors import EngineDeadError
from raypp.transport.nccl.nccl_ends import NcclReceiver, NcclSender

SLOT_BYTES = 4096
Wire = queue.SimpleQueue[tuple[torch.Tensor, threading.Event]]


class FakeChannel:
    """See `NcclChannel`."""

    def __init__(self, compute: FakeStreamDevice, wire: Wire) -> None:
        self._compute = compute
        self._own = FakeStreamDevice(FakeMemory())
        self._wire = wire
        self._sent: dict[int, threading.Event] = {}
        self.num_aborts = 0

    def send(self, slot: int, message: torch.Tensor) -> None:
        written, taken, done = threading.Event(), threading.Event(), threading.Event()
        self._compute.run(written.set)
        self._own.run(written.wait)
        self._own.run(lambda: self._wire.put((message, taken)))
        self._own.run(taken.wait)
        self._own.run(done.set)
        self._sent[slot] = done

    def await_sent(self, slot: int) -> None:
        if slot in self._sent:
            self._compute.run(self._sent[slot].wait)

    def receive(self, message: torch.Tensor) -> None:
        def take() -> None:
            sent, taken = self._wire.get(timeout=DEADLINE_S)
            assert len(sent) == len(message)
            message.copy_(sent)
            taken.set()

        self._compute.run(take)

    def abort(self) -> None:
        self.num_aborts += 1

    def close(self) -> None:
        self._own.close()


@dataclass
class Ends:
    """Both ends of an edge, each with the stream that computes."""

    sending: FakeStreamDevice = field(default_factory=lambda: FakeStreamDevice(FakeMemory()))
    receiving: FakeStreamDevice = field(default_factory=lambda: FakeStreamDevice(FakeMemory()))

    def __post_init__(self) -> None:
        wire: Wire = queue.SimpleQueue()
        self.channels = (FakeChannel(self.sending, wire), FakeChannel(self.receiving, wire))
        slots = [torch.zeros(3, SLOT_BYTES, dtype=torch.uint8) for _ in range(2)]
        self.sender = NcclSender(self.channels[0], slots[0], self.channels[0].close)
        self.receiver = NcclReceiver(self.channels[1], slots[1], self.channels[1].close)

    def send(self, step_id: int, num_bytes: int) -> None:
        slot = self.sender.acquire(step_id)
        self.sending.run(lambda: slot[:num_bytes].copy_(content_of(step_id, num_bytes)))
        self.sender.send(step_id, num_bytes)

    def receive(self, step_id: int, pause_s: float = 0.0) -> None:
        slot, num_bytes = self.receiver.wait(step_id), self.sizes[step_id]

        def check() -> None:
            time.sleep(pause_s)
            assert torch.equal(slot[:num_bytes], content_of(step_id, num_bytes)), f"step {step_id}"

        self.receiving.run(check)
        self.receiver.release(step_id)

    sizes: list[int] = field(default_factory=lambda: sizes_of(60, SLOT_BYTES))


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.sender.close()
    ends.receiver.close()
    for compute in (ends.sending, ends.receiving):
        assert not compute.errors
        compute.close()


@pytest.mark.parametrize("pause_s", [0.0, 0.002])
@pytest.mark.parametrize("posted_ahead", [1, 8])
def test_messages_arrive_whole_and_in_order(ends: Ends, pause_s: float, posted_ahead: int) -> None:
    for step_id in range(posted_ahead - 1):
        ends.receiver.post_recv(step_id, ends.sizes[step_id])
    for step_id, num_bytes in enumerate(ends.sizes):
        if step_id + posted_ahead - 1 < len(ends.sizes):
            ends.receiver.post_recv(step_id + posted_ahead - 1, ends.sizes[step_id + posted_ahead - 1])
        ends.send(step_id, num_bytes)
        ends.receive(step_id, pause_s)
    assert ends.sending.drain(DEADLINE_S)
    assert ends.receiving.drain(DEADLINE_S)


def test_the_stage_goes_on_while_its_messages_wait_for_a_late_receiver(ends: Ends) -> None:
    for step_id in range(3):
        ends.send(step_id, ends.sizes[step_id])
    assert ends.sending.drain(DEADLINE_S), "a send held up the stream that computes"
    ends.send(3, ends.sizes[3])
    assert not ends.sending.drain(0.05), "a slot was written before its message was out"
    for step_id in range(4):
        ends.receiver.post_recv(step_id, ends.sizes[step_id])
        ends.receive(step_id)
    assert ends.sending.drain(DEADLINE_S)
    assert ends.receiving.drain(DEADLINE_S)


def test_an_aborted_end_cannot_be_used(ends: Ends) -> None:
    ends.receiver.post_recv(0, 8)
    ends.sender.abort()
    ends.receiver.abort()
    assert [channel.num_aborts for channel in ends.channels] == [1, 1]
    with pytest.raises(EngineDeadError, match="aborted"):
        ends.sender.acquire(0)
    with pytest.raises(EngineDeadError, match="aborted"):
        ends.receiver.wait(0)


def test_misuse_is_caught(ends: Ends) -> None:
    with pytest.raises(AssertionError, match="was acquired"):
        ends.sender.send(0, 8)
    with pytest.raises(AssertionError, match="never posted"):
        ends.receiver.wait(0)
    with pytest.raises(AssertionError, match="exceed the slot"):
        ends.receiver.post_recv(0, SLOT_BYTES + 1)
