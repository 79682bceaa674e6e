"""A test hook, off by default: drafts are accepted with a given probability, whatever the model says.

With it a benchmark can choose the acceptance rate, on random weights too. Nothing else of a step changes: the model's
tokens are replaced before they are verified, and every draft counts as proposed. The text is nonsense.
"""

from __future__ import annotations

import torch

from raypp.ops.row_tokens import StepTokens
from raypp.specdec.proposer import Drafts, Followed, Proposer

_NUM_DECISIONS, _ROW_STRIDE = 65_521, 7_919  # primes


class ForcedAcceptance:
    """Decides by a table, by row and position: a run can be repeated, and a step has few operations more.

    Args:
        rate: Of drafts that are accepted, 0..1, each given that all before it were.
        max_drafts: K_max.
        device: Where tokens are.
    """

    def __init__(self, rate: float, max_drafts: int, device: torch.device) -> None:
        self._rate = rate
        chances = torch.rand(_NUM_DECISIONS, generator=torch.Generator().manual_seed(0))
        self._is_accepted = (chances < rate).to(device)
        self._offsets = torch.arange(max_drafts, device=device)

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
            first = rows * _ROW_STRIDE + positions
            decisions = self._is_accepted[(first.unsqueeze(1) + self._offsets[:num_compared]) % _NUM_DECISIONS]
            other = torch.where(decisions, drafts, other)
        forced[:, forced_places] = other
        return forced


class AlwaysProposing:
    """A proposer that stands behind as many drafts as are asked for, misses too."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.has_own_graphs = proposer.has_own_graphs
        self.follow = proposer.follow

    def propose(self, tokens: StepTokens, followed: Followed, max_length: int, most: int) -> Drafts:
        """Return the drafts, none of them a miss."""
        drafts = self._proposer.propose(tokens, followed, max_length, most)
        return Drafts(drafts.draft_ids, torch.full_like(drafts.num_proposed, most))
