"""What it costs that many requests wait: nothing of it may grow with their number."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
from drive import make_limits
from relative_cost import relative_cost

from raypp.prompt_items import EncoderItem, PromptItems
from raypp.request import Request
from raypp.scheduler.item_admission import ItemAdmission
from raypp.scheduler.request_state import RequestState, WaitingQueue
from raypp.scheduler.scheduler import Scheduler
from raypp.types import SamplingParams

PARAMS = SamplingParams(max_tokens=4)
PROMPT = np.zeros(8, np.int32)


def _picture(number: int) -> PromptItems:
    item = EncoderItem.of(np.full((4, 3), 0, np.uint8) + np.uint8(number % 251), (1, 2, 2), num_tokens=1)
    return PromptItems((item,), (1,), merge_size=2)


def _states(count: int, items: Callable[[int], PromptItems | None] = lambda _: None) -> list[RequestState]:
    requests = [Request(str(index), PROMPT, PARAMS, 0, items=items(index)) for index in range(count)]
    return [RequestState(request, index, 12, frozenset(), 8) for index, request in enumerate(requests)]


def test_aborted_requests_leave_nothing_behind_in_the_queue():
    queue, (first, *others) = WaitingQueue(), _states(5_000)
    queue.push(first)
    tracemalloc.start()
    try:
        for state in others:
            queue.push(state)
        for state in others:
            queue.remove(state)
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    queue.check_integrity(())
    assert queue.head is first
    assert left < 150_000, f"{left} bytes are left of {len(others)} aborted requests"


def test_pictures_that_wait_cost_the_same_each():
    queue = WaitingQueue()
    admission, states = ItemAdmission(queue, max_tokens=1), _states(6_000, _picture)

    def come_and_go():
        for state in states:
            admission.push(state)
        for state in reversed(states[1:]):
            admission.remove(state)

    cost = relative_cost([come_and_go])
    assert list(admission) == states[:1]
    assert cost < 1000, f"{cost:.0f} for {len(states)} requests with pictures that come and go"


def test_thousands_that_wait_for_one_picture_are_let_in_a_few_at_a_time():
    queue, same = WaitingQueue(), _picture(1)
    admission, states = ItemAdmission(queue, max_tokens=1), _states(3_000, lambda _: same)
    for state in states:
        admission.push(state)
    [item] = admission.take_orders()
    let_in = []
    admission.note_stored([item.key])
    while len(queue) < len(states):
        let_in.append(len(queue))
        assert not admission.take_orders()
    steps = np.diff(let_in)
    assert steps.max() <= 128
    assert let_in[0] <= 2_000
    assert len(admission) == 0
    admission.check_integrity(())


def test_a_scheduler_with_many_that_wait_plans_as_fast_as_one_with_few():
    scheduler = Scheduler(make_limits(max_num_seqs=1, num_stages=1))
    for index in range(5_000):
        scheduler.add(Request(str(index), PROMPT, PARAMS, 0))

    def abort_all():
        while scheduler.schedule() is not None:
            pass
        for index in range(1, 5_000):
            assert scheduler.abort(str(index))
            assert scheduler.schedule() is None

    assert relative_cost([abort_all]) < 600
    assert scheduler.stats().num_waiting == 0
