"""Chooses how many drafts the decode rows of each step verify: a fixed number, or as many as pay.

`AdaptiveDrafts` chooses K from a ladder, by how many drafts were accepted lately and by what a step of that size costs.
Each cohort has its own estimate, of two numbers: how likely a row's first draft is accepted, rows without a draft
included, and how likely the next one is once the one before was. So K drafts bring
1 + first * (1 + next + ... + next^(K - 1)) tokens. At K = 0 the proposer's first draft is still compared with the
model's token, so that text that turns repetitive is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raypp.messages import StepResult
from raypp.request import DraftCounts
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.running import Cohort, InFlightStep
from raypp.scheduler.step_budget import RooflineCost

_MEMORY = 0.9
"""The weight of an observation after one more step of its cohort: about ten steps are remembered."""
_DOUBT = 2.0
"""Row-steps without any acceptance that every estimate begins with."""
_MIN_GAIN = 1.03
"""K is raised only for this much more speed: estimates are noisy, and so are cost models."""

SHADOW_SHARE = 1 / 8
"""The share of steps without drafts that are followed by a proposal, where a proposal costs something."""


class DraftPolicy(Protocol):
    """Chooses K, the drafts per decode row, for one plan. All rows of a step have the same K."""

    def num_drafts(self, cohort: int, num_rows: int, most: int) -> int:
        """Return K for a step.

        Args:
            cohort: Whose step it is.
            num_rows: Its decode rows, at least 1.
            most: Drafts per row that the step has room for.
        """

    def note_result(
        self, cohort: int, num_drafts: int, num_drafted: NDArray[np.int32], num_matched: NDArray[np.int32]
    ) -> None:
        """Take in what became of the drafts of a step's decode rows; see `StepResult`.

        Args:
            cohort: Whose step it was.
            num_drafts: Its K.
            num_drafted: Drafts compared, of each decode row.
            num_matched: Leading ones that the model agreed with, of each decode row.
        """


@dataclass(frozen=True, slots=True)
class FixedDrafts:
    """The same K for every step, less where it does not fit; 0 means no speculation."""

    count: int = 0

    def num_drafts(self, cohort: int, num_rows: int, most: int) -> int:
        """Return K for a step."""
        return min(self.count, most)

    def note_result(
        self, cohort: int, num_drafts: int, num_drafted: NDArray[np.int32], num_matched: NDArray[np.int32]
    ) -> None:
        """Do nothing."""


class _Acceptance:
    """How one cohort's drafts did lately, in row-steps whose weights decay."""

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
            # A row that matched m of its d drafts decided on min(m, d - 1) drafts beyond the first, and accepted m - 1.
            self._reached += float(np.minimum(accepted, num_drafted[num_matched > 0] - 1).sum())
            self._next += float((accepted - 1).sum())

    def tokens_per_row(self, num_drafts: int) -> float:
        """Return the tokens that K drafts are expected to bring a row."""
        if not num_drafts or not self._drafted:
            return 1.0
        first = self._first / self._rows
        # Without observations of later drafts, take the rate of first ones: both depend on how repetitive the text is.
        following = (self._next + _DOUBT * self._first / self._drafted) / (self._reached + _DOUBT)
        return 1.0 + first * sum(following**index for index in range(num_drafts))


class AdaptiveDrafts:
    """Chooses the K that brings the most tokens per time."""

    def __init__(
        self, ladder: Sequence[int], num_cohorts: int, cost: RooflineCost, *, drafting_cost: float = 0.0
    ) -> None:
        """Begin without any drafts.

        Args:
            ladder: The values of K to choose from, ascending; the first is 0.
            num_cohorts: Cohorts, each with an estimate of its own.
            cost: What a step of so many tokens costs.
            drafting_cost: What proposing a draft costs in addition, in the same unit. Some steps without drafts are
                followed by a proposal of one, too. Where all cohorts have rows, the stage that proposes is what the
                others wait for: it has the time of one stage, so it costs them as many times as much as there are
                cohorts.
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
        share = num_drafts or SHADOW_SHARE
        if num_rows > 1:  # rows are spread evenly, so the others have some
            share *= len(self._acceptance)
        return self._cost(num_rows * (1 + num_drafts)) + share * self._drafting_cost

    def note_result(
        self, cohort: int, num_drafts: int, num_drafted: NDArray[np.int32], num_matched: NDArray[np.int32]
    ) -> None:
        """Take in what became of the drafts of a step's decode rows."""
        self._acceptance[cohort].note(num_drafts, num_drafted, num_matched)


class DraftControl:
    """Asks the policy for a K that the step and the KV cache have room for, and counts what became of the drafts."""

    def __init__(self, limits: SchedulerLimits, policy: DraftPolicy) -> None:
        self._limits = limits
        self._policy = policy
        self.counts = DraftCounts(limits.max_drafts)
        self.num_missed_rows = 0

    def num_drafts_of(self, cohort: Cohort, num_free_blocks: int) -> int:
        """Return K for the next step of a cohort that has rows."""
        num_rows, limits = len(cohort.states), self._limits
        if num_free_blocks < num_rows:
            return 0  # drafts reserve blocks, most for nothing: no request shall be preempted for that
        num_tokens = limits.max_num_batched_tokens - limits.whole_item_tokens  # an image must find room beside drafts
        most = max(0, min(limits.max_drafts, num_tokens // num_rows - 1))
        return self._policy.num_drafts(cohort.index, num_rows, most)

    def note(self, step: InFlightStep, result: StepResult) -> None:
        """Take in the result of a step with decode rows."""
        if not len(result.num_drafted):
            return  # no draft was compared
        num_rows = len(step.decoding)
        num_valid = result.num_valid[:num_rows]
        num_drafted, num_matched = result.num_drafted[:num_rows], result.num_matched[:num_rows]
        has_yielded = num_valid > 0  # others had a late mask, which says nothing about drafts
        self._policy.note_result(step.cohort.index, step.num_drafts, num_drafted[has_yielded], num_matched[has_yielded])
        if not step.num_drafts:
            return
        accepted = (num_valid - 1).tolist()
        for state, drafted, num_accepted in zip(step.decoding, num_drafted.tolist(), accepted, strict=True):
            if state.request.finish_reason or num_accepted < 0:
                continue  # it ended in an earlier step, or yielded nothing
            if not drafted:
                self.num_missed_rows += 1
                continue
            self.counts.count(drafted, num_accepted)
            if state.request.draft_counts is None:
                state.request.draft_counts = DraftCounts(self._limits.max_drafts)
            state.request.draft_counts.count(drafted, num_accepted)
