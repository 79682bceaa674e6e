"""Chooses the rows of a cohort that decode in a step, and preempts requests when KV blocks run out."""

from __future__ import annotations

from raypp.scheduler.cohorts import Cohort
from raypp.scheduler.item_admission import ItemAdmission
from raypp.scheduler.kv_blocks import KvBlocks
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.request_state import NO_ROW, RequestState
from raypp.scheduler.running import RunningRequests
from raypp.scheduler.scheduler_stats import Counters
from raypp.scheduler.waiting_queue import WaitingQueue


class DecodeChooser:
    """Chooses decode rows, and reserves blocks for every token that their steps in flight may write."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KvBlocks,
        admission: ItemAdmission,
        running: RunningRequests,
        counters: Counters,
    ) -> None:
        self._block_size = limits.block_size
        self._max_steps = limits.max_steps_per_cohort
        self._num_lookahead_tokens = limits.num_lookahead_tokens
        self._kv = kv
        self._admission = admission
        self._running = running
        self._counters = counters

    def take_rows(self, cohort: Cohort, num_drafts: int, newest_feedback: int) -> list[RequestState]:
        """Return the rows of the cohort that decode in its next step.

        Args:
            cohort: Whose turn it is.
            num_drafts: K.
            newest_feedback: Only rows that yielded their last token in this step or before are chosen.
        """
        chosen: list[RequestState] = []
        for state in cohort.states.copy():  # a preemption takes rows out
            if state.last_yield_step > newest_feedback or state.num_in_flight_yields >= self._max_steps:
                continue
            if state.num_tokens + state.num_in_flight_yields >= state.limit:
                continue  # the steps in flight bring it to its limit
            num_ahead = num_drafts + self._num_lookahead_tokens
            num_tokens = min(state.num_tokens + state.max_in_flight_tokens + num_ahead, state.limit)
            if num_tokens > len(state.blocks) * self._block_size and not self._make_room(state, num_tokens, chosen):
                continue
            chosen.append(state)
        return chosen

    def _make_room(self, state: RequestState, num_tokens: int, chosen: list[RequestState]) -> bool:
        """Let a row's blocks hold that many tokens; if blocks lack, preempt the requests that would be served last.

        The one that is served first is never preempted for another. So it always ends, and then another one is first.

        Returns:
            False when the row must skip this turn, or was preempted itself. Preempted rows are removed from `chosen`.
        """
        while state.row != NO_ROW:
            if self._kv.try_grow(state, num_tokens):
                return True
            if state.num_in_flight_yields or self._blocks_are_about_to_be_freed():
                return False
            victim = WaitingQueue.last_of(self._running)
            self._preempt(victim)
            if victim in chosen:
                chosen.remove(victim)
        return False

    def _blocks_are_about_to_be_freed(self) -> bool:
        return any(state.num_tokens + state.num_in_flight_yields >= state.limit for state in self._running)

    def _preempt(self, state: RequestState) -> None:
        """Take a request's row and blocks away; its known tokens are computed again later."""
        self._running.stop(state)
        self._admission.push(state)
        state.request.num_preemptions += 1
        self._counters.num_preemptions += 1
