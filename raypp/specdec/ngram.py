"""The n-gram proposer: drafts come from the row's own text."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from raypp.messages import StepPlan
from raypp.ops.ngram import propose_ngrams
from raypp.specdec.proposer import Drafts, SteppedTokens


class NgramProposer:
    """Looks for the row's newest tokens in the token table; see `raypp.ops.ngram`."""

    def __init__(self, tokens: torch.Tensor, *, min_n: int, max_n: int, num_drafts: int, max_rows: int) -> None:
        """Search a table that somebody else keeps current.

        Args:
            tokens: int32 [num_rows, window], see `raypp.specdec.token_table`.
            min_n: The shortest match.
            max_n: The longest run that is compared.
            num_drafts: K_max.
            max_rows: The most rows of one step.
        """
        self._tokens = tokens
        self._min_n = min_n
        self._max_n = max_n
        self._num_drafts = num_drafts
        self._kernel = None
        if tokens.is_cuda and find_spec("triton") is not None:
            from raypp.ops.kernels.ngram import NgramKernel

            self._kernel = NgramKernel(tokens, min_n=min_n, max_n=max_n, num_drafts=num_drafts, max_rows=max_rows)

    def apply(self, plan: StepPlan) -> None:
        """Do nothing: all it needs is in the token table."""

    def propose(self, step: SteppedTokens) -> Drafts:
        """Return what followed the newest tokens where they stood before."""
        if self._kernel is not None:
            return Drafts(*self._kernel(step.rows, step.lengths))
        draft_ids, num_proposed = propose_ngrams(
            self._tokens,
            step.rows,
            step.lengths,
            min_n=self._min_n,
            max_n=self._max_n,
            num_drafts=self._num_drafts,
            max_length=step.max_length,
        )
        return Drafts(draft_ids, num_proposed)
