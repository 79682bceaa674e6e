"""Rows, steps in flight, and the waiting queue."""

import pytest
from drive import make_request

from raypp.messages import NO_STEP
from raypp.scheduler.request_state import RequestState, WaitingQueue
from raypp.scheduler.running import Cohort, InFlightStep, InFlightSteps, RowPool


def _state(arrival: int, num_tokens: int = 4) -> RequestState:
    return RequestState(make_request(str(arrival), num_tokens), arrival, 100, frozenset(), num_tokens)


def test_a_row_tells_its_new_owner_when_it_was_last_used():
    rows = RowPool(2)
    assert rows.take() == (0, NO_STEP)
    rows.give_back(0, last_step=17)
    assert rows.take() == (1, NO_STEP)  # free for longest
    assert rows.take() == (0, 17)
    assert rows.num_free == 0
    rows.check_integrity([0], [1])
    with pytest.raises(AssertionError, match="leaked"):
        rows.check_integrity([0], [])


def test_steps_are_collected_in_order():
    steps, cohort = InFlightSteps(), Cohort(0)
    assert steps.last_collected == NO_STEP
    for step_id in range(3):
        steps.append(InFlightStep(step_id, cohort, 0, [], []))
    assert steps.collect(0).step_id == 0
    assert steps.last_collected == 0
    assert steps[2].step_id == 2
    with pytest.raises(AssertionError, match="step order"):
        steps.collect(2)


def test_the_queue_is_first_come_first_served_and_counts_tokens():
    queue = WaitingQueue()
    preempted, *others = [_state(arrival, 1 + arrival) for arrival in range(4)]
    for state in others:
        queue.push(state)
    assert queue.head is others[0]
    queue.push(preempted)
    assert queue.head is preempted
    assert queue.num_tokens == 10
    preempted.num_tokens += 2
    queue.note_growth(2)
    queue.check_integrity([])
    queue.remove(others[1])
    assert list(queue) == [preempted, others[0], others[2]]
    queue.remove(preempted)
    assert queue.num_tokens == 6
    queue.check_integrity([])
    with pytest.raises(AssertionError, match="overtaken"):
        queue.check_integrity([_state(2)])


def test_who_came_last_gives_way_first():
    states = [_state(arrival) for arrival in (2, 5, 1)]
    assert WaitingQueue.last_of(states) is states[1]
