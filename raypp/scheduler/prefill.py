"""Chooses the prompt chunks of a step: first those of prefills under way, then those of requests that it admits.

How much a step takes of them, `StepBudget` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypp.scheduler.kv_blocks import KvBlocks
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.request_state import RequestState, WaitingQueue
from raypp.scheduler.running import Chunk, RunningRequests
from raypp.scheduler.scheduler_stats import Counters
from raypp.scheduler.step_budget import StepBudget, StepPredictor, StepWork, Waiting, prompt_pairs


class PrefillChooser:
    """Cuts prompts into chunks and admits waiting requests. Chunks need no feedback, so any step may carry them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KvBlocks,
        queue: WaitingQueue,
        running: RunningRequests,
        counters: Counters,
        predictor: StepPredictor,
    ) -> None:
        self._limits = limits
        self._max_step_rows = limits.max_step_rows
        self._kv = kv
        self._queue = queue
        self._running = running
        self._counters = counters
        self._predictor = predictor

    def take_chunks(self, decoding: Sequence[RequestState], num_drafts: int, last_collected: int) -> list[Chunk]:
        """Return the chunks of a step; the requests that they admit are running from now on.

        Args:
            decoding: The rows that decode in it.
            num_drafts: K, of each.
            last_collected: The newest step whose result was collected.
        """
        prefilling, num_rows_left = self._running.prefilling, self._max_step_rows - len(decoding)
        if not num_rows_left or not (prefilling or (self._queue and self._running.num_free_rows)):
            return []
        budget = StepBudget(
            self._limits,
            self._predictor,
            _work_of(decoding, num_drafts),
            self._waiting(),
            free_kv_share=self._kv.free_share,
            any_decodes=len(self._running) > len(prefilling),
        )
        chunks: list[Chunk] = []
        unfinished = iter(list(prefilling))  # an admission makes it longer
        while budget.has_room and len(chunks) < num_rows_left:
            if (state := next(unfinished, None)) is not None:
                chunk = self._continue(state, budget)
            else:
                chunk = self._admit(budget, last_collected)
            if chunk is None:
                break
            chunks.append(chunk)
            budget.take(chunk.start, chunk.num_tokens)
            if not chunk.is_last:
                break  # it was cut to all that there is room for
        return chunks

    def _waiting(self) -> Waiting:
        """Return what is left of prefills under way, and of waiting prompts as many as there are rows for."""
        queue, num_tokens, num_pairs = self._queue, 0, 0
        for state in self._running.prefilling:
            num_rest = state.num_prefill_tokens - state.num_prefilled_tokens
            num_tokens += num_rest
            num_pairs += prompt_pairs(state.num_prefilled_tokens, num_rest)
        num_queued, num_free_rows = len(queue), self._running.num_free_rows
        if num_queued:
            num_tokens += queue.num_tokens * min(num_queued, num_free_rows) // num_queued
        return Waiting(num_tokens, num_pairs, some_lack_rows=num_queued > num_free_rows)

    def _continue(self, state: RequestState, budget: StepBudget) -> Chunk | None:
        start, end = state.num_prefilled_tokens, state.num_prefill_tokens
        num_tokens = self._chunk_tokens(state, start, end - start, budget)
        if num_tokens:
            num_tokens = self._kv.hold_chunk(state, num_tokens, len(self._running) - 1)
        return Chunk(state, start, num_tokens, start + num_tokens == end, is_first=False) if num_tokens else None

    def _chunk_tokens(self, state: RequestState, start: int, num_rest: int, budget: StepBudget) -> int:
        """Return the tokens of a request's next chunk; 0: it should wait. Images that may not be cut come whole."""
        num_tokens = self._kv.to_snapshot(state, start, budget.chunk_tokens(start, num_rest))
        items = state.request.items
        if not num_tokens or items is None or not self._limits.whole_item_tokens:
            return num_tokens
        end = items.end_between(start, start + num_tokens)
        return end - start if end > start else budget.whole(items.end_of_item(start) - start)

    def _admit(self, budget: StepBudget, last_collected: int) -> Chunk | None:
        """Give the next waiting request a row and blocks, and return its first chunk; None when it has to wait."""
        if not self._queue or not self._running.num_free_rows:
            return None
        state = self._queue.head
        if state.last_step > last_collected:
            return None  # it was preempted, and a step in flight may still yield a token for it
        # A block for each running row stays free: rows grow, and would else preempt the new request right away.
        num_reserved = len(self._running)
        if not self._kv.may_admit(state, num_reserved):
            return None
        prefix = self._kv.find_prefix(state)
        if self._kv.is_being_computed(state, prefix.num_blocks, self._running.prefilling):
            return None
        num_cached_tokens = prefix.num_blocks * self._limits.block_size
        num_rest = state.num_tokens - num_cached_tokens
        num_tokens = self._chunk_tokens(state, num_cached_tokens, num_rest, budget)
        if num_tokens:
            num_tokens = self._kv.try_admit(state, prefix, num_tokens, num_reserved)
        if not num_tokens:
            return None
        self._queue.remove(state)
        row_last_step = self._running.start(state, num_cached_tokens)
        self._kv.restore_state(state, prefix)
        self._count(state, num_cached_tokens)
        is_last = num_tokens == num_rest
        return Chunk(state, num_cached_tokens, num_tokens, is_last, is_first=True, row_last_step=row_last_step)

    def _count(self, state: RequestState, num_cached_tokens: int) -> None:
        counters, request = self._counters, state.request
        counters.num_prefills += 1
        if self._limits.enable_prefix_caching:
            counters.num_prefix_query_tokens += state.num_tokens
            counters.num_prefix_hit_tokens += num_cached_tokens
        if not request.is_admitted_again:
            request.num_cached_tokens = num_cached_tokens
            counters.num_prompt_tokens += len(request.prompt_token_ids)


def _work_of(decoding: Sequence[RequestState], num_drafts: int) -> StepWork:
    num_tokens = len(decoding) * (1 + num_drafts)
    num_kv = sum([state.num_tokens + state.max_in_flight_tokens for state in decoding])
    return StepWork(len(decoding), num_tokens, num_kv, num_logits=num_tokens)
