"""Verifies drafts: a row keeps those that equal what the model chose itself.

A draft is a point mass. The model's token at its place is sampled as it would be without any draft, with the noise of
(seed, position), and the draft is accepted when it is that token. So it is accepted with the probability that the model
gives it, and otherwise the model's token, which then has the distribution that is left, takes its place: that is
rejection sampling (Leviathan et al., arXiv:2211.17192) for drafts without a distribution of their own. Greedy rows are
no special case, and the text does not depend on whether, or how far, anybody drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Verification:
    """How far each of Y rows got. K drafts were verified."""

    num_valid: torch.Tensor  # [Y] int32: 1 + accepted drafts, at least 1
    num_drafted: torch.Tensor  # [Y] int32: drafts that were compared; misses are none. At K = 0: the first, as a shadow
    num_matched: torch.Tensor  # [Y] int32: leading ones of these that equal the model's tokens
    lengths: torch.Tensor  # [Y] int64, of the rows, the valid tokens included


def verify_drafts(
    token_ids: torch.Tensor,
    first: torch.Tensor,
    draft_ids: torch.Tensor,
    num_proposed: torch.Tensor,
    max_valid: torch.Tensor,
) -> Verification:
    """Accept drafts up to the first that is not the model's own token.

    Shapes: token_ids [Y, 1 + K] int32, the model's tokens, each given all drafts before it; first [Y] int64, the
    position of each row's first token; draft_ids [Y, K_max] int32; num_proposed [Y] int32, leading drafts that count;
    max_valid [Y] int32, tokens that the row has room for.
    """
    num_verified = token_ids.shape[1] - 1
    if not num_verified:  # the row grows by one token, and the first draft is only looked at
        num_drafted = num_proposed.clamp(max=1)
        num_matched = (token_ids == draft_ids[:, :1]).squeeze(1) * num_drafted
        return Verification(torch.ones_like(num_drafted), num_drafted, num_matched, first + 1)
    num_drafted = num_proposed.clamp(max=num_verified)
    matches = token_ids[:, :num_verified] == draft_ids[:, :num_verified]
    matches &= torch.arange(num_verified, device=token_ids.device) < num_drafted.unsqueeze(1)
    num_matched = matches.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
    num_valid = torch.minimum(num_matched + 1, max_valid.clamp(min=1))
    return Verification(num_valid, num_drafted, num_matched, first + num_valid)
