"""What a GPU's stage orders for blocks in CPU memory: behind which step, and before which."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from raypp.messages import NO_BYTES, NO_STEP, BlockCopies, Bytes, StepPlan, pack_inside
from raypp.stage import cpu_kv
from raypp.stage.cpu_kv import CudaCpuKv, HostCpuKv
from raypp.tracing import ForwardCounter

NUM_RING_ENTRIES = 4


class Order:
    """Streams as lists of what they do, one after the other."""

    def __init__(self) -> None:
        self.streams: dict[str, list[str]] = {"steps": [], "copies": []}
        self.current = "steps"

    def note(self, what: str) -> None:
        self.streams[self.current].append(what)


class _Stream:
    def __init__(self, order: Order, name: str) -> None:
        self.order, self.name = order, name

    def wait_event(self, event: _Event) -> None:
        self.order.streams[self.name].append(f"wait for {event.moment}")


class _Event:
    moment = "nothing"

    def __init__(self, enable_timing: bool = False) -> None:
        self.has_passed = True

    def query(self) -> bool:
        return self.has_passed

    def elapsed_time(self, other: _Event) -> float:
        return 2.5 if other.moment.startswith("head") else -1.0

    def record(self, stream: _Stream) -> None:
        done = [what for what in stream.order.streams[stream.name] if not what.startswith("wait")]
        self.moment = done[-1] if done else "nothing"


class _Store:
    def __init__(self, order: Order, name: str) -> None:
        self.order, self.name = order, name

    def copy_out(self, blocks: Any, cpu_blocks: Any) -> None:
        self.order.note(f"{self.name}: {blocks.tolist()} to {cpu_blocks.tolist()}")

    def copy_in(self, blocks: Any, cpu_blocks: Any) -> None:
        self.order.note(f"{self.name}: {blocks.tolist()} from {cpu_blocks.tolist()}")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    order = Order()

    @contextmanager
    def entered(stream: _Stream):
        order.current = stream.name
        yield
        order.current = "steps"

    class CurrentStream:
        def __init__(self, device: torch.device) -> None:
            pass

        def get(self) -> _Stream:
            return _Stream(order, order.current)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(order, "copies"))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(cpu_kv, "CurrentStream", CurrentStream)
    return order


def copies(after_step: int, out: dict[int, int], back: dict[int, int]) -> Bytes:
    lists = ([0] * len(out), list(out), list(out.values()), [0] * len(back), list(back), list(back.values()))
    return pack_inside(BlockCopies(after_step, *(np.array(values, np.int32) for values in lists)))


def plan(step_id: int, block_copies: Bytes = NO_BYTES) -> StepPlan:
    values: dict[str, Any] = {each.name: None for each in fields(StepPlan)}
    return StepPlan(**(values | {"step_id": step_id, "block_copies": block_copies}))


def run(order: Order, kv: CudaCpuKv, of_plan: StepPlan) -> None:
    kv.before_step(of_plan)
    order.note(f"step {of_plan.step_id}")
    kv.after_step(of_plan)


def make(order: Order, counter: ForwardCounter | None = None, names: tuple[str, ...] = ("layers", "head")) -> CudaCpuKv:
    stores = [(0, _Store(order, name)) for name in names]
    return CudaCpuKv(stores, torch.device("cuda:0"), NUM_RING_ENTRIES, counter or ForwardCounter())


def test_copies_come_behind_the_last_step_of_their_blocks_and_before_their_own(order):
    kv = make(order)
    for step_id in range(3):
        run(order, kv, plan(step_id))
    run(order, kv, plan(3, copies(1, {5: 0, 7: 2}, {9: 4})))
    assert order.streams["copies"] == [
        "wait for step 1",
        "layers: [5, 7] to [0, 2]",
        "layers: [9] from [4]",
        "head: [5, 7] to [0, 2]",
        "head: [9] from [4]",
    ]
    assert order.streams["steps"] == ["step 0", "step 1", "step 2", "wait for head: [9] from [4]", "step 3"]


def test_steps_that_are_done_and_those_that_never_were_are_not_waited_for(order):
    kv = make(order)
    run(order, kv, plan(0, copies(NO_STEP, {5: 0}, {})))
    for step_id in range(1, 9):
        run(order, kv, plan(step_id))
    run(order, kv, plan(9, copies(9 - NUM_RING_ENTRIES - 1, {}, {6: 0})))
    assert not [what for what in order.streams["copies"] if what.startswith("wait")]
    run(order, kv, plan(10, copies(10 - NUM_RING_ENTRIES, {}, {6: 0})))
    assert "wait for step 6" in order.streams["copies"]


def test_steps_without_copies_wait_for_nothing(order):
    kv = make(order)
    for step_id in range(6):
        run(order, kv, plan(step_id))
    assert order.streams == {"steps": [f"step {step_id}" for step_id in range(6)], "copies": []}


def test_a_cpu_copies_at_once(order):
    counter = ForwardCounter()
    kv = HostCpuKv([(0, _Store(order, "layers"))], counter)
    kv.before_step(plan(0))
    kv.before_step(plan(1, copies(0, {5: 0}, {})))
    kv.after_step(plan(1))
    assert order.streams["steps"] == ["layers: [5] to [0]"]
    assert counter.report().copy_wait_ns > 0


def test_it_counts_for_how_long_steps_wait(order, monkeypatch):
    counter = ForwardCounter()
    kv = make(order, counter)
    for step_id in range(3):
        run(order, kv, plan(step_id, copies(NO_STEP, {5: 0}, {})))
    assert counter.report().copy_wait_ns == 3 * 2_500_000
    on_time = make(order, counter, names=("layers",))  # copied before the step came to where it waits
    run(order, on_time, plan(0, copies(NO_STEP, {5: 0}, {})))
    assert counter.report().copy_wait_ns == 3 * 2_500_000
    monkeypatch.setattr(_Event, "query", lambda event: False)
    run(order, kv, plan(3, copies(NO_STEP, {5: 0}, {})))
    assert counter.report().copy_wait_ns == 3 * 2_500_000, "nobody knows yet"
