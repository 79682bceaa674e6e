"""Chooses the experts of each token by its router's logits: softmax, the k most likely, their probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """How a router's logits become experts and their weights.

    Args:
        num_chosen: k, experts by token.
        normalizes: Whether a token's weights are divided by their sum (`norm_topk_prob`; Mixtral always).
        is_even: For measurements: choose by a hash of the logits' bits, so that random weights load experts evenly.
    """

    num_chosen: int
    normalizes: bool
    is_even: bool = False


def choose_experts(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts, [T, k] int64, the most likely first, and their weights, [T, k] float32.

    Shapes: logits [T, E] of any float type. Of equal logits the expert with the lower number comes first.
    """
    probabilities = torch.softmax(logits.float(), -1)
    ranked = torch.sort(_hashed(logits) if routing.is_even else probabilities, dim=-1, descending=True, stable=True)
    experts = ranked.indices[:, : routing.num_chosen]
    weights = probabilities.gather(1, experts)
    return experts, weights / weights.sum(-1, keepdim=True) if routing.normalizes else weights


def _hashed(logits: torch.Tensor) -> torch.Tensor:
    """Return numbers that look random, and depend on the bits of a logit and its expert's number: [T, E] int64."""
    bits = logits.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    mixed = (bits + 0x9E3779B9 * torch.arange(1, logits.shape[-1] + 1, device=logits.device)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):  # lowbias32
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return mixed
