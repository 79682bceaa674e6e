"""Finds the tokens that a row may draw: top-k, then top-p of what is left, and min-p.

All three are defined by what is likelier than a token, so equally likely tokens stay or go together. How much less
likely a token is than the most likely one, its distance, is an integer, and so is its probability. Sums of integers do
not depend on the order of addition: a CPU, a GPU and the members of a stage keep exactly the same tokens.

Both top-k and top-p keep the tokens up to a distance, which is found digit by digit: tokens are counted, or their
probabilities summed, by the next digit of their distance. Members add these few sums, and exchange no logits.

R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from raypp.ops.sample.draw_sizes import DIGIT_BITS, NUM_DIGITS

Truncation = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""top_k [R] int32, 0 for all; top_p [R] float32, 1 for all; min_p [R] float32, 0 for all."""

FRACTION_BITS = 21
LOG2_E = 1.4426950408889634 * 2.0**FRACTION_BITS
"""Times a difference of logits: its power of two, as an integer with 21 fraction bits."""
DIGIT_SHIFTS = tuple(DIGIT_BITS * digit for digit in reversed(range(NUM_DIGITS)))
"""Of the digits of a distance, the highest one first."""
FARTHEST = 2.0**27 - 8
"""No distance is larger: powers below 2 ** -64 are 0. A float32 has it, and three digits of 9 bits do."""
MOST = torch.finfo(torch.float32).max
POWER_OF_TWO = (744265554, 257874615, 59914701, 9681962, 2004816)
"""Coefficients of f, f^2, ... in 2^f - 1 for 0 <= f < 1, times 2^30. Largest relative error 8.4e-8."""
POWER_BITS = 30
WEIGHT_BITS = 40
"""The most likely token weighs 2 ** 40; up to 2 ** 22 tokens sum to less than 2 ** 63."""


def distances(logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return log2(e) * (highest - logit) / temperature * 2 ** 21, rounded down, at most `FARTHEST`, int64 [R, V].

    Shapes: logits [R, V] float32; highest [R] float32, the row's highest logit; temperature [R] float32, above 0.
    """
    scale = (torch.full_like(temperature, LOG2_E) / temperature).unsqueeze(1)  # one division, rounded once
    scale.clamp_(max=MOST)
    return ((logits - highest.unsqueeze(1)) * scale).clamp_(min=-FARTHEST).to(torch.int64).neg_()


def weights(distance: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (40 - distance / 2 ** 21), rounded down, int64. Shapes: distance int64."""
    exponent = -distance
    fraction = (exponent & ((1 << FRACTION_BITS) - 1)) << (32 - FRACTION_BITS)
    power = torch.zeros_like(fraction)
    for coefficient in reversed(POWER_OF_TWO):
        power = coefficient + ((power * fraction) >> 32)
    power = (1 << POWER_BITS) + ((power * fraction) >> 32)
    shift = (exponent >> FRACTION_BITS) + (WEIGHT_BITS - POWER_BITS)
    return torch.where(shift >= 0, power << shift.clamp(min=0), power >> (-shift).clamp(min=0, max=63))


def may_draw(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    truncation: Truncation,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
) -> torch.Tensor:
    """Return which tokens a row may draw, bool [R, V]. The most likely one always.

    Top-k keeps a token when fewer than top_k are likelier. Top-p keeps it when those that are likelier sum to less than
    top_p of what top-k left. Min-p keeps it when it has at least min_p of the most likely token's probability.

    Args:
        logits: [R, V] float32; [R, C] of a member's part.
        highest: [R] float32, the row's highest logit, of all members.
        temperature: [R] float32, above 0.
        truncation: What rows ask for.
        total: Returns the sum of int64 [R, B] over the members; it is called six times.
    """
    top_k, top_p, min_p = (values.to(torch.float64).unsqueeze(1) for values in truncation)
    distance = distances(logits, highest, temperature)
    weight = weights(distance)
    farthest = _farthest(distance, torch.ones_like(distance), lambda _: top_k, total)
    is_far = (distance > farthest).logical_and_(top_k > 0)
    farthest = _farthest(distance, weight.masked_fill(is_far, 0), lambda left: left * top_p, total)
    kept = is_far.logical_not_().logical_and_((distance <= farthest).logical_or_(top_p >= 1))
    return kept.logical_and_(weight.to(torch.float64) >= min_p * 2.0**WEIGHT_BITS)


def _farthest(
    distance: torch.Tensor,
    amounts: torch.Tensor,
    wanted: Callable[[torch.Tensor], torch.Tensor],
    total: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the largest distance so that tokens which are nearer amount to less than wanted, int64 [R, 1].

    Args:
        distance: [R, V] int64.
        amounts: [R, V] int64, of the tokens.
        wanted: Returns what is wanted of what all amount to, both float64 [R, 1].
        total: See `may_draw`.
    """
    low, nearer, limit = distance.new_zeros(len(distance), 1), distance.new_zeros(len(distance), 1), None
    for shift in DIGIT_SHIFTS:
        digit = (distance - low) >> shift
        is_outside = (digit >> DIGIT_BITS) != 0  # of a smaller distance it is negative
        digit, inside = digit.masked_fill_(is_outside, 0), amounts.masked_fill(is_outside, 0)
        sums = distance.new_zeros(len(distance), 1 << DIGIT_BITS).scatter_add_(1, digit, inside)
        reached = nearer + total(sums).cumsum(1)
        if limit is None:
            limit = wanted(reached[:, -1:].to(torch.float64))
        is_nearer = reached.to(torch.float64) < limit
        low = low + (is_nearer.sum(1, keepdim=True) << shift)
        nearer = torch.maximum(nearer, reached.masked_fill(~is_nearer, 0).amax(1, keepdim=True))
    return low
