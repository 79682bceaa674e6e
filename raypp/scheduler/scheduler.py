"""The scheduler: decides what every step computes, from upper bounds, without waiting for any result.

    add, abort -> ItemAdmission -> WaitingQueue --> running: prefilling --last chunk--> decoding, in one of the Cohorts
                       ^                                                                    |
                       +--------------------------- preemption -----------------------------+

    schedule() -> StepPlan   a cohort's decode rows, then prompt chunks; counted as in flight
    update(StepResult)       in step order: tokens reach their requests, requests end, rows and bounds are corrected

It knows requests, rows, blocks and step ids; it does not know models, tensors, processes or clocks.
"""

from __future__ import annotations

from dataclasses import asdict

from raypp.errors import RayppError, RequestError
from raypp.messages import NO_BYTES, StepPlan, StepResult
from raypp.request import Request, RequestUpdate
from raypp.scheduler.drafts import DraftControl, DraftPolicy, FixedDrafts
from raypp.scheduler.item_admission import ItemAdmission, item_error
from raypp.scheduler.kv_blocks import KvBlocks
from raypp.scheduler.limits import MAX_MASK_WAIT_US, STEPS_PER_COHORT, SchedulerLimits
from raypp.scheduler.plan_builder import build_plan
from raypp.scheduler.prefill import PrefillChooser
from raypp.scheduler.request_state import (
    NO_ROW,
    RequestState,
    StepLogprobsReader,
    WaitingQueue,
    check_begun,
    end_token_ids,
    token_limit,
)
from raypp.scheduler.running import Chunk, Cohort, InFlightStep, InFlightSteps, RunningRequests
from raypp.scheduler.scheduler_stats import Counters, SchedulerStats
from raypp.scheduler.step_budget import RooflineCost, StageTimes, StepPredictor
from raypp.types import FinishReason

_NO_DRAFTS = FixedDrafts(0)
_SOME_FREE_TOKENS = 12.0
_SOME_TIMES = StageTimes(step=0.5, prompts=0.1, weights=0.5, token=0.01, logit=0.01, kv=1e-5, pair=1e-5)


class Scheduler:
    """Plans the steps of one engine.

    Args:
        limits: The fixed sizes.
        draft_policy: Chooses the drafts per decode row of each step; `limits.max_drafts` bounds it.
        predictor: Says how long steps take; None: one that takes stages for much alike a small model's on a CPU.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        draft_policy: DraftPolicy = _NO_DRAFTS,
        predictor: StepPredictor | None = None,
    ) -> None:
        predictor = predictor or StepPredictor(RooflineCost(_SOME_FREE_TOKENS), [_SOME_TIMES])
        self._limits = limits
        self._counters = Counters()
        self._drafts = DraftControl(limits, draft_policy)
        self._kv = KvBlocks(limits)
        self._keeps_cpu_blocks = limits.num_cpu_blocks > 0
        self._in_flight = InFlightSteps()
        self._states: dict[str, RequestState] = {}  # all unfinished requests: the waiting and the running ones
        self._queue = WaitingQueue()
        self.without_logits: list[Request] = []
        """Those that ended because their logits were not finite: an engine reports them, and takes them out."""
        self.items = ItemAdmission(
            self._queue, limits.max_item_tokens, limits.max_whole_item_tokens if limits.whole_item_tokens else None
        )
        """Orders the embeddings of images; whoever carries the orders out tells it what came of them."""
        self._running = RunningRequests(limits, self._kv, self._in_flight, self.items)
        self._prefill = PrefillChooser(limits, self._kv, self._queue, self._running, self._counters, predictor)
        self._num_added = 0

    @property
    def num_in_flight(self) -> int:
        """Steps dispatched and not collected."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._states)

    def add(self, request: Request) -> None:
        """Take in a request. Whether its prompt's tokens are in the vocabulary is for others to check.

        Raises:
            RequestError: it can never run, or another one with its id is unfinished.
        """
        limit = token_limit(request, self._limits)
        self.items.check(request)
        if request.request_id in self._states:
            raise RequestError(
                "a request with this id is unfinished",
                request_id=request.request_id,
                got=request.request_id,
                expected="an id of its own",
            )
        ends = end_token_ids(request)
        check_begun(request, limit, ends, self._limits.vocab_size)
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        yields_one_token = limit <= num_tokens + 1
        state = RequestState(
            request,
            self._num_added,
            limit,
            ends,
            num_tokens=num_tokens,
            never_drafts=self._limits.caches_next_token and yields_one_token and not self._limits.enable_prefix_caching,
        )
        self._num_added += 1
        self._states[request.request_id] = state
        self.items.push(state)

    def abort(self, request_id: str) -> bool:
        """End a request now; return False when there is no such unfinished request."""
        state = self._states.get(request_id)
        if state is None:
            return False
        state.request.finish_reason = FinishReason.ABORT
        self._end(state)
        return True

    def note_item_failed(self, key: bytes, cause: RayppError) -> list[tuple[Request, RayppError]]:
        """Take in that an image cannot be encoded; end the requests that wait for it, and return them with why."""
        failed = []
        for state in self.items.note_failed(key):
            request = state.request
            request.finish_reason = FinishReason.ERROR
            self._end(state)
            failed.append((request, item_error(request.request_id, cause)))
        return failed

    def schedule(self) -> StepPlan | None:
        """Return the next step to dispatch, or None when nothing may be dispatched now."""
        if not self._states:
            return None
        running, step_id = self._running, self._in_flight.next_step_id
        running.cohorts.rebalance()
        cohorts = running.cohorts.in_turn()
        has_prompts = bool(self._queue.states or running.prefilling)
        most_steps = STEPS_PER_COHORT if has_prompts else self._limits.max_steps_per_cohort
        # Rows whose last token is fed back by the time of this step, and prompts: no stage will wait.
        for cohort in cohorts:
            if not cohort.states and not has_prompts:
                continue
            if cohort.num_in_flight >= most_steps:
                # A cohort that overtook it now would do so in every round: rows would step too early, and stages would
                # wait for their tokens, or rows would step too rarely.
                return None
            if (plan := self._plan_step(cohort, step_id - self._limits.num_stages)) is not None:
                return plan
        # The pipeline is not full. The first stage will wait for the tokens of these rows, and delays nothing by it.
        for cohort in cohorts:
            if cohort.states and (plan := self._plan_step(cohort, step_id - 1)) is not None:
                return plan
        return None

    def started_by_last_step(self) -> list[Request]:
        """Return the requests that got their row with the step that was planned last; it must still be in flight."""
        step = self._in_flight[self._in_flight.next_step_id - 1]
        return [chunk.state.request for chunk in step.chunks if chunk.is_first]

    def requests_in_flight(self) -> list[Request]:
        """Return the unfinished requests that are in steps in flight, each once, the oldest step's first."""
        states = [state for step in self._in_flight for state in step.states]
        return [state.request for state in dict.fromkeys(states) if not state.request.finish_reason]

    def update(self, result: StepResult) -> list[RequestUpdate]:
        """Take in the oldest dispatched step's result; return what it brought to unfinished requests.

        Rows yield `num_valid` tokens, 0 for chunks that are not the last of their prefill, and where a grammar's mask
        came too late: such a row tries again in its next step. Tokens after the one that ends a request are dropped.
        """
        step = self._running.collect(result.step_id)
        token_ids: list[list[int]] = result.token_ids.tolist()
        num_valid: list[int] = result.num_valid.tolist()
        assert len(num_valid) == len(step.decoding) + len(step.chunks)
        if self._limits.max_drafts and step.decoding:
            self._drafts.note(step, result)
        updates: list[RequestUpdate] = []
        width = 1 + step.num_drafts
        logprobs = StepLogprobsReader(result, len(step.decoding), width) if len(result.logprobs) else None
        draft_ids: list[list[int]] | None = result.draft_ids.tolist() if len(result.draft_ids) else None
        for index, (state, tokens, count) in enumerate(zip(step.decoding, token_ids, num_valid, strict=False)):
            state.num_in_flight_yields -= 1
            state.max_in_flight_tokens -= width
            request = state.request
            if request.finish_reason or not (count or state.has_grammar):
                continue
            taken = self._take(state, tokens[:count]) if count else []
            if request.finish_reason is FinishReason.ERROR:
                continue
            self._counters.num_late_masks += not count
            if logprobs is None and not state.has_grammar:
                updates.append(RequestUpdate(request, taken, request.finish_reason))
            else:
                updates.append(_update(state, index, taken, logprobs, draft_ids))
        for index, chunk in enumerate(step.chunks, len(step.decoding)):
            state = chunk.state
            if chunk.is_last:
                state.num_in_flight_yields -= 1
                state.max_in_flight_tokens -= 1
            if state.request.finish_reason:
                continue
            count = num_valid[index] if chunk.is_last else 0
            self._counters.num_late_masks += chunk.is_last and not count
            taken = self._take(state, token_ids[index][:count]) if count else []
            if state.request.finish_reason is FinishReason.ERROR:
                continue
            update = _update(state, index, taken, logprobs, draft_ids if chunk.is_last else None)
            if update.is_news or (chunk.is_last and state.has_grammar):
                updates.append(update)
        return updates

    def stats(self) -> SchedulerStats:
        """Return the state of the scheduler, and its counters since the start."""
        groups, drafts, limits = self._kv.groups, self._drafts.counts, self._limits.groups
        copied_out = [group.in_cpu_memory.num_copied_out for group in groups]
        copied_in = [group.in_cpu_memory.num_copied_in for group in groups]
        snapshots, num_snapshots_out, num_snapshots_in = self._kv.snapshots, 0, 0
        if snapshots is not None:
            in_cpu_memory = snapshots.in_cpu_memory
            num_snapshots_out, num_snapshots_in = in_cpu_memory.num_copied_out, in_cpu_memory.num_copied_in
        num_drafted, num_accepted = drafts.num_drafted, drafts.num_accepted
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._queue) + len(self.items),
            num_waiting_for_items=len(self.items),
            num_item_tokens=self.items.num_stored_tokens,
            num_query_items=self.items.num_query_items,
            num_hit_items=self.items.num_hit_items,
            num_in_flight=len(self._in_flight),
            num_blocks=sum(group.num_blocks for group in limits),
            num_free_blocks=sum(group.pool.num_free for group in groups),
            kv_usage=1 - min(group.pool.num_free / group.num_usable for group in groups),
            num_cpu_blocks=self._limits.num_cpu_blocks,
            num_used_cpu_blocks=sum(len(group.in_cpu_memory) for group in groups),
            num_snapshots=0 if snapshots is None else len(snapshots),
            num_cpu_snapshots=0 if snapshots is None else len(snapshots.in_cpu_memory),
            num_blocks_copied_out=sum(copied_out),
            num_blocks_copied_in=sum(copied_in),
            num_snapshots_copied_in=num_snapshots_in,
            num_cpu_hit_tokens=max(copied_in) * self._limits.block_size,
            num_copied_bytes=sum(
                (out + back) * group.block_bytes for group, out, back in zip(limits, copied_out, copied_in, strict=True)
            )
            + (num_snapshots_out + num_snapshots_in) * self._limits.snapshot_bytes,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
            num_verified_rows=drafts.num_rows,
            num_missed_rows=self._drafts.num_missed_rows,
            drafted_by_position=drafts.drafted_by_position,
            accepted_by_position=drafts.accepted_by_position,
            acceptance_rate=num_accepted / max(num_drafted, 1),
            acceptance_length=1 + num_accepted / max(drafts.num_rows, 1),
            **asdict(self._counters),
        )

    def check_integrity(self) -> None:
        """Assert everything that must hold between two calls. For tests: it takes about a millisecond."""
        running, waiting = list(self._running), [*self._queue, *self.items]
        assert len(running) + len(waiting) == len(self._states)
        assert {*running, *waiting} == set(self._states.values())
        assert all(state.row == NO_ROW and not state.tables for state in waiting)
        self._running.check_integrity()
        self._queue.check_integrity(running)
        self._in_flight.check_integrity([*running, *waiting], self._limits.max_steps_per_cohort)

    def _plan_step(self, cohort: Cohort, newest_feedback: int) -> StepPlan | None:
        """Plan a step of the cohort and count it as in flight; None when it would be empty.

        Only rows that yielded their last token in step `newest_feedback` or before may decode.
        """
        running, in_flight, limits = self._running, self._in_flight, self._limits
        step_id, num_drafts = in_flight.next_step_id, 0
        if limits.max_drafts and cohort.states:
            num_drafts = self._drafts.num_drafts_of(cohort, self._kv.num_free)
        decoding = self._take_decode_rows(cohort, num_drafts, newest_feedback)
        chunks: list[Chunk] = []
        if self._queue.states or running.prefilling:
            chunks = self._prefill.take_chunks(decoding, num_drafts, in_flight.last_collected)
        if not decoding and not chunks:
            return None
        step = InFlightStep(step_id, cohort, num_drafts if decoding else 0, decoding, chunks)
        wait_us = 0 if running.num_without_grammar else MAX_MASK_WAIT_US
        snapshots = self._kv.snapshots
        plan = build_plan(
            step,
            wait_us,
            self._kv.take_copies() if self._keeps_cpu_blocks else NO_BYTES,
            NO_BYTES if snapshots is None else snapshots.take_copies(step_id),
        )
        for state in decoding:
            state.last_step = state.last_yield_step = step_id
            state.num_in_flight_yields += 1
            state.max_in_flight_tokens += 1 + step.num_drafts
        for chunk in chunks:
            running.note_prefilled(chunk, step)
        in_flight.append(step)
        running.cohorts.note_dispatched(cohort)
        self._counters.num_steps += 1
        self._counters.num_prefill_chunks += len(chunks)
        return plan

    def _take_decode_rows(self, cohort: Cohort, num_drafts: int, newest_feedback: int) -> list[RequestState]:
        """Return the rows of the cohort that decode in its next step; blocks are reserved for all that they may write.

        Args:
            cohort: Whose turn it is.
            num_drafts: K.
            newest_feedback: Only rows that yielded their last token in this step or before are chosen.
        """
        chosen: list[RequestState] = []
        max_steps = self._limits.max_steps_per_cohort
        num_ahead = num_drafts + self._limits.num_lookahead_tokens
        for state in cohort.states.copy():  # a preemption takes rows out
            if state.last_yield_step > newest_feedback or state.num_in_flight_yields >= max_steps:
                continue
            if state.num_tokens + state.num_in_flight_yields >= state.limit:
                continue  # the steps in flight bring it to its limit
            num_tokens = min(state.num_tokens + state.max_in_flight_tokens + num_ahead, state.limit)
            if num_tokens > state.num_held_tokens and not self._make_room(state, num_tokens, chosen):
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
            if state.num_in_flight_yields:
                return False
            if any(other.num_tokens + other.num_in_flight_yields >= other.limit for other in self._running):
                return False  # blocks are about to become free
            victim = WaitingQueue.last_of(self._running)
            # Its row and blocks go; its known tokens are computed again later.
            self._running.stop(victim)
            self.items.push(victim)
            victim.request.num_preemptions += 1
            self._counters.num_preemptions += 1
            if victim in chosen:
                chosen.remove(victim)
        return False

    def _take(self, state: RequestState, token_ids: list[int]) -> list[int]:
        """Take in what a row yielded; return what its request keeps."""
        taken = take_tokens(state, token_ids)
        self._counters.num_generated_tokens += len(taken)
        reason = state.request.finish_reason
        if state.row == NO_ROW:
            self.items.note_growth(state, len(taken))
        elif reason is not FinishReason.ERROR:
            # All but the last token were computed by steps whose results are in.
            self._kv.take_computed(state)
        if reason:
            if reason is FinishReason.ERROR:
                self.without_logits.append(state.request)
            elif state.row != NO_ROW:  # the next turn of a conversation begins with this one
                # Stages go on from all tokens of a step, also where the request ends before the last of them.
                num_left, num_ahead = len(token_ids) - len(taken), state.max_in_flight_tokens
                self._kv.save_state(state, state.num_tokens, num_ahead + num_left if num_ahead else 0)
            self._end(state)
        return taken

    def _end(self, state: RequestState) -> None:
        del self._states[state.request.request_id]
        if state.row == NO_ROW:
            self.items.remove(state)
        else:
            self._running.stop(state)


def _update(
    state: RequestState,
    index: int,
    taken: list[int],
    logprobs: StepLogprobsReader | None,
    draft_ids: list[list[int]] | None,
) -> RequestUpdate:
    """Return what a step brought to the request whose row is the step's row `index`."""
    drafts: list[int] | None = None
    if state.has_grammar:
        drafts = draft_ids[index] if draft_ids is not None else []
    if logprobs is None:
        return RequestUpdate(state.request, taken, state.request.finish_reason, draft_ids=drafts)
    update = logprobs.update(state, index, taken)
    update.draft_ids = drafts
    return update


def take_tokens(state: RequestState, token_ids: list[int]) -> list[int]:
    """Append new tokens to the request's output, up to the one that ends it; return those that were taken.

    The ending token is kept, and the request's `finish_reason` set. A token that is EOS and stop token counts as EOS.
    A negative id says that the logits were not finite: the request ends with an error, which the caller reports.
    """
    num_taken, reason = 0, FinishReason.NONE
    for token_id in token_ids:
        if token_id < 0:
            reason = FinishReason.ERROR
            break
        num_taken += 1
        if token_id in state.end_token_ids:
            reason = FinishReason.STOP
        elif state.num_tokens + num_taken >= state.limit:
            reason = FinishReason.LENGTH
        else:
            continue
        break
    if num_taken < len(token_ids):
        token_ids = token_ids[:num_taken]
    request = state.request
    request.output_token_ids += token_ids
    request.finish_reason = reason
    state.num_tokens += num_taken
    if reason is FinishReason.STOP and (request.params.ignore_eos or token_ids[-1] not in request.eos_token_ids):
        request.stop_token_id = token_ids[-1]
    return token_ids
