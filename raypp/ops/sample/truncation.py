"""Finds the tokens that a row may draw: top-k, then top-p of what is left, and min-p.

All three are defined by what is likelier than a token, so equally likely tokens stay or go together. Probabilities are
integers, so their sums do not depend on the order of addition: a CPU and a GPU keep exactly the same tokens.

R rows, V vocabulary.
"""

from __future__ import annotations

import torch

Truncation = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""top_k [R] int32, 0 for all; top_p [R] float32, 1 for all; min_p [R] float32, 0 for all."""

FRACTION_BITS = 24
LOG2_E = 1.4426950408889634 * 2.0**FRACTION_BITS
"""Times a difference of logits: its power of two, as an integer with 24 fraction bits."""
LEAST_EXPONENT = -(2.0**30)
"""Powers below 2 ** -64 are 0."""
POWER_OF_TWO = (744265554, 257874615, 59914701, 9681962, 2004816)
"""Coefficients of f, f^2, ... in 2^f - 1 for 0 <= f < 1, times 2^30. Largest relative error 8.4e-8."""
POWER_BITS = 30
WEIGHT_BITS = 40
"""The most likely token weighs 2 ** 40; up to 2 ** 22 tokens sum to less than 2 ** 63."""


def weights(logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return exp((logit - highest) / temperature) * 2 ** 40, rounded down, int64 [R, V].

    Shapes: logits [R, V] float32; highest [R] float32, the row's highest logit; temperature [R] float32, above 0.
    """
    scale = (torch.full_like(temperature, LOG2_E) / temperature).unsqueeze(1)  # one division, rounded once
    exponent = ((logits - highest.unsqueeze(1)) * scale).clamp(min=LEAST_EXPONENT).to(torch.int64)
    fraction = (exponent & ((1 << FRACTION_BITS) - 1)) << (32 - FRACTION_BITS)
    power = torch.zeros_like(fraction)
    for coefficient in reversed(POWER_OF_TWO):
        power = coefficient + ((power * fraction) >> 32)
    power = (1 << POWER_BITS) + ((power * fraction) >> 32)
    shift = (exponent >> FRACTION_BITS) + (WEIGHT_BITS - POWER_BITS)
    return torch.where(shift >= 0, power << shift.clamp(min=0), power >> (-shift).clamp(min=0, max=63))


def may_draw(logits: torch.Tensor, temperature: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Return which tokens a row may draw, bool [R, V]. The most likely one always.

    Top-k keeps a token when fewer than top_k are likelier. Top-p keeps it when those that are likelier sum to less than
    top_p of what top-k left. Min-p keeps it when it has at least min_p of the most likely token's probability.

    Shapes: logits [R, V] float32; temperature [R] float32, above 0.
    """
    top_k, top_p, min_p = (values.unsqueeze(1) for values in truncation)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    weight = weights(ordered, ordered[:, 0], temperature)
    ranks = torch.arange(logits.shape[1], device=logits.device).expand_as(ordered)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    num_likelier = torch.where(begins, ranks, 0).cummax(dim=-1).values
    weight_before = (weight.cumsum(dim=-1) - weight).gather(1, num_likelier)
    kept = (top_k <= 0) | (num_likelier < top_k)
    left = torch.where(kept, weight, 0).sum(dim=-1, keepdim=True)
    kept &= (top_p >= 1) | (weight_before.to(torch.float64) < top_p.to(torch.float64) * left.to(torch.float64))
    kept &= weight.to(torch.float64) >= min_p.to(torch.float64) * 2.0**WEIGHT_BITS
    return torch.empty_like(kept).scatter_(1, order, kept)
