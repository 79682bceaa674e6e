"""What a step costs as a function of its work: the shape that all estimates share, and a stage's time by it.

Reading the weights takes as long for one token as for some; from `free_tokens` tokens on, multiplying takes longer. The
number of drafts, the prompt tokens of a step and the layers of a stage are all chosen by this shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from raypp.scheduler.step_work import StepWork


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
