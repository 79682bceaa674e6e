"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What only ever grows, since the engine's start."""

    num_steps: int = 0
    """Steps dispatched."""
    num_prefills: int = 0
    """Times that a request got a row; a preempted one gets one again."""
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Of the requests that got a row; each request counts once."""
    num_generated_tokens: int = 0
    """That were collected and kept."""
    num_late_masks: int = 0
    """Row-steps that yielded nothing because the mask of their grammar came too late."""
    num_prefix_query_tokens: int = 0
    """Tokens that the prefix cache was asked for, over all prefills."""
    num_prefix_hit_tokens: int = 0
    """Of these, tokens that it had."""


@dataclass(kw_only=True, slots=True)
class SchedulerStats(Counters):
    """The state of the scheduler at one moment, and its counters since the start."""

    num_running: int
    """Requests that have a row."""
    num_waiting: int
    """Requests that have none, those that wait for images included."""
    num_waiting_for_items: int
    """Of these, requests whose images' embeddings are not all on the first stage."""
    num_item_tokens: int
    """Rows of embeddings on the first stage, those under way included."""
    num_query_items: int
    """Pictures that requests needed, since the start."""
    num_hit_items: int
    """Of these, images whose embeddings were there already, or under way."""
    num_in_flight: int
    """Steps dispatched and not collected."""
    num_blocks: int
    """KV blocks of every stage, the null block included."""
    num_free_blocks: int
    """KV blocks that no request uses; cached ones are among them."""
    kv_usage: float
    """The share of KV blocks in use, 0..1."""
    num_cpu_blocks: int
    """KV blocks that every stage has room for in CPU memory."""
    num_used_cpu_blocks: int
    """Of these, the ones that hold something."""
    num_snapshots: int
    """Snapshots of rows' states, on the device of every stage."""
    num_cpu_snapshots: int
    """Those in CPU memory of every stage; some are on the device, too."""
    num_blocks_copied_out: int
    """KV blocks that went to CPU memory, since the start; each on every stage, like the following."""
    num_blocks_copied_in: int
    """KV blocks that came back."""
    num_snapshots_copied_in: int
    """Snapshots that came back."""
    num_cpu_hit_tokens: int
    """Those whose KV came back, for requests that found it there; nearly all are of `num_prefix_hit_tokens`, too."""
    num_copied_bytes: int
    """Both ways, on all stages together."""
    num_draft_tokens: int
    """Drafts that were verified. Rows for which nothing was proposed verify arbitrary tokens, which do not count."""
    num_accepted_tokens: int
    """Of these, the model's own tokens."""
    num_verified_rows: int
    """Row-steps that verified drafts: one row in one step each."""
    num_missed_rows: int
    """Row-steps with K > 0 for which nothing was proposed."""
    drafted_by_position: list[int]
    """`num_draft_tokens` by their place among a row's drafts, [K_max]."""
    accepted_by_position: list[int]
    """`num_accepted_tokens` likewise."""
    acceptance_rate: float
    """Accepted drafts of those that were verified, 0..1; 0 without any."""
    acceptance_length: float
    """Tokens per row-step that verified drafts, at least 1."""
