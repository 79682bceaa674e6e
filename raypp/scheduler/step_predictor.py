"""Says how long a step will take on the slowest stage, and learns that from how long others took.

It begins with estimates (`plan/cost_model.py`), whose ratios are better than their sum: no data sheet says what a
machine does. Every report of a stage then moves the factors by which each part of a step is multiplied. Errors count by
their share of the step's time, so that short steps count as much as long ones. A part of which little was seen keeps
the factor that all have in common. Steps that only decode are kept apart from those with prompts: many of the ones do
not make it forget the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypp.scheduler.step_cost import RooflineCost, StageTimes, amounts, step_ms
from raypp.scheduler.step_work import StepWork

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
