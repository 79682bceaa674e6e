import pytest
from drive import make_request

from raypp.scheduler.request_state import RequestState
from raypp.scheduler.running import Cohorts


def _states(count: int) -> list[RequestState]:
    return [RequestState(make_request(str(i)), i, 100, frozenset(), 4) for i in range(count)]


def _sizes(cohorts: Cohorts) -> list[int]:
    return sorted(len(cohort.states) for cohort in cohorts.in_turn())


def test_cohorts_take_turns():
    cohorts, order = Cohorts(3, 4, 2), []
    for _ in range(5):
        cohort = cohorts.in_turn()[0]
        order.append(cohort.index)
        cohorts.note_dispatched(cohort)
    assert order == [0, 1, 2, 0, 1]
    skipped = cohorts.in_turn()[1]
    cohorts.note_dispatched(skipped)
    assert [cohort.index for cohort in cohorts.in_turn()] == [1, 2, 0]
    assert [cohort.num_in_flight for cohort in cohorts.in_turn()] == [2, 1, 3]
    with pytest.raises(AssertionError):
        cohorts.check_integrity([], [skipped, *cohorts.in_turn(), *cohorts.in_turn()[::2]])


def test_a_row_joins_the_cohort_of_its_last_chunk_unless_that_is_full():
    cohorts = Cohorts(2, 2, 2)
    first, second = cohorts.in_turn()
    states = _states(3)
    for state in states:
        cohorts.join(state, second)
    assert second.states == states[:2]
    assert first.states == states[2:]
    cohorts.check_integrity(states, [])


def test_rebalancing_spreads_a_burst_and_moves_nothing_more():
    cohorts = Cohorts(3, 8, 2)
    states = _states(8)
    for state in states:
        cohorts.join(state, cohorts.in_turn()[0])
    cohorts.rebalance()
    assert _sizes(cohorts) == [2, 3, 3]
    before = [list(cohort.states) for cohort in cohorts.in_turn()]
    cohorts.rebalance()
    assert before == [list(cohort.states) for cohort in cohorts.in_turn()]
    cohorts.check_integrity(states, [])


def test_the_longest_member_is_moved_so_that_no_row_is_moved_for_ever():
    cohorts = Cohorts(2, 8, 2)
    first, second = cohorts.in_turn()
    states = _states(4)
    for state in states[:3]:
        cohorts.join(state, first)
    cohorts.rebalance()
    assert second.states == [states[0]]
    cohorts.leave(states[1])
    cohorts.leave(states[2])
    cohorts.join(states[3], second)
    cohorts.rebalance()
    assert first.states == [states[0]]
