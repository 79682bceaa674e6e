"""Decides by measurement whether a batch is worth its graph: a graph saves launches, and costs padding.

    time of eager, by tokens      ______/     launches bound it below, computing above
    time of graphs, by budget     __--''      a stair: padded to the next budget

Where the stair is above the line, the batch is computed eagerly. Computing depends on what a batch is made of, too:
items attend to themselves alone, so attention takes what the squares of their sizes take. One item that fills a budget
is one end, many small ones are the other; both are measured, and the sum of its squares places a batch between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypp.graphs.buckets import Buckets


@dataclass(frozen=True)
class BudgetTimes:
    """What full batches of one budget take, seconds: of one item, and of several."""

    budget: int  # tokens
    captured_s: float
    eager_s: float
    split_captured_s: float  # several items; the same as `captured_s` where there is room for one only
    split_squares: int  # the sum of the squares of their tokens

    def captured_with(self, squares: int) -> float:
        """Return what the graph takes, by the sum of squares of its items, padding included."""
        return self.captured_s - self._attention_s(squares)

    def eager_with(self, squares: int) -> float:
        """Return what a full batch takes eagerly, by the sum of squares of its items, unless launching takes longer."""
        return self.eager_s - self._attention_s(squares)

    def _attention_s(self, squares: int) -> float:
        """Return how much less attention takes than for one item. By the graphs: eagerly, launching may hide it."""
        if self.split_squares == self.budget**2:
            return 0.0
        difference = max(self.captured_s - self.split_captured_s, 0.0)
        return difference * (self.budget**2 - squares) / (self.budget**2 - self.split_squares)


class GraphChoice:
    """Chooses the budget of a batch, or none.

    Args:
        budgets: There are graphs for these.
        times: Of each; empty where nothing was measured: then every batch that fits takes its graph.
        launch_s: What the smallest batch takes eagerly: it is as many launches as any.
    """

    def __init__(self, budgets: Buckets, times: Mapping[int, BudgetTimes], launch_s: float = 0.0) -> None:
        self._budgets = budgets
        self._times = times
        self._launch_s = launch_s

    @property
    def times(self) -> Mapping[int, BudgetTimes]:
        """What was measured, by budget."""
        return self._times

    @property
    def launch_s(self) -> float:
        """What launching takes, seconds."""
        return self._launch_s

    def budget_of(self, sizes: Sequence[int]) -> int | None:
        """Return what a batch of items of these sizes, in tokens, is padded to; None: it is to be computed eagerly."""
        num_tokens = sum(sizes)
        budget = self._budgets.fit(num_tokens)
        if budget is None or not self._times:
            return budget
        squares = sum(size**2 for size in sizes)
        with_padding = squares + (budget - num_tokens) ** 2  # padding attends to itself, like one more item
        captured_s = self._times[budget].captured_with(with_padding)
        return budget if captured_s <= max(self._launch_s, self._computing_s(num_tokens, squares)) else None

    def _computing_s(self, num_tokens: int, squares: int) -> float:
        """Return what computing a batch takes eagerly: interpolated between the budgets around it."""
        sizes = self._budgets.sizes
        index = bisect_left(sizes, num_tokens)
        above = self._times[sizes[index]].eager_with(squares)
        if index == 0:
            return above  # below the smallest budget launches count
        start, end = sizes[index - 1], sizes[index]
        below = self._times[start].eager_with(squares)
        return below + (above - below) * (num_tokens - start) / (end - start)
