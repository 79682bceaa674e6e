"""How well log-probabilities of one implementation in bf16 agree with those of another, and of one in float32.

Compared are a few tokens per position: those that the float32 reference finds most likely, chosen by nobody else.

Two implementations that round differently cannot agree on which token is the most likely where float32's two best are
closer than rounding. So the share is told for all positions, beside that of the other implementation with float32, and
asked for of the clear ones, where float32's best leads by several times the other's error; of all positions where a
model is sure of nearly all.

Two shares say what the share over all positions can be at most, and are asked for nowhere. How often the other agrees
with itself, run in another way; and how often its best is tied: bf16 has few digits, so that several tokens can have
exactly the highest value, and which of them comes first is the order of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raypp.types import Logprobs

NUM_REPORTED = 20
"""Tokens per position that raypp tells of."""
NUM_COMPARED = 8
"""Of the reference's most likely tokens; fewer, so that raypp, which chooses by its own, tells of nearly all."""
MIN_AGREEMENT, MAX_ERROR_RATIO = 0.99, 1.5
_CLEAR_ERRORS = 3.0
"""By how many of the other's errors the best token leads at a clear position."""


@dataclass(frozen=True)
class Position:
    """What is said of one position's next token. Shapes: [V] float32, log-probabilities."""

    raypp: Logprobs
    """Of those that raypp finds most likely."""
    other: torch.Tensor
    """The other implementation in bf16."""
    exact: torch.Tensor
    """In float32."""
    other_again: int
    """The token that the other implementation finds most likely in bf16 when it is run in another way."""


@dataclass(frozen=True)
class Agreement:
    """Over many positions. Errors are root mean squares of differences to float32, in nats."""

    num_positions: int
    raypp_with_other: float
    """The share of positions, 0..1, at which both find the same token most likely."""
    raypp_with_exact: float
    other_with_exact: float
    other_with_itself: float
    """The share at which the other finds the same token most likely in both ways."""
    tied: float
    """The share at which several tokens have the other's highest value."""
    raypp_among_other_best: float
    """The share at which raypp's most likely token has the other's highest value."""
    raypp_error: float
    other_error: float
    num_distinct: int
    """Different tokens that float32 finds most likely: of many, agreeing says more."""
    clear: float
    """The share of positions that are clear."""
    raypp_with_other_if_clear: float
    missing: float
    """The share of compared tokens that raypp did not tell of."""
    counts_all: bool
    """Whether all positions must agree as the clear ones must: where a model is sure of nearly all that it reads."""

    @property
    def error_ratio(self) -> float:
        """The error of raypp over the other's."""
        return self.raypp_error / self.other_error

    @property
    def is_good(self) -> bool:
        """Whether raypp in bf16 is what it should be."""
        agreed = self.raypp_with_other if self.counts_all else self.raypp_with_other_if_clear
        return agreed >= MIN_AGREEMENT and self.error_ratio <= MAX_ERROR_RATIO

    def figures(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {**vars(self), "error_ratio": self.error_ratio, "is_good": self.is_good}

    def __str__(self) -> str:
        """Return it in four lines."""
        verdict, bar = "ok" if self.is_good else "MISSED", f" (>= {MIN_AGREEMENT:.0%})"
        below = f" (below {MIN_AGREEMENT:.0%})" if self.raypp_with_other < MIN_AGREEMENT else ""
        of_all, of_clear = (bar, "") if self.counts_all else (below, bar)
        return (
            f"{self.num_positions} positions, {self.num_distinct} different tokens: {verdict}\n"
            f"    argmax: raypp = transformers {self.raypp_with_other:.2%}{of_all}, raypp = float32 "
            f"{self.raypp_with_exact:.2%}, transformers = float32 {self.other_with_exact:.2%}; "
            f"of the {self.clear:.1%} clear ones raypp = transformers {self.raypp_with_other_if_clear:.2%}"
            f"{of_clear}\n"
            f"    beside: transformers = itself {self.other_with_itself:.2%}; its best is tied at {self.tied:.2%}, "
            f"raypp's is among its best at {self.raypp_among_other_best:.2%}\n"
            f"    error: raypp {self.raypp_error:.4f}, transformers {self.other_error:.4f}, {self.error_ratio:.2f}x "
            f"(<= {MAX_ERROR_RATIO}); not told {self.missing:.2%}"
        )


def agreement_of(positions: Sequence[Position], *, counts_all: bool = False) -> Agreement:
    """Return how well they agree; `counts_all`: they must at all positions, not at clear ones alone."""
    raypp_best = [min(position.raypp, key=lambda token: position.raypp[token].rank) for position in positions]
    other_best = [int(position.other.argmax()) for position in positions]
    other_bests = [(position.other == position.other.max()).nonzero().flatten().tolist() for position in positions]
    exact_best = [int(position.exact.argmax()) for position in positions]
    raypp_errors, other_errors, gaps, num_missing = [], [], [], 0
    for position in positions:
        top = position.exact.topk(NUM_COMPARED)
        gaps.append(float(top.values[0] - top.values[1]))
        for token, value in zip(top.indices.tolist(), top.values.tolist(), strict=True):
            if token not in position.raypp:
                num_missing += 1
                continue
            raypp_errors.append(position.raypp[token].logprob - value)
            other_errors.append(float(position.other[token]) - value)
    count, other_error = len(positions), _rms(other_errors)
    clear = [index for index, gap in enumerate(gaps) if gap >= _CLEAR_ERRORS * other_error]
    return Agreement(
        num_positions=count,
        raypp_with_other=_share(raypp_best, other_best),
        raypp_with_exact=_share(raypp_best, exact_best),
        other_with_exact=_share(other_best, exact_best),
        other_with_itself=_share(other_best, [position.other_again for position in positions]),
        tied=sum(len(bests) > 1 for bests in other_bests) / count,
        raypp_among_other_best=sum(a in bests for a, bests in zip(raypp_best, other_bests, strict=True)) / count,
        raypp_error=_rms(raypp_errors),
        other_error=other_error,
        num_distinct=len(set(exact_best)),
        clear=len(clear) / count,
        raypp_with_other_if_clear=_share([raypp_best[i] for i in clear], [other_best[i] for i in clear]),
        missing=num_missing / (count * NUM_COMPARED),
        counts_all=counts_all,
    )


def _share(some: Sequence[int], others: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(some, others, strict=True)) / max(1, len(some))


def _rms(values: Sequence[float]) -> float:
    return (sum(value * value for value in values) / max(1, len(values))) ** 0.5
