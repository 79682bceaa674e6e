"""How much of the waiting prompts a step takes: so many tokens, and so many milliseconds on the slowest stage.

While rows decode, each step costs all of them time, and the stages wait for each other by as much as steps that follow
each other differ. So waiting prompts are spread over the steps to come, by their predicted time: those that rows and a
queue can bring into the pipeline now, since the others wait for a row to end. They are spread over few steps while
every prompt has a row, since somebody waits for each first token, and over more while prompts wait for rows, since
then throughput is all that matters. A step takes at least what makes its fixed costs worth paying, and at most what
makes them small, to the nearest whole tile. While nothing decodes, prompts are cut by tokens alone, in multiples of
the smallest chunk: docs/design/0135-chunks-in-whole-rounds.md. The spreading is gLLM's token throttling
(arXiv:2504.14775), by time: docs/design/0194-steps-of-equal-time.md.

`max_itl_ms` bounds the time of every step besides, of one stage too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.step_predictor import StepPredictor, StepWork, prompt_pairs

SPREAD_PER_STAGE = 4
"""Waiting prompts are spread over this many steps per stage: enough to fill the pipeline with a lone prompt."""

_SPREAD_TO_FIRST_TOKENS = 2
"""... over this many beside decode rows while no prompt waits for a row: fewer make steps differ too much."""

SHORT_OF_KV_SHARE = 0.25
"""Below this share of free KV blocks prompts are slowed down, so that running requests can end first."""

_LEAST_STEPS = 1.75
"""The least time for prompts beside decode rows, in steps of a single prompt token. With less, whoever waits for a
first token waits longer, and each chunk pays for its step again, which may be more than is estimated where a host
starts its operations; with more, decode rows wait and steps differ."""

_MOST_STEPS = 8.0
"""The most time of a step beside decode rows, likewise: its fixed costs are an eighth of it. More gains little and
makes decode rows wait, and when the prompts have run out, the difference to the next step is a bubble."""

_MOST_DECODES = 2.0
"""... or this many times what the decode rows take, if that is more: no more than half of a step is lost to them."""

_SLACK = 1.05
"""A prompt's rest is taken whole if it takes this much more than there is room for: a tiny chunk costs more."""

_PARTS_OF_CHUNK = 8
"""Beside decode rows, the least tokens of a chunk are this part of the smallest chunk."""

_TILE_TOKENS = 128
"""A step that is cut by its time has the multiple of this many tokens that is nearest, if that leaves its last chunk
enough of them: GPUs multiply in tiles, recordings are padded."""

_TILE_SLACK = 1.15
"""A step may take this much more than there is time for, to fill its last tile; deep in a prompt tokens cost more."""


class Waiting(NamedTuple):
    """The prompts that could enter the pipeline now."""

    num_tokens: int
    num_pairs: int
    """Of tokens and those that they attend to, as far as it is known."""
    some_lack_rows: bool = False
    """Whether there are others, which wait for a row."""


class StepBudget:
    """What a step has room for, while prompt chunks fill it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        predictor: StepPredictor,
        decoding: StepWork,
        waiting: Waiting,
        *,
        free_kv_share: float,
        any_decodes: bool,
    ) -> None:
        """Say how much a step may take beside its decode rows.

        Args:
            limits: The fixed sizes.
            predictor: How long steps take.
            decoding: The step's decode rows.
            waiting: The prompts that could enter the pipeline now.
            free_kv_share: Free KV blocks in 0..1 of all.
            any_decodes: Whether any row of the pipeline decodes.
        """
        # Without a bound in milliseconds ratios are all that matters: those of the estimates, which learn nothing. So
        # prompts that are all there before the first step are cut alike in every run, and in every life of an engine.
        self._ms_of = predictor.estimated_ms if math.isinf(limits.max_itl_ms) else predictor.ms
        self._work = decoding
        self._num_tokens = limits.max_num_batched_tokens - decoding.num_tokens
        self._most_ms = math.inf
        self._least_chunk = limits.min_prefill_chunk_tokens
        pace = min(1.0, free_kv_share / SHORT_OF_KV_SHARE)
        self._takes_all_tokens = True
        if limits.num_stages > 1 and any_decodes:
            spread = SPREAD_PER_STAGE if waiting.some_lack_rows else _SPREAD_TO_FIRST_TOKENS
            self._most_ms = self._most_beside_rows(waiting, pace / (spread * limits.num_stages))
        elif limits.num_stages > 1:
            num_spread = spread_tokens(limits, waiting.num_tokens * pace)
            self._takes_all_tokens = num_spread >= self._num_tokens
            self._num_tokens = min(num_spread, self._num_tokens)
        # A row has a step in every round, of one for each stage; also one whose first token is under way.
        self._bound_ms = limits.max_itl_ms / limits.num_stages / _SLACK
        self._most_ms = min(self._most_ms, self._bound_ms)
        if math.isfinite(self._most_ms):
            self._least_chunk = max(1, self._least_chunk // _PARTS_OF_CHUNK)
        self._has_chunks = False

    @property
    def has_room(self) -> bool:
        """Whether another chunk may fit."""
        return self._num_tokens > 0 and (not self._has_chunks or self._fits(0, 1))

    def chunk_tokens(self, start: int, num_rest: int) -> int:
        """Return the tokens of a prompt's next chunk; 0 when it should wait for the next step.

        Args:
            start: Tokens of the prompt before it.
            num_rest: Tokens of the prompt that remain.
        """
        num_tokens = min(num_rest, self._num_tokens)
        if not self._fits(start, num_tokens):
            in_time = self._tokens_in_time(start, num_tokens)
            # Decode rows must not keep prompts away for ever.
            num_tokens = in_time if self._has_chunks else max(in_time, min(num_tokens, self._least_chunk))
        if num_tokens == num_rest or num_tokens >= self._least_chunk:
            return num_tokens
        return num_tokens if self._takes_all_tokens and num_tokens == self._num_tokens else 0

    def take(self, start: int, num_tokens: int) -> None:
        """Count a chunk."""
        self._work = self._with(start, num_tokens)
        self._num_tokens -= num_tokens
        self._has_chunks = True

    def _most_beside_rows(self, waiting: Waiting, share: float) -> float:
        one_ms, decode_ms = self._ms_of(_ONE_TOKEN), self._ms_of(self._work)
        prompts = StepWork(num_prompt_tokens=waiting.num_tokens, num_prompt_pairs=waiting.num_pairs)
        spread_ms = (self._ms_of(prompts) - one_ms) * share
        wanted_ms = decode_ms + max(spread_ms, _LEAST_STEPS * one_ms)
        return min(wanted_ms, max(_MOST_STEPS * one_ms, _MOST_DECODES * decode_ms))

    def _tokens_in_time(self, start: int, most: int) -> int:
        """Return how many tokens of a prompt there is time for; `most` are too many."""
        least, limit = 0, most
        while most - least > 1 + least // 64:  # closer than predictions are
            middle = (least + most) // 2
            if self._ms(start, middle) <= self._most_ms:
                least = middle
            else:
                most = middle
        others, most_ms = self._work.num_tokens, min(_TILE_SLACK * self._most_ms, self._bound_ms)
        nearest = round((others + least) / _TILE_TOKENS) * _TILE_TOKENS - others
        for in_tiles in (nearest, nearest - _TILE_TOKENS):
            num_rest = limit - in_tiles
            is_whole_or_leaves_a_chunk = num_rest == 0 or num_rest >= self._least_chunk
            if in_tiles >= self._least_chunk and is_whole_or_leaves_a_chunk and self._ms(start, in_tiles) <= most_ms:
                return in_tiles
        return least

    def _fits(self, start: int, num_tokens: int) -> bool:
        return math.isinf(self._most_ms) or self._ms(start, num_tokens) <= self._most_ms * _SLACK

    def _ms(self, start: int, num_tokens: int) -> float:
        return self._ms_of(self._with(start, num_tokens))

    def _with(self, start: int, num_tokens: int) -> StepWork:
        work = self._work
        return work._replace(
            num_prompt_tokens=work.num_prompt_tokens + num_tokens,
            num_prompt_pairs=work.num_prompt_pairs + prompt_pairs(start, num_tokens),
        )


_ONE_TOKEN = StepWork(num_prompt_tokens=1, num_prompt_kv=1, num_prompt_pairs=1)


def spread_tokens(limits: SchedulerLimits, num_waiting_tokens: float) -> int:
    """Return the prompt tokens of a step while nothing decodes: those that wait, spread over the steps to come."""
    spread = num_waiting_tokens / (SPREAD_PER_STAGE * limits.num_stages)
    return max(1, round(spread / limits.min_prefill_chunk_tokens)) * limits.min_prefill_chunk_tokens
