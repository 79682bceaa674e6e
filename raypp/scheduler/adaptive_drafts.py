"""Drafts as long as they pay: K from a ladder, by what was accepted lately and by what a step of that size costs.

Each cohort has its own estimate, of two numbers: how likely a row's first draft is accepted, misses included, and how
likely the next one is once the one before was. So K drafts bring 1 + first * (1 + next + ... + next^(K - 1)) tokens. At
K = 0 the proposer's first draft is still compared with the model's token, so text that turns repetitive is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_MEMORY = 0.9
"""What an observation counts for after one more step of its cohort: about ten steps are remembered."""
_DOUBT = 2.0
"""Row-steps without any acceptance that every estimate begins with."""
_MIN_GAIN = 1.03
"""K is raised only for this much more speed: estimates are noisy, and so are cost models."""

_SHADOW_SHARE = 1 / 8
"""Of the steps without drafts, those that are followed by a proposal where that costs something."""


class StepCost(Protocol):
    """What a decode step costs."""

    def __call__(self, num_tokens: int) -> float:
        """Return the time of a step of that many tokens, relative to an empty one's."""


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Reading the weights takes as long as computing `free_tokens` tokens; the longer of the two counts, softly."""

    free_tokens: int

    def __call__(self, num_tokens: int) -> float:
        """Return the time of a step of that many tokens, relative to an empty one's."""
        return math.hypot(1.0, num_tokens / self.free_tokens)


class _Acceptance:
    """One cohort's record, in row-steps that fade."""

    __slots__ = ("_drafted", "_first", "_next", "_reached", "_rows", "num_drafts")

    def __init__(self) -> None:
        self.num_drafts = 0  # of its last step
        self._rows = _DOUBT  # row-steps
        self._drafted = 0.0  # of these, with a draft
        self._first = 0.0  # ... and the first one was accepted
        self._reached = 0.0  # drafts behind an accepted one
        self._next = 0.0  # of these, accepted

    def note(self, num_drafts: int, num_drafted: NDArray[np.int32], num_matched: NDArray[np.int32]) -> None:
        """Count a step."""
        self._rows = self._rows * _MEMORY + len(num_drafted)
        self._drafted = self._drafted * _MEMORY + float(np.count_nonzero(num_drafted))
        self._first = self._first * _MEMORY + float(np.count_nonzero(num_matched))
        self._reached *= _MEMORY
        self._next *= _MEMORY
        if num_drafts > 1:
            accepted = num_matched[num_matched > 0]
            # A row that matched m of its d drafts saw min(m, d - 1) decisions beyond the first go well, one not.
            self._reached += float(np.minimum(accepted, num_drafted[num_matched > 0] - 1).sum())
            self._next += float((accepted - 1).sum())

    def tokens_per_row(self, num_drafts: int) -> float:
        """Return the tokens that K drafts are expected to bring a row."""
        if not num_drafts or not self._drafted:
            return 1.0
        first = self._first / self._rows
        # What is not known of later drafts is taken from first ones: both depend on how repetitive the text is.
        following = (self._next + _DOUBT * self._first / self._drafted) / (self._reached + _DOUBT)
        return 1.0 + first * sum(following**index for index in range(num_drafts))


class AdaptiveDrafts:
    """Chooses the K that brings the most tokens per time."""

    def __init__(self, ladder: Sequence[int], num_cohorts: int, cost: StepCost, *, drafting_cost: float = 0.0) -> None:
        """Begin without any drafts.

        Args:
            ladder: The values of K to choose from, ascending; the first is 0.
            num_cohorts: Cohorts, each with an estimate of its own.
            cost: What a step of so many tokens costs.
            drafting_cost: What proposing costs besides, in the same unit. A step without drafts is followed by a
                proposal now and then.
        """
        assert ladder[0] == 0
        self._ladder = tuple(ladder)
        self._cost = cost
        self._drafting_cost = drafting_cost
        self._acceptance = [_Acceptance() for _ in range(num_cohorts)]

    def num_drafts(self, cohort: int, num_rows: int, most: int) -> int:
        """Return K for a step of the cohort."""
        record = self._acceptance[cohort]
        speeds = [
            (record.tokens_per_row(count) / self._cost_of(count, num_rows), count)
            for count in self._ladder
            if count <= most
        ]
        speed, best = max(speeds)
        kept = max(entry for entry in speeds if entry[1] <= record.num_drafts)
        record.num_drafts = best if best <= kept[1] or speed > kept[0] * _MIN_GAIN else kept[1]
        return record.num_drafts

    def _cost_of(self, num_drafts: int, num_rows: int) -> float:
        share = 1.0 if num_drafts else _SHADOW_SHARE
        return self._cost(num_rows * (1 + num_drafts)) + share * self._drafting_cost

    def note_result(
        self, cohort: int, num_drafts: int, num_drafted: NDArray[np.int32], num_matched: NDArray[np.int32]
    ) -> None:
        """Take in what became of the drafts of a step's decode rows."""
        self._acceptance[cohort].note(num_drafts, num_drafted, num_matched)
