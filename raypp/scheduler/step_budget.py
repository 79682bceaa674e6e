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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypp.messages import Bools, Int32s
from raypp.scheduler.limits import SchedulerLimits


class StepWork(NamedTuple):
    """The work of one step, the same on every stage. Lengths of decode rows are upper bounds."""

    num_decode_rows: int = 0
    num_decode_tokens: int = 0
    """1 + K of each decode row."""
    num_decode_kv: int = 0
    """Tokens whose KV the decode rows read."""
    num_prompt_tokens: int = 0
    num_prompt_kv: int = 0
    """Tokens whose KV the prompt chunks read, their own included."""
    num_prompt_pairs: int = 0
    """Pairs of a token of a chunk and one that it attends to, itself included."""
    num_logits: int = 0
    """Tokens whose successor is chosen."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_decode_tokens + self.num_prompt_tokens


def prompt_pairs(start: int, num_tokens: int) -> int:
    """Return the pairs of a token of a chunk and one that it attends to.

    Args:
        start: Tokens of the row before the chunk.
        num_tokens: Of the chunk.
    """
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def step_work(
    num_decode_rows: int, num_scheduled_tokens: Int32s, num_computed_tokens: Int32s, samples: Bools
) -> StepWork:
    """Return the work of a plan, whose fields these are."""
    num_new = num_scheduled_tokens.astype("int64")
    ends = num_computed_tokens + num_new
    num_prompt_new, starts = num_new[num_decode_rows:], ends[num_decode_rows:] - num_new[num_decode_rows:]
    num_decode_tokens = int(num_new[:num_decode_rows].sum())
    return StepWork(
        num_decode_rows=num_decode_rows,
        num_decode_tokens=num_decode_tokens,
        num_decode_kv=int(ends[:num_decode_rows].sum()),
        num_prompt_tokens=int(num_prompt_new.sum()),
        num_prompt_kv=int(ends[num_decode_rows:].sum()),
        num_prompt_pairs=int((num_prompt_new * starts + num_prompt_new * (num_prompt_new + 1) // 2).sum()),
        num_logits=num_decode_tokens + int(samples[num_decode_rows:].sum()),
    )


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """What a step costs: reading the weights, and computing, which takes as long for `free_tokens` tokens.

    The longer of the two counts, with a smooth transition. Of experts, a step reads those that any of its tokens
    chooses: so a draft is not free there, however few the tokens are.
    """

    free_tokens: float
    expert_time: float = 0.0  # of reading all experts, as a multiple of what an empty step takes
    chosen_share: float = 1.0  # of a layer's experts, that one token chooses

    def __call__(self, num_tokens: float) -> float:
        """Return the time of a step of that many tokens, as a multiple of that of an empty one."""
        reading = 1.0
        if self.expert_time:
            reading += self.expert_time * (1.0 - math.pow(1.0 - self.chosen_share, num_tokens))
        return math.hypot(reading, num_tokens / self.free_tokens)


class StageTimes(NamedTuple):
    """What the parts of a step take on one stage, milliseconds: each times its amount is what the step takes."""

    step: float
    """Of every step: starting its operations."""
    prompts: float
    """Of a step with prompts, besides: it is not one recording."""
    weights: float
    """Of an empty step's weights; times `RooflineCost`."""
    token: float
    """Of every token, beyond `RooflineCost`."""
    logit: float
    """Of every token whose successor is chosen: about that of a decode row."""
    kv: float
    """Of every token of KV that a decode row reads."""
    pair: float
    """Of every pair of a prompt's token and one that it attends to."""


def amounts(work: StepWork, roofline: RooflineCost) -> tuple[float, ...]:
    """Return how much there is in a step of each part of `StageTimes`."""
    num_tokens = work.num_decode_tokens + work.num_prompt_tokens
    return (
        1.0,
        1.0 if work.num_prompt_tokens else 0.0,
        roofline(num_tokens),
        num_tokens,
        work.num_logits,
        work.num_decode_kv,
        work.num_prompt_pairs,
    )


def step_ms(times: StageTimes, of_step: tuple[float, ...]) -> float:
    """Return what a step takes on a stage, milliseconds, given its `amounts`."""
    return sum([part * amount for part, amount in zip(times, of_step, strict=True)])


_MEMORY = 0.998
"""The weight of a step after one more of its kind: about 500 are remembered."""
_DOUBT = 0.1
"""Steps that the estimates count as, each part by itself."""
_NUM_PARTS = len(StageTimes._fields)


class StepPredictor:
    """Knows what the parts of a step take on every stage."""

    def __init__(self, roofline: RooflineCost, estimates: Sequence[StageTimes]) -> None:
        """Begin with estimates.

        Args:
            roofline: How the time of products grows with a step's tokens.
            estimates: Of each stage, every part more than nothing; their ratios matter most.
        """
        self.roofline = roofline
        self._estimates = tuple(estimates)
        self._stages = [_Learning(times) for times in estimates]

    @property
    def stages(self) -> list[StageTimes]:
        """What the parts take on each stage, as far as is known now."""
        return [stage.times for stage in self._stages]

    def ms(self, work: StepWork) -> float:
        """Return how long a step will take on the stage that is slowest with it, milliseconds."""
        of_step = amounts(work, self.roofline)
        return max([step_ms(stage.times, of_step) for stage in self._stages])

    def estimated_ms(self, work: StepWork) -> float:
        """Return the same by the estimates alone: the same number in every run."""
        of_step = amounts(work, self.roofline)
        return max([step_ms(times, of_step) for times in self._estimates])

    def stage_ms(self, stage_index: int, work: StepWork) -> float:
        """Return how long a step will take on one stage, milliseconds."""
        return step_ms(self._stages[stage_index].times, amounts(work, self.roofline))

    def learn(self, stage_index: int, works: Sequence[StepWork], times_ms: Sequence[float]) -> None:
        """Take in how long some steps took on a stage, milliseconds each."""
        stage = self._stages[stage_index]
        for work, took_ms in zip(works, times_ms, strict=True):
            if took_ms > 0:
                stage.note(np.array(amounts(work, self.roofline)), took_ms, has_prompts=work.num_prompt_tokens > 0)
        stage.solve()


class _Learning:
    """One stage's factors: the least squares of relative errors, over two memories."""

    def __init__(self, estimate: StageTimes) -> None:
        assert min(estimate) > 0, "a part that is estimated to take nothing would never be learned"
        self.times = estimate
        self._estimate = np.array(estimate)
        self._squares = np.zeros((2, _NUM_PARTS, _NUM_PARTS))
        self._sums = np.zeros((2, _NUM_PARTS))

    def note(self, of_step: NDArray[np.float64], took_ms: float, *, has_prompts: bool) -> None:
        shares = self._estimate * of_step / took_ms
        kind = int(has_prompts)
        self._squares[kind] *= _MEMORY
        self._squares[kind] += np.outer(shares, shares)
        self._sums[kind] *= _MEMORY
        self._sums[kind] += shares

    def solve(self) -> None:
        """Find the factors; one that would be negative is none."""
        squares, sums = self._squares.sum(axis=0), self._sums.sum(axis=0)
        total = squares.sum()
        if not total:
            return
        common = sums.sum() / total
        factors = np.zeros(_NUM_PARTS)
        kept = np.ones(_NUM_PARTS, np.bool_)
        while kept.any():
            # In units of the common factor, so that doubt weighs the same whatever the estimates' unit is.
            doubted = squares[np.ix_(kept, kept)] * common**2 + _DOUBT * np.eye(int(kept.sum()))
            factors[kept] = np.linalg.solve(doubted, sums[kept] * common + _DOUBT) * common
            if (factors[kept] >= 0).all():
                break
            kept &= factors > 0
            factors[~kept] = 0.0
        self.times = StageTimes(*(self._estimate * factors).tolist())


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
        self._max_tokens = limits.max_num_batched_tokens
        self._num_tokens = self._max_tokens - decoding.num_tokens
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

    def whole(self, num_tokens: int) -> int:
        """Return the tokens of a chunk that cannot be cut, whatever time they take; 0: they do not fit at all."""
        return num_tokens if num_tokens <= self._max_tokens - self._work.num_tokens else 0

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
