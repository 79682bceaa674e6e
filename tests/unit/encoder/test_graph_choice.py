"""When a graph is worth its padding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raypp.encoder.build_encoder import token_ladder
from raypp.encoder.encoder_graphs import BudgetTimes, GraphChoice
from raypp.encoder.protocol import BudgetRange
from raypp.graphs.buckets import Buckets

BUDGETS = Buckets({8, 16, 32, 64})
LAUNCH_S = 5.0
TOKEN_S = 0.1
NUM_SPLIT = 4


def computing_s(num_tokens: int, squares: float, square_s: float) -> float:
    return TOKEN_S * num_tokens + square_s * squares


def choice_of(budgets: Buckets, square_s: float) -> GraphChoice:
    """As measured where launching takes 5 and a graph launches for nothing."""
    times = {}
    for size in budgets.sizes:
        whole, split_squares = computing_s(size, size**2, square_s), size**2 // NUM_SPLIT
        split = computing_s(size, split_squares, square_s)
        times[size] = BudgetTimes(size, whole, max(LAUNCH_S, whole), split, split_squares)
    return GraphChoice(budgets, times, LAUNCH_S)


def test_without_measurements_every_batch_that_fits_takes_its_graph():
    choice = GraphChoice(BUDGETS, {})
    assert [choice.budget_of([count]) for count in (1, 8, 9, 64, 65)] == [8, 8, 16, 64, None]
    assert choice.budget_of([4, 5]) == 16


def test_where_launches_cost_most_graphs_win_and_where_padding_does_they_do_not():
    choice = choice_of(BUDGETS, square_s=0.0)
    assert [choice.budget_of([count]) for count in (1, 9, 17, 32, 33)] == [8, 16, 32, 32, None]
    assert choice.budget_of([64]) == 64  # nothing is padding
    assert choice.budget_of([50]) is None
    assert choice.budget_of([65]) is None


def test_small_items_are_bound_by_launches_where_one_of_their_size_is_not():
    choice = choice_of(BUDGETS, square_s=0.01)
    assert choice.budget_of([28]) is None  # 11.2 with a graph, 10.6 without
    assert choice.budget_of([7] * 4) is None  # 5.3 with a graph, 5.0 without
    assert choice.budget_of([4] * 7) == 32  # 4.5 with a graph, 5.0 without


def test_padding_attends_to_itself():
    times = BudgetTimes(64, captured_s=48.0, eager_s=48.0, split_captured_s=18.0, split_squares=4 * 16**2)
    assert times.captured_with(64**2) == 48.0
    assert times.captured_with(4 * 16**2) == 18.0
    assert times.captured_with(3 * 16**2 + 8**2 + 8**2) < 18.0 < times.captured_with(2 * 16**2 + 32**2)


def test_a_budget_of_one_item_is_the_same_however_it_is_filled():
    times = BudgetTimes(8, captured_s=4.0, eager_s=5.0, split_captured_s=4.0, split_squares=8**2)
    assert (times.captured_with(20), times.eager_with(20)) == (4.0, 5.0)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.sampled_from([0.0, 1e-4, 1e-3]))
def test_no_batch_takes_a_graph_that_is_slower(sizes, square_s):
    budget = choice_of(token_ladder(BudgetRange(4, 600)), square_s).budget_of(sizes)
    if budget is None:
        return
    num_tokens, squares = sum(sizes), sum(size**2 for size in sizes)
    captured_s = computing_s(budget, squares + (budget - num_tokens) ** 2, square_s)
    assert captured_s <= 1.01 * max(LAUNCH_S, computing_s(num_tokens, squares, square_s))
