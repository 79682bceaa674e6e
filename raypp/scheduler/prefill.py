"""Chooses the prompt chunks of a step: first those of prefills under way, then those of requests that it admits.

Token throttling: the prompt tokens that wait are spread over the steps to come. So all stages always hold micro-batches
of similar size, and a burst of prompts does not fill one step. The idea is gLLM's (arXiv:2504.14775). Budgets are
multiples of the smallest chunk: docs/design/0135-chunks-in-whole-rounds.md.
"""

from __future__ import annotations

from raypp.scheduler.in_flight import Chunk
from raypp.scheduler.kv_blocks import KvBlocks
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.request_state import RequestState
from raypp.scheduler.running import RunningRequests
from raypp.scheduler.scheduler_stats import Counters
from raypp.scheduler.waiting_queue import WaitingQueue

SPREAD_PER_STAGE = 4
"""Waiting prompt tokens are spread over this many steps per stage: enough to fill the pipeline with a lone prompt."""

SHORT_OF_KV_SHARE = 0.25
"""Below this share of free KV blocks prompts are slowed down, so that running requests can end first."""


class PrefillChooser:
    """Cuts prompts into chunks and admits waiting requests. Chunks need no feedback, so any step may carry them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KvBlocks,
        queue: WaitingQueue,
        running: RunningRequests,
        counters: Counters,
    ) -> None:
        self._limits = limits
        self._kv = kv
        self._queue = queue
        self._running = running
        self._counters = counters

    def take_chunks(self, num_rows_left: int, num_tokens_left: int, last_collected: int) -> list[Chunk]:
        """Return the chunks of a step; the requests that they admit are running from now on.

        Args:
            num_rows_left: Rows that the step has room for.
            num_tokens_left: Tokens that it has room for.
            last_collected: The newest step whose result was collected.
        """
        prefilling, queue = self._running.prefilling, self._queue
        if not (prefilling or queue) or not num_rows_left or not num_tokens_left:
            return []
        num_unfinished = sum(state.num_prefill_tokens - state.num_prefilled_tokens for state in prefilling)
        free_share = self._kv.num_free / self._limits.num_usable_blocks
        budget = prefill_budget(self._limits, queue.num_tokens + num_unfinished, num_tokens_left, free_share)
        step_is_full = budget == num_tokens_left
        chunks: list[Chunk] = []
        unfinished = iter(list(prefilling))  # an admission makes it longer
        while budget and len(chunks) < num_rows_left:
            if (state := next(unfinished, None)) is not None:
                chunk = self._continue(state, budget, step_is_full)
            else:
                chunk = self._admit(budget, step_is_full, last_collected)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return chunks

    def _continue(self, state: RequestState, budget: int, step_is_full: bool) -> Chunk | None:
        start, end = state.num_prefilled_tokens, state.num_prefill_tokens
        num_tokens = self._chunk_tokens(end - start, budget, step_is_full)
        return Chunk(state, start, num_tokens, start + num_tokens == end, is_first=False) if num_tokens else None

    def _admit(self, budget: int, step_is_full: bool, last_collected: int) -> Chunk | None:
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
        if self._kv.is_being_computed(state, len(prefix), self._running.prefilling):
            return None
        num_cached_tokens = len(prefix) * self._limits.block_size
        num_rest = state.num_tokens - num_cached_tokens
        num_tokens = self._chunk_tokens(num_rest, budget, step_is_full)
        if not num_tokens or not self._kv.try_admit(state, prefix, num_reserved):
            return None
        self._queue.remove(state)
        row_last_step = self._running.start(state, num_cached_tokens)
        self._count(state, num_cached_tokens)
        is_last = num_tokens == num_rest
        return Chunk(state, num_cached_tokens, num_tokens, is_last, is_first=True, row_last_step=row_last_step)

    def _chunk_tokens(self, num_rest: int, budget: int, step_is_full: bool) -> int:
        return chunk_tokens(num_rest, budget, self._limits.min_prefill_chunk_tokens, step_is_full)

    def _count(self, state: RequestState, num_cached_tokens: int) -> None:
        counters, request = self._counters, state.request
        counters.num_prefills += 1
        if self._limits.enable_prefix_caching:
            counters.num_prefix_query_tokens += state.num_tokens
            counters.num_prefix_hit_tokens += num_cached_tokens
        if not request.is_admitted_again:
            request.num_cached_tokens = num_cached_tokens
            counters.num_prompt_tokens += len(request.prompt_token_ids)


def prefill_budget(limits: SchedulerLimits, num_waiting_tokens: int, num_tokens_left: int, free_kv_share: float) -> int:
    """Return how many prompt tokens the next step may compute.

    Args:
        limits: The fixed sizes.
        num_waiting_tokens: Prompt tokens that no step has been dispatched for.
        num_tokens_left: What the decode rows left of the step's tokens.
        free_kv_share: Free KV blocks in 0..1 of all.
    """
    if limits.num_stages == 1:
        return num_tokens_left
    pace = min(1.0, free_kv_share / SHORT_OF_KV_SHARE)
    spread = num_waiting_tokens * pace / (SPREAD_PER_STAGE * limits.num_stages)
    num_chunks = max(1, round(spread / limits.min_prefill_chunk_tokens))
    return min(num_chunks * limits.min_prefill_chunk_tokens, num_tokens_left)


def chunk_tokens(num_rest: int, num_budget_left: int, min_chunk_tokens: int, step_is_full: bool) -> int:
    """Return the tokens of a prompt's next chunk; 0 when it should wait for the next step.

    Args:
        num_rest: Tokens of the prompt that remain.
        num_budget_left: What is left of `prefill_budget`.
        min_chunk_tokens: The least that is worth a chunk of its own.
        step_is_full: Whether the budget is all that the step has room for.
    """
    if num_rest <= num_budget_left:
        return num_rest
    return num_budget_left if step_is_full or num_budget_left >= min_chunk_tokens else 0
