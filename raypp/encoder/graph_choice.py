"""Whether a batch is worth its graph: a graph saves launches, and costs padding. Measured, not guessed.

    time of eager, by tokens      ______/     launches bound it below, computing above
    time of graphs, by budget     __--''      a stair: padded to the next budget

Where the stair is above the line, the batch is computed eagerly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from raypp.graphs.buckets import Buckets


@dataclass(frozen=True)
class BudgetTimes:
    """What a full batch of one budget takes, seconds."""

    captured_s: float
    eager_s: float


class GraphChoice:
    """Chooses the budget of a batch, or none.

    Args:
        budgets: There are graphs for these.
        times: Of each; empty where nothing was measured: then every batch that fits takes its graph.
    """

    def __init__(self, budgets: Buckets, times: Mapping[int, BudgetTimes]) -> None:
        self._budgets = budgets
        self._times = times

    @property
    def times(self) -> Mapping[int, BudgetTimes]:
        """What was measured, by budget."""
        return self._times

    def budget_of(self, num_tokens: int) -> int | None:
        """Return what a batch is padded to; None when it is to be computed eagerly."""
        budget = self._budgets.fit(num_tokens)
        if budget is None or not self._times:
            return budget
        return budget if self._times[budget].captured_s <= self._eager_s(num_tokens) else None

    def _eager_s(self, num_tokens: int) -> float:
        """Return what a batch takes eagerly: interpolated between the budgets around it."""
        sizes = self._budgets.sizes
        index = bisect_left(sizes, num_tokens)
        above = self._times[sizes[index]].eager_s
        if index == 0:
            return above  # below the smallest budget launches count, and they are as many
        start, end = sizes[index - 1], sizes[index]
        below = self._times[start].eager_s
        return below + (above - below) * (num_tokens - start) / (end - start)
