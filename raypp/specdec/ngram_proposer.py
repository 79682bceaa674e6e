"""The n-gram proposer: drafts come from the row's own text."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from raypp.ops.ngram import propose_ngrams, propose_ngrams_by_row
from raypp.ops.row_tokens import StepTokens
from raypp.specdec.proposer import Drafts, Followed, StepHidden

_FEW_ROWS = 32
"""On a CPU up to this many rows are looked through one by one, about 5 us each."""


class NgramProposer:
    """Looks for the row's newest tokens among those before; see `raypp.ops.ngram`."""

    has_own_graphs = False

    def __init__(
        self, tokens: torch.Tensor, *, window: int, min_n: int, max_n: int, num_drafts: int, max_rows: int
    ) -> None:
        """Search a table that is kept current elsewhere.

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

    def follow(self, tokens: StepTokens, hidden: StepHidden) -> Followed:
        """Do nothing: the tokens are in the table."""
        return ()

    def propose(self, tokens: StepTokens, followed: Followed, max_length: int, most: int) -> Drafts:
        """Return what followed the newest tokens where they stood before."""
        rows, lengths, table = tokens.rows, tokens.lengths, self._tokens
        assert lengths is not None
        if self._kernel is not None:
            return Drafts(*self._kernel(rows, lengths))
        sizes = {"window": self._window, "min_n": self._min_n, "max_n": self._max_n, "num_drafts": self._num_drafts}
        if len(rows) <= _FEW_ROWS and not table.is_cuda:
            return Drafts(*propose_ngrams_by_row(table, rows, lengths, **sizes))
        return Drafts(*propose_ngrams(table, rows, lengths, max_length=max_length, **sizes))
