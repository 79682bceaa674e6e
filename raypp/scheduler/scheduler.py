"""The scheduler: decides what every step computes, from upper bounds, without waiting for any result.

    add, abort -> WaitingQueue --admission--> running: prefilling --last chunk--> decoding, in one of the Cohorts
                       ^                                                              |
                       +------------------------- preemption -------------------------+

    schedule() -> StepPlan   the next cohort's decode rows, then prompt chunks; counted as in flight
    update(StepResult)       in step order: tokens reach their requests, requests end, rows and bounds are corrected

It knows requests, rows, blocks and step ids; it does not know models, tensors, processes or clocks.
"""

from __future__ import annotations

from dataclasses import asdict

from raypp.errors import RequestError
from raypp.messages import StepPlan, StepResult
from raypp.scheduler.cohorts import Cohort, Cohorts
from raypp.scheduler.draft_policy import DraftPolicy, FixedDrafts
from raypp.scheduler.ending import end_token_ids, take_tokens
from raypp.scheduler.in_flight import Chunk, InFlightStep, InFlightSteps
from raypp.scheduler.kv_blocks import KvBlocks
from raypp.scheduler.limits import MAX_STEPS_PER_COHORT, SchedulerLimits
from raypp.scheduler.plan_builder import build_plan
from raypp.scheduler.request import Request, RequestUpdate
from raypp.scheduler.request_state import NO_ROW, RequestState
from raypp.scheduler.row_pool import RowPool
from raypp.scheduler.stats import Counters, SchedulerStats
from raypp.scheduler.token_budget import chunk_tokens, prefill_budget
from raypp.scheduler.waiting_queue import WaitingQueue
from raypp.types import FinishReason

_NO_DRAFTS = FixedDrafts(0)


class Scheduler:
    """Plans the steps of one engine.

    Args:
        limits: The fixed sizes.
        draft_policy: Chooses the drafts per decode row of each step, up to `limits.max_drafts`.
    """

    def __init__(self, limits: SchedulerLimits, draft_policy: DraftPolicy = _NO_DRAFTS) -> None:
        self._limits = limits
        self._draft_policy = draft_policy
        self._kv = KvBlocks(limits)
        self._rows = RowPool(limits.max_num_seqs)
        self._cohorts = Cohorts(limits.num_stages, limits.max_step_rows)
        self._in_flight = InFlightSteps()
        self._states: dict[str, RequestState] = {}  # all unfinished requests
        self._queue = WaitingQueue()
        self._running: dict[RequestState, None] = {}  # those with a row; a set that keeps its order
        self._prefilling: list[RequestState] = []  # of the running ones, oldest first
        self._num_added = 0
        self._counters = Counters()

    @property
    def num_in_flight(self) -> int:
        """Steps dispatched and not collected."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._states)

    def add(self, request: Request) -> None:
        """Take in a request. Whether its tokens are in the vocabulary is for others to check.

        Raises:
            RequestError: it can never run.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        limit = min(num_prompt_tokens + request.params.max_tokens, self._limits.max_model_len)
        self._check_can_run(request, limit)
        state = RequestState(request, self._num_added, limit, end_token_ids(request), num_prompt_tokens)
        self._num_added += 1
        self._states[request.request_id] = state
        self._queue.push(state)

    def abort(self, request_id: str) -> bool:
        """End a request now; return False when there is no such unfinished request."""
        state = self._states.get(request_id)
        if state is None:
            return False
        state.request.finish_reason = FinishReason.ABORT
        self._end(state)
        return True

    def schedule(self) -> StepPlan | None:
        """Return the next step to dispatch, or None when nothing may be dispatched now."""
        cohorts = self._cohorts.in_turn()
        if not self._states or not cohorts:
            return None
        self._cohorts.rebalance()
        step_id = self._in_flight.next_step_id
        # Rows whose last token is fed back by the time of this step, and prompts: no stage will wait.
        for cohort in cohorts:
            if (plan := self._plan_step(cohort, step_id - self._limits.num_stages)) is not None:
                return plan
        # The pipeline is not full: the others, as nothing is delayed by a stage that waits for them.
        for cohort in cohorts:
            if cohort.states and (plan := self._plan_step(cohort, step_id - 1)) is not None:
                return plan
        return None

    def update(self, result: StepResult) -> list[RequestUpdate]:
        """Take in the oldest dispatched step's result; return what it brought to unfinished requests.

        Rows yield `num_valid` tokens, 0 for chunks that are not the last of their prefill. Tokens after the one that
        ends a request are dropped.
        """
        step = self._in_flight.collect(result.step_id)
        step.cohort.num_in_flight -= 1
        for row in step.freed_rows:
            self._rows.give_back(row, step.step_id)
        token_ids: list[list[int]] = result.token_ids.tolist()
        num_valid: list[int] = result.num_valid.tolist()
        updates: list[RequestUpdate] = []
        width = 1 + step.num_drafts
        for state, tokens, count in zip(step.decoding, token_ids, num_valid, strict=False):
            state.num_in_flight_yields -= 1
            state.max_in_flight_tokens -= width
            if count and not state.request.finish_reason:
                updates.append(self._take(state, tokens[:count]))
        if step.num_drafts:
            self._count_drafts(step, result)
        for index, chunk in enumerate(step.chunks, len(step.decoding)):
            if chunk.is_last:
                state = chunk.state
                state.num_in_flight_yields -= 1
                state.max_in_flight_tokens -= 1
                if num_valid[index] and not state.request.finish_reason:
                    updates.append(self._take(state, token_ids[index][: num_valid[index]]))
        return updates

    def stats(self) -> SchedulerStats:
        """Return the state of the scheduler, and its counters since the start."""
        num_free = self._kv.num_free
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._queue),
            num_in_flight=len(self._in_flight),
            num_blocks=self._limits.num_blocks,
            num_free_blocks=num_free,
            kv_usage=1 - num_free / self._limits.num_usable_blocks,
            **asdict(self._counters),
        )

    def check_integrity(self) -> None:
        """Assert everything that must hold between two calls. For tests, and cheap enough to call after each step."""
        running, waiting = list(self._running), list(self._queue)
        assert {*running, *waiting} == set(self._states.values())
        assert len(running) + len(waiting) == len(self._states)
        self._kv.check_integrity(running)
        self._queue.check_integrity(running)
        uncollected = [row for step in self._in_flight for row in step.freed_rows]
        self._rows.check_integrity([state.row for state in running], uncollected)
        assert all(state.row == NO_ROW and not state.blocks for state in waiting)
        assert self._prefilling == [state for state in running if state.is_prefilling]
        decoding = [state for state in running if not state.is_prefilling]
        self._cohorts.check_integrity(decoding, [step.cohort for step in self._in_flight])
        self._in_flight.check_integrity(dict.fromkeys([*running, *waiting]))

    # --- planning ---

    def _plan_step(self, cohort: Cohort, newest_feedback: int) -> StepPlan | None:
        """Plan and count a step of the cohort; None when it would be empty.

        Only rows that yielded their last token in step `newest_feedback` or before may decode.
        """
        num_drafts = self._num_drafts(len(cohort.states))
        decoding = self._choose_decode_rows(cohort, num_drafts, newest_feedback)
        chunks = self._choose_chunks(len(decoding), len(decoding) * (1 + num_drafts))
        if not decoding and not chunks:
            return None
        if not decoding:
            num_drafts = 0
        return self._dispatch(InFlightStep(self._in_flight.next_step_id, cohort, num_drafts, decoding, chunks))

    def _num_drafts(self, num_rows: int) -> int:
        if not num_rows or not self._limits.max_drafts:
            return 0
        affordable = self._limits.max_num_batched_tokens // num_rows - 1
        return min(self._draft_policy.num_drafts(num_rows), self._limits.max_drafts, affordable)

    def _choose_decode_rows(self, cohort: Cohort, num_drafts: int, newest_feedback: int) -> list[RequestState]:
        block_size = self._limits.block_size
        chosen: list[RequestState] = []
        for state in cohort.states.copy():  # a preemption takes rows out
            if state.last_yield_step > newest_feedback or state.num_in_flight_yields >= MAX_STEPS_PER_COHORT:
                continue
            if state.num_tokens + state.num_in_flight_yields >= state.limit:
                continue  # what is in flight ends it
            num_tokens = min(state.num_tokens + state.max_in_flight_tokens + num_drafts, state.limit)
            if num_tokens > len(state.blocks) * block_size and not self._make_room(state, num_tokens, chosen):
                continue
            chosen.append(state)
        return chosen

    def _make_room(self, state: RequestState, num_tokens: int, chosen: list[RequestState]) -> bool:
        """Let a decode row's blocks hold that many tokens, if need be at the cost of the request that came last.

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

    def _choose_chunks(self, num_decode_rows: int, num_decode_tokens: int) -> list[Chunk]:
        num_rows_left = self._limits.max_step_rows - num_decode_rows
        num_tokens_left = self._limits.max_num_batched_tokens - num_decode_tokens
        if not (self._prefilling or self._queue) or not num_rows_left or not num_tokens_left:
            return []
        num_waiting_tokens = self._queue.num_tokens + sum(
            state.num_prefill_tokens - state.num_prefilled_tokens for state in self._prefilling
        )
        free_share = self._kv.num_free / self._limits.num_usable_blocks
        budget = prefill_budget(self._limits, num_waiting_tokens, num_tokens_left, free_share)
        step_is_full = budget == num_tokens_left
        chunks: list[Chunk] = []
        unfinished = iter(self._prefilling.copy())
        while budget and len(chunks) < num_rows_left:
            if (state := next(unfinished, None)) is not None:
                chunk = self._continue_prefill(state, budget, step_is_full)
            else:
                chunk = self._admit(budget, step_is_full)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return chunks

    def _continue_prefill(self, state: RequestState, budget: int, step_is_full: bool) -> Chunk | None:
        start, end = state.num_prefilled_tokens, state.num_prefill_tokens
        num_tokens = chunk_tokens(end - start, budget, self._limits.min_prefill_chunk_tokens, step_is_full)
        return Chunk(state, start, num_tokens, start + num_tokens == end, is_first=False) if num_tokens else None

    def _admit(self, budget: int, step_is_full: bool) -> Chunk | None:
        """Give the next waiting request a row and blocks, and return its first chunk; None when it has to wait."""
        if not self._queue or not self._rows.num_free:
            return None
        state = self._queue.head
        if state.last_step > self._in_flight.last_collected:
            return None  # preempted, and a step in flight may still bring it a token
        # A block for each running row stays free: they grow, and would else preempt the newcomer right away.
        num_reserved = len(self._running)
        if not self._kv.may_admit(state, num_reserved):
            return None
        prefix = self._kv.find_prefix(state)
        num_cached_tokens = len(prefix) * self._limits.block_size
        num_rest = state.num_tokens - num_cached_tokens
        num_tokens = chunk_tokens(num_rest, budget, self._limits.min_prefill_chunk_tokens, step_is_full)
        if not num_tokens or not self._kv.try_admit(state, prefix, num_reserved):
            return None
        self._queue.remove(state)
        self._running[state] = None
        self._prefilling.append(state)
        state.row, row_last_step = self._rows.take()
        state.num_prefill_tokens, state.num_prefilled_tokens = state.num_tokens, num_cached_tokens
        self._count_admission(state, num_cached_tokens)
        is_last = num_tokens == num_rest
        return Chunk(state, num_cached_tokens, num_tokens, is_last, is_first=True, row_last_step=row_last_step)

    def _dispatch(self, step: InFlightStep) -> StepPlan:
        """Return the step's plan, and count it as in flight."""
        step_id = step.step_id
        plan = build_plan(step)
        width = 1 + step.num_drafts
        for state in step.decoding:
            state.last_step = state.last_yield_step = step_id
            state.num_in_flight_yields += 1
            state.max_in_flight_tokens += width
        for chunk in step.chunks:
            self._note_prefilled(chunk, step)
        self._in_flight.append(step)
        self._cohorts.note_dispatched(step.cohort)
        self._counters.num_steps += 1
        self._counters.num_prefill_chunks += len(step.chunks)
        return plan

    def _note_prefilled(self, chunk: Chunk, step: InFlightStep) -> None:
        state = chunk.state
        state.last_step = step.step_id
        state.num_prefilled_tokens += chunk.num_tokens
        self._kv.offer(state, state.num_prefilled_tokens)
        if chunk.is_last:
            state.last_yield_step = step.step_id
            state.num_in_flight_yields += 1
            state.max_in_flight_tokens += 1
            self._prefilling.remove(state)
            self._cohorts.join(state, step.cohort)

    # --- what results and aborts change ---

    def _take(self, state: RequestState, token_ids: list[int]) -> RequestUpdate:
        taken = take_tokens(state, token_ids)
        self._counters.num_generated_tokens += len(taken)
        if state.row == NO_ROW:
            self._queue.note_growth(len(taken))
        else:
            self._kv.offer(state, state.num_tokens - 1)
        if state.request.finish_reason:
            self._end(state)
        return RequestUpdate(state.request, taken)

    def _end(self, state: RequestState) -> None:
        del self._states[state.request.request_id]
        if state.row == NO_ROW:
            self._queue.remove(state)
        else:
            self._stop_running(state)

    def _preempt(self, state: RequestState) -> None:
        """Take a running request's row and blocks away; its known tokens are computed again later."""
        self._stop_running(state)
        state.request.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._queue.push_back_in(state)

    def _stop_running(self, state: RequestState) -> None:
        del self._running[state]
        if state.is_prefilling:
            self._prefilling.remove(state)
        else:
            self._cohorts.leave(state)
        self._kv.release(state)
        # Feedback of a step in flight must not land on the row's next owner.
        if state.last_step > self._in_flight.last_collected:
            self._in_flight[state.last_step].freed_rows.append(state.row)
        else:
            self._rows.give_back(state.row, state.last_step)
        state.row = NO_ROW

    # --- small things ---

    def _check_can_run(self, request: Request, limit: int) -> None:
        request_id, limits = request.request_id, self._limits
        num_prompt_tokens = len(request.prompt_token_ids)
        if not num_prompt_tokens:
            raise RequestError("the prompt is empty", request_id=request_id, got=0, expected="at least one token")
        if num_prompt_tokens >= limits.max_model_len:
            raise RequestError(
                "the prompt is too long",
                request_id=request_id,
                got=f"{num_prompt_tokens} tokens",
                expected=f"fewer than max_model_len = {limits.max_model_len}, which counts the output too",
                hint="shorten the prompt or raise max_model_len",
            )
        if request_id in self._states:
            raise RequestError(
                "a request with this id is running",
                request_id=request_id,
                got=request_id,
                expected="an id that no unfinished request has",
            )
        if limits.num_blocks_for(limit) > limits.num_usable_blocks:
            raise RequestError(
                "the KV cache cannot hold this request even when it is alone",
                request_id=request_id,
                got=f"{num_prompt_tokens} prompt tokens, max_tokens={request.params.max_tokens}",
                expected=f"at most {limits.num_usable_blocks * limits.block_size} tokens, prompt and output together",
                hint="lower max_tokens, or give the KV cache more blocks",
            )

    def _count_admission(self, state: RequestState, num_cached_tokens: int) -> None:
        counters, request = self._counters, state.request
        counters.num_prefills += 1
        if self._limits.enable_prefix_caching:
            counters.num_prefix_query_tokens += state.num_tokens
            counters.num_prefix_hit_tokens += num_cached_tokens
        if not request.num_preemptions:
            request.num_cached_tokens = num_cached_tokens
            counters.num_prompt_tokens += len(request.prompt_token_ids)

    def _count_drafts(self, step: InFlightStep, result: StepResult) -> None:
        for state, num_accepted in zip(step.decoding, result.num_accepted.tolist(), strict=False):
            state.request.num_draft_tokens += step.num_drafts
            state.request.num_accepted_tokens += num_accepted
            self._counters.num_draft_tokens += step.num_drafts
            self._counters.num_accepted_tokens += num_accepted
