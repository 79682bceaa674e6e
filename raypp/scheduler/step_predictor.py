"""Says how long a step will take on the slowest stage, and learns that from how long others took.

It begins with estimates (`plan/cost_model.py`), whose ratios are better than their sum: no data sheet says what a
machine does. Every report of a stage then moves the factors by which each part of a step is multiplied. Errors count by
their share of the step's time, so that short steps count as much as long ones. A part of which little was seen keeps
the factor that all have in common. Steps that only decode are kept apart from those with prompts: many of the ones do
not make it forget the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypp.messages import Bools, Int32s


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
