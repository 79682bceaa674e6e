"""When a graph is worth its padding."""

from __future__ import annotations

from raypp.encoder.graph_choice import BudgetTimes, GraphChoice
from raypp.graphs.buckets import Buckets

BUDGETS = Buckets({8, 16, 32, 64})


def test_without_measurements_every_batch_that_fits_takes_its_graph():
    choice = GraphChoice(BUDGETS, {})
    assert [choice.budget_of(count) for count in (1, 8, 9, 64, 65)] == [8, 8, 16, 64, None]


def test_where_launches_cost_most_graphs_win_and_where_padding_does_they_do_not():
    # Launching takes 5; computing a token 0.1, and graphs launch for nothing.
    times = {size: BudgetTimes(captured_s=0.1 * size, eager_s=max(5.0, 0.1 * size)) for size in BUDGETS.sizes}
    choice = GraphChoice(BUDGETS, times)
    assert [choice.budget_of(count) for count in (1, 9, 17, 32, 33)] == [8, 16, 32, 32, None]
    assert choice.budget_of(64) == 64  # nothing is padding
    assert choice.budget_of(50) is None
    assert choice.budget_of(65) is None
