"""How many prompt tokens a step computes beside its decode rows.

Token throttling: the prompt tokens that wait are spread over the steps to come, so that all stages always hold
micro-batches of similar size, and a burst of prompts does not land in one of them. The idea is gLLM's
(arXiv:2504.14775). They come in multiples of the smallest chunk: docs/design/0135-chunks-in-whole-rounds.md.
"""

from __future__ import annotations

from raypp.scheduler.limits import SchedulerLimits

SPREAD_PER_STAGE = 4
"""Waiting prompt tokens are spread over this many steps per stage: enough to fill the pipeline with a lone prompt."""

SHORT_OF_KV_SHARE = 0.25
"""Below this share of free KV blocks prompts are slowed down, so that running requests can end first."""


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
    """Return the size of a prompt's next chunk; 0 when it should rather wait for the next step.

    Args:
        num_rest: Tokens of the prompt that remain.
        num_budget_left: What is left of `prefill_budget`.
        min_chunk_tokens: The least that is worth a chunk of its own.
        step_is_full: Whether what is left is all that the step can hold, throttled or not.
    """
    if num_rest <= num_budget_left:
        return num_rest
    return num_budget_left if step_is_full or num_budget_left >= min_chunk_tokens else 0
