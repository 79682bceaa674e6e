"""The n-gram proposer: drafts come from the row's own text."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from raypp.ops.ngram import propose_ngrams, propose_ngrams_by_row
from raypp.specdec.proposer import DraftingRows, Drafts, Followed, VerifiedStep

_FEW_ROWS = 32
"""On a CPU up to this many rows are looked through one by one, about 5 us each."""


class NgramProposer:
    """Looks for the row's newest tokens among those before; see `raypp.ops.ngram`."""

    is_recorded_apart = False

    def __init__(
        self, tokens: torch.Tensor, *, window: int, min_n: int, max_n: int, num_drafts: int, max_rows: int
    ) -> None:
        """Search a table that somebody else keeps current.

        Args:
            tokens: int32 [num_rows, W], see `raypp.ops.row_tokens`.
            window: The newest tokens of a row that are searched, at most W.
            min_n: The shortest match.
            max_n: The longest run that is compared.
            num_drafts: K_max.
            max_rows: The most rows of one step.
        """
        self._tokens = tokens
        self._window = window
        self._min_n = min_n
        self._max_n = max_n
        self._num_drafts = num_drafts
        self._kernel = None
        if tokens.is_cuda and find_spec("triton") is not None:
            from raypp.ops.cuda.ngram_kernel import NgramKernel

            self._kernel = NgramKernel(
                tokens, window=window, min_n=min_n, max_n=max_n, num_drafts=num_drafts, max_rows=max_rows
            )

    def follow(self, step: VerifiedStep) -> Followed:
        """Do nothing, likewise."""
        return ()

    def propose(self, drafting: DraftingRows, followed: Followed) -> Drafts:
        """Return what followed the newest tokens where they stood before."""
        if self._kernel is not None:
            return Drafts(*self._kernel(drafting.rows, drafting.lengths))
        tokens, rows, lengths = self._tokens, drafting.rows, drafting.lengths
        sizes = {"window": self._window, "min_n": self._min_n, "max_n": self._max_n, "num_drafts": self._num_drafts}
        if len(rows) <= _FEW_ROWS and not tokens.is_cuda:
            return Drafts(*propose_ngrams_by_row(tokens, rows, lengths, **sizes))
        return Drafts(*propose_ngrams(tokens, rows, lengths, max_length=drafting.max_length, **sizes))
