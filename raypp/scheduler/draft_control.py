"""Drafts as the scheduler sees them: how many a step verifies, and what became of them."""

from __future__ import annotations

from raypp.messages import StepResult
from raypp.scheduler.cohorts import Cohort
from raypp.scheduler.draft_counts import DraftCounts
from raypp.scheduler.draft_policy import DraftPolicy
from raypp.scheduler.in_flight import InFlightStep
from raypp.scheduler.limits import SchedulerLimits


class DraftControl:
    """Asks the policy within what the step and the KV cache have room for, and keeps the counts."""

    def __init__(self, limits: SchedulerLimits, policy: DraftPolicy) -> None:
        self._limits = limits
        self._policy = policy
        self.counts = DraftCounts(limits.max_drafts)
        self.num_missed_rows = 0

    def choose(self, cohort: Cohort, num_free_blocks: int) -> int:
        """Return K for the cohort's next step."""
        num_rows, limits = len(cohort.states), self._limits
        if not num_rows or not limits.max_drafts:
            return 0
        if num_free_blocks < num_rows:
            return 0  # drafts reserve blocks that most of them never use: no request shall be preempted for that
        most = min(limits.max_drafts, limits.max_num_batched_tokens // num_rows - 1)
        return self._policy.num_drafts(cohort.index, num_rows, most)

    def note(self, step: InFlightStep, result: StepResult) -> None:
        """Take in the result of a step with decode rows."""
        if not len(result.num_drafted):
            return  # nobody looked
        num_rows = len(step.decoding)
        num_valid = result.num_valid[:num_rows]
        num_drafted, num_matched = result.num_drafted[:num_rows], result.num_matched[:num_rows]
        has_yielded = num_valid > 0  # a row whose mask came too late says nothing about drafts
        self._policy.note_result(step.cohort.index, step.num_drafts, num_drafted[has_yielded], num_matched[has_yielded])
        if not step.num_drafts:
            return
        accepted = (num_valid - 1).tolist()
        for state, drafted, num_accepted in zip(step.decoding, num_drafted.tolist(), accepted, strict=True):
            if state.request.finish_reason or num_accepted < 0:
                continue  # it ended in an earlier step and this one was under way, or it yielded nothing
            if not drafted:
                self.num_missed_rows += 1
                continue
            self.counts.count(drafted, num_accepted)
            if state.request.draft_counts is None:
                state.request.draft_counts = DraftCounts(self._limits.max_drafts)
            state.request.draft_counts.count(drafted, num_accepted)
