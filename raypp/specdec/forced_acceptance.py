"""A test hook, off by default: drafts are accepted with a given probability, whatever the model says.

With it a benchmark can choose the acceptance rate, on random weights too. Nothing else of a step changes: the model's
tokens are replaced before they are verified, and every draft counts as proposed. The text is nonsense.
"""

from __future__ import annotations

import math

import torch

from raypp.messages import StepPlan
from raypp.ops.sampling import gumbel_noise
from raypp.specdec.proposer import Drafts, Proposer, SteppedTokens


class ForcedAcceptance:
    """Decides by keyed noise, so that a run can be repeated."""

    def __init__(self, rate: float) -> None:
        """Accept drafts at `rate`, 0..1, each given that all before it were."""
        # Standard Gumbel noise is below x with probability exp(-exp(-x)).
        self._threshold = -math.log(-math.log(rate)) if 0 < rate < 1 else math.copysign(math.inf, rate - 0.5)

    def __call__(
        self, token_ids: torch.Tensor, draft_ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the tokens, [Y, 1 + K] int32, with drafts in the place of some and of no other.

        Shapes: token_ids [Y, 1 + K] int32; draft_ids [Y, K_max] int32; rows, positions [Y] int64, the position of each
        row's first token.
        """
        num_compared = max(token_ids.shape[1] - 1, 1)
        offsets = torch.arange(num_compared, device=rows.device)
        keys = (positions.unsqueeze(1) + offsets).view(-1)
        noise = gumbel_noise(rows.repeat_interleave(num_compared), keys, 1).view(-1, num_compared)
        drafts, chosen = draft_ids[:, :num_compared], token_ids[:, :num_compared]
        other = torch.where(chosen == drafts, (drafts - 1).abs(), chosen)  # a valid id that is not the draft
        forced = token_ids.clone()
        forced[:, :num_compared] = torch.where(noise < self._threshold, drafts, other)
        return forced


class AlwaysProposing:
    """A proposer that stands behind all its drafts, misses too."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def apply(self, plan: StepPlan) -> None:
        """Take over rows that start."""
        self._proposer.apply(plan)

    def propose(self, step: SteppedTokens) -> Drafts:
        """Return the drafts, none of them a miss."""
        drafts = self._proposer.propose(step)
        return Drafts(drafts.draft_ids, torch.full_like(drafts.num_proposed, drafts.draft_ids.shape[1]))
