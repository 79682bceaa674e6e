"""Who is served first, and who gives way."""

from __future__ import annotations

from drive import Pipeline, make_limits, make_request

from raypp.request import Request
from raypp.scheduler.request_state import RequestState, WaitingQueue
from raypp.scheduler.scheduler import Scheduler


def _request(name: str, priority: int, prompt: int = 4, **params) -> Request:
    request = make_request(name, prompt, **params)
    request.priority = priority
    return request


def _state(arrival: int, priority: int) -> RequestState:
    return RequestState(_request(str(arrival), priority), arrival, 100, frozenset(), num_tokens=4)


def test_smaller_numbers_are_served_first_and_equal_ones_in_order_of_arrival():
    queue = WaitingQueue()
    states = [_state(arrival, priority) for arrival, priority in enumerate([1, 0, 1, -3, 0])]
    for state in states:
        queue.push(state)
    queue.check_integrity([])
    order = [3, 1, 4, 0, 2]
    assert [state.arrival for state in queue] == order
    queue.remove(states[1])  # from the middle
    order.remove(1)
    for arrival in order:
        assert queue.head is states[arrival]
        queue.remove(queue.head)
    assert not len(queue)
    assert queue.num_tokens == 0


def test_requests_that_another_engine_has_begun_are_served_before_others_of_their_priority():
    queue = WaitingQueue()
    states = [_state(arrival, priority) for arrival, priority in enumerate([0, 0, 1, 0, 1, -1])]
    for arrival in (3, 4):
        states[arrival].request.num_earlier_tokens = 1
    for state in states:
        queue.push(state)
    assert [state.arrival for state in queue] == [5, 3, 0, 1, 4, 2]
    assert queue.last_of(states) is states[2], "and preempted after them"
    running = states.pop(1)  # it has its row already
    queue.remove(running)
    queue.check_integrity([])


def test_no_priority_is_before_those_that_go_first():
    queue = WaitingQueue()
    states = [_state(arrival, priority) for arrival, priority in enumerate([-(2**31), 3, 0, -(2**31)])]
    states[0].request.num_earlier_tokens = 1
    for arrival in (1, 2):
        states[arrival].request.goes_first = True
    for state in states:
        queue.push(state)
    assert [state.arrival for state in queue] == [2, 1, 0, 3]
    assert queue.last_of(states) is states[3]
    queue.check_integrity([])


def test_a_preempted_request_takes_its_place_again():
    queue = WaitingQueue()
    first, second = _state(0, 0), _state(1, 0)
    queue.push(second)
    queue.push(first)
    assert queue.head is first
    queue.remove(first)
    queue.push(first)  # the same turn a second time
    assert list(queue) == [first, second]
    queue.check_integrity([])


def test_the_urgent_overtake_those_that_wait():
    scheduler = Scheduler(make_limits(num_stages=1, max_num_seqs=1))
    pipeline = Pipeline(scheduler)
    requests = [_request("running", 5), _request("patient", 1), _request("urgent", -1)]
    ended = []
    for request in requests:
        request.params = make_request(max_tokens=2).params
        scheduler.add(request)
        pipeline.dispatch_all()
    while scheduler.has_unfinished:
        pipeline.dispatch_all()
        ended += [update.request.request_id for update in pipeline.answer() if update.request.finish_reason]
    assert ended == ["running", "urgent", "patient"]


def test_the_least_urgent_gives_way_even_if_it_came_first():
    # 15 usable blocks of 4 tokens: two requests of 8 + 24 tokens do not fit together.
    scheduler = Scheduler(make_limits(num_stages=1, max_num_seqs=2, num_blocks=16))
    pipeline = Pipeline(scheduler)
    patient, urgent = (_request(name, priority, 8, max_tokens=24) for name, priority in (("patient", 1), ("urgent", 0)))
    for request in (patient, urgent):
        scheduler.add(request)
    ended = []
    while scheduler.has_unfinished:
        pipeline.dispatch_all()
        ended += [update.request.request_id for update in pipeline.answer() if update.request.finish_reason]
    assert patient.num_preemptions > 0
    assert urgent.num_preemptions == 0
    assert ended == ["urgent", "patient"]
