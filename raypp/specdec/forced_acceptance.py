"""A test hook, off by default: drafts are accepted with a given probability, whatever the model says.

With it a benchmark can choose the acceptance rate, on random weights too. Nothing else of a step changes: the model's
tokens are replaced before they are verified, and every draft counts as proposed. The text is nonsense.
"""

from __future__ import annotations

import math

import torch

from raypp.messages import StepPlan
from raypp.ops.sampling import gumbel_noise
from raypp.specdec.proposer import DraftingRows, Drafts, Followed, Proposer, SteppedTokens


class ForcedAcceptance:
    """Decides by keyed noise, so that a run can be repeated."""

    def __init__(self, rate: float) -> None:
        """Accept drafts at `rate`, 0..1, each given that all before it were."""
        self._rate = rate

    def __call__(
        self, token_ids: torch.Tensor, draft_ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the tokens, [Y, 1 + K] int32, with drafts in the place of some and of no other.

        Shapes: token_ids [Y, 1 + K] int32; draft_ids [Y, K_max] int32; rows, positions [Y] int64, the position of each
        row's first token.
        """
        num_compared = max(token_ids.shape[1] - 1, 1)
        drafts, chosen = draft_ids[:, :num_compared], token_ids[:, :num_compared]
        forced, forced_places = token_ids.clone(), slice(0, num_compared)
        if self._rate == 1:
            forced[:, forced_places] = drafts
            return forced
        other = torch.where(chosen == drafts, (drafts - 1).abs(), chosen)  # a valid id that is not the draft
        if self._rate:
            other = torch.where(self._is_accepted(rows, positions, num_compared), drafts, other)
        forced[:, forced_places] = other
        return forced

    def _is_accepted(self, rows: torch.Tensor, positions: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """Return whether each of the rows' drafts would be accepted by itself, bool [Y, num_drafts]."""
        keys = (positions.unsqueeze(1) + torch.arange(num_drafts, device=rows.device)).view(-1)
        noise = gumbel_noise(rows.repeat_interleave(num_drafts), keys, 1).view(-1, num_drafts)
        # Standard Gumbel noise is below x with probability exp(-exp(-x)).
        return noise < -math.log(-math.log(self._rate))


class AlwaysProposing:
    """A proposer that stands behind all its drafts, misses too."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.is_recorded_apart = proposer.is_recorded_apart

    def apply(self, plan: StepPlan) -> None:
        """Take over rows that start."""
        self._proposer.apply(plan)

    def follow(self, step: SteppedTokens) -> Followed:
        """Take in a step."""
        return self._proposer.follow(step)

    def propose(self, drafting: DraftingRows, followed: Followed) -> Drafts:
        """Return the drafts, none of them a miss."""
        drafts = self._proposer.propose(drafting, followed)
        return Drafts(drafts.draft_ids, torch.full_like(drafts.num_proposed, drafts.draft_ids.shape[1]))
