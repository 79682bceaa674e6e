"""Drafts that are right as often as a test says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypp.ops.row_tokens import StepTokens
from raypp.specdec.proposer import Drafts, Followed, StepHidden


class Foreseeing:
    """A proposer that knows the texts: each draft is right at a given rate, else it is another token.

    Args:
        texts: Of all requests, prompts and outputs.
        table: Tokens of the rows.
        rate: See above.
        num_drafts: K_max.
    """

    has_own_graphs = False
    _NUM_READ = 5  # tokens before, by which a text is known, together with its length

    def __init__(self, texts: Sequence[list[int]], table: torch.Tensor, rate: float, num_drafts: int) -> None:
        self._next = {
            (end, *text[end - self._NUM_READ : end]): text[end : end + num_drafts]
            for text in texts
            for end in range(self._NUM_READ, len(text))
        }
        self._table = table
        self._rate = rate
        self._num_drafts = num_drafts

    def follow(self, tokens: StepTokens, hidden: StepHidden) -> Followed:
        return ()

    def propose(self, tokens: StepTokens, followed: Followed, max_length: int, most: int) -> Drafts:
        drafts = []
        for row, length in zip(tokens.rows.tolist(), tokens.lengths.tolist(), strict=True):
            places = torch.arange(length - self._NUM_READ, length) % self._table.shape[1]
            known = self._next.get((length, *self._table[row, places].tolist()), [])
            known = known + [0] * (self._num_drafts - len(known))
            chances = torch.rand(len(known), generator=torch.Generator().manual_seed(1000 * row + length)).tolist()
            drafts.append([token if chance < self._rate else 1 for token, chance in zip(known, chances, strict=True)])
        proposed = torch.full((len(drafts),), self._num_drafts, dtype=torch.int32)
        return Drafts(torch.tensor(drafts, dtype=torch.int32).view(-1, self._num_drafts), proposed)
