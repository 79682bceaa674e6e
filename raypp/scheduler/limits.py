"""The limits of every plan: sizes of the pipeline, of its steps and of its KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raypp.messages import BlockGroup

STEPS_PER_COHORT = 2
"""Steps of one cohort in flight: one that runs, and one queued after it so that no stage waits for the driver."""

MAX_MASK_WAIT_US = 20_000
"""How long a step waits for masks when all running requests have grammars. It is longer than masks usually take, since
a row without its mask yields nothing; and limited, since a mask that never comes must not stop the other rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """The fixed sizes that every plan respects."""

    num_stages: int
    max_num_seqs: int
    """Rows: running requests over all cohorts."""
    max_num_batched_tokens: int
    """Tokens of one step."""
    max_model_len: int
    """Tokens of one request, prompt and output together."""
    block_size: int
    """Tokens per KV block."""
    groups: tuple[BlockGroup, ...]
    """Layers that keep the same tokens, and their KV blocks."""
    enable_prefix_caching: bool
    max_copied_blocks: int = 1
    """Of these, the most that a plan brings back while other requests run: their next step waits for the copies."""
    min_prefill_chunk_tokens: int = 512
    """The smallest chunk of a prompt, unless rows decode, the step is full or the prompt ends with it."""
    max_itl_ms: float = math.inf
    """How long a decode row may wait for its next token because of prompts."""
    max_steps_per_cohort: int = STEPS_PER_COHORT
    """Steps of one cohort in flight while no prompt waits or is computed; else there are STEPS_PER_COHORT."""
    max_drafts: int = 0
    """The most drafts that a decode row may verify in one step."""
    num_lookahead_tokens: int = 0
    """Positions after a row's newest token that a draft head writes while it drafts."""
    caches_next_token: bool = False
    """Whether a block's content also depends on the token after it, as in a draft head's cache. Requests then share the
    block only if they agree on that token, too."""
    num_snapshots: int | None = None
    """States of rows that are kept for prompts that begin alike; None: no layer has a state per row."""
    num_cpu_snapshots: int = 0
    """Those that every stage has room for in CPU memory."""
    snapshot_bytes: int = 0
    """Of one on all stages together; for reports alone."""
    vocab_size: int = 2**31
    """Token ids are smaller than this."""
    max_item_tokens: int = 0
    """Rows of images' embeddings that the first stage may hold; 0 without an encoder."""
    whole_item_tokens: int = 0
    """Of the largest image, if no chunk of a prompt may end within one, whose tokens see all of it; else 0."""

    def __post_init__(self) -> None:
        assert self.num_stages >= 1
        assert self.max_num_seqs >= 1
        assert self.max_num_batched_tokens >= self.max_step_rows, "a full step has no token for some of its rows"
        assert self.max_model_len >= 2
        assert self.block_size >= 1
        assert self.groups
        assert all(group.num_blocks >= 2 for group in self.groups)
        assert self.max_copied_blocks >= 1
        assert not self.num_cpu_blocks or self.enable_prefix_caching, "blocks in CPU memory are found by their keys"
        assert self.min_prefill_chunk_tokens >= 1
        assert self.max_itl_ms > 0
        assert self.max_steps_per_cohort >= STEPS_PER_COHORT
        assert self.max_drafts >= 0
        assert self.max_item_tokens >= 0
        assert self.num_snapshots is None or self.num_snapshots >= 1 or not self.enable_prefix_caching
        assert (self.num_snapshots and self.num_cpu_blocks) or not self.num_cpu_snapshots, "a prompt needs all of them"

    @property
    def max_step_rows(self) -> int:
        """The most rows of one step, and of one cohort."""
        return -(-self.max_num_seqs // self.num_stages)

    @property
    def num_cpu_blocks(self) -> int:
        """KV blocks in CPU memory of every stage, of all groups."""
        return sum(group.num_cpu_blocks for group in self.groups)

    @property
    def max_request_tokens(self) -> int:
        """The most tokens that the KV cache holds of a request which is alone."""
        return min(self._held_tokens(group) for group in self.groups)

    def num_fitting(self, num_tokens: int) -> int:
        """Return how many requests of so many tokens the KV cache holds."""
        return min((group.num_blocks - 1) // self.num_held_blocks(group, num_tokens) for group in self.groups)

    def num_held_blocks(self, group: BlockGroup, num_tokens: int) -> int:
        """Return how many blocks of a group a decoding request of so many tokens has, at most."""
        num_blocks = self.num_blocks_for(num_tokens)
        if group.window is None:
            return num_blocks
        num_ahead = self.max_steps_per_cohort * (1 + self.max_drafts) + self.num_lookahead_tokens
        return min(num_blocks, self.num_blocks_for(group.window + num_ahead) + 1)

    @property
    def max_whole_item_tokens(self) -> int:
        """The most tokens of an image that one step computes, whatever decodes beside it; drafts leave room."""
        most = self.max_num_batched_tokens - (self.max_step_rows - 1)
        for group in self.groups:
            if group.window is not None:
                num_held = (group.num_blocks - 2) * self.block_size  # of a request that is alone
                most = min(most, num_held - group.window - self.num_lookahead_tokens)
        return most

    def _held_tokens(self, group: BlockGroup) -> int:
        """Return the most tokens of a request that is alone, as this group has it."""
        num_usable = group.num_blocks - 1
        if self.num_held_blocks(group, self.max_model_len) <= num_usable:
            return max(self.max_model_len, num_usable * self.block_size)
        return num_usable * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)
