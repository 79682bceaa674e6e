"""Joins two proposers, row by row: the first where it proposes something, else the second. The device chooses."""

from __future__ import annotations

import torch

from raypp.specdec.proposer import DraftingRows, Drafts, Followed, Proposer, VerifiedStep


class HybridProposer:
    """Asks both: which of them a row needs, the host does not know when it orders the step.

    Args:
        first: Proposes from tables alone: it makes nothing of a step.
        second: Any.
    """

    def __init__(self, first: Proposer, second: Proposer) -> None:
        self._first = first
        self._second = second
        self.is_recorded_apart = first.is_recorded_apart or second.is_recorded_apart

    def follow(self, step: VerifiedStep) -> Followed:
        """Take in a step."""
        nothing = self._first.follow(step)
        assert not nothing
        return self._second.follow(step)

    def propose(self, drafting: DraftingRows, followed: Followed) -> Drafts:
        """Return the first one's drafts where it stands behind any."""
        first, second = self._first.propose(drafting, ()), self._second.propose(drafting, followed)
        is_first = first.num_proposed > 0
        return Drafts(
            torch.where(is_first.unsqueeze(1), first.draft_ids, second.draft_ids),
            torch.where(is_first, first.num_proposed, second.num_proposed),
        )
