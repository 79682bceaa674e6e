"""The choice of tokens as the last stage's sampler calls it: the protocol, and plain torch for any device.

`raypp.ops.cuda.kernel_token_choice` does it by kernels.
"""

from __future__ import annotations

from typing import Protocol

import torch

from raypp.ops.row_tokens import StepTokens
from raypp.ops.sample.adjust import adjusted
from raypp.ops.sample.draw import sample, sample_greedy
from raypp.ops.sample.draw_sizes import MAX_REPORTED
from raypp.ops.sample.logprobs import TopLogprobs, top_logprobs
from raypp.ops.sample.step_masks import StepMasks, hold
from raypp.ops.sample.tables import AdjustedLogits, Asked, RowTables
from raypp.ops.sample.token_history import TokenHistory


class TokenChoice(Protocol):
    """Chooses tokens from logits; never waits for the device. N positions, V vocabulary."""

    def adjust(self, logits: torch.Tensor, asked: Asked) -> AdjustedLogits:
        """Do to the logits what rows and masks ask for; see `raypp.ops.sample.adjust.adjusted`. The model's own stay.

        What it returns is valid until the next call.

        Shapes: logits [N, V]; N at most `draw_sizes.MAX_CHANGED_POSITIONS`.
        """

    def remember(self, tokens: StepTokens, needs: torch.Tensor, history: TokenHistory, *, counts: bool) -> None:
        """Write tokens to the history of at least those rows whose needs ask for it.

        Args:
            tokens: What rows have generated, or drafts.
            needs: By row; see `RowTables`.
            history: Where to.
            counts: Whether they are counted, or only among the last tokens.
        """

    def hold(
        self, tokens: StepTokens, masks: StepMasks, table: torch.Tensor, draft_table: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Let each row under a grammar keep at most as many tokens as it has masks for; return the rows' lengths.

        See `raypp.ops.sample.step_masks.hold`.
        """

    def report(
        self, logits: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, num_reported: torch.Tensor
    ) -> TopLogprobs:
        """Return the log-probabilities of the chosen tokens and of the most likely ones, valid until the next call.

        Of a position whose row asks for n of the most likely, columns 0 to n count; of others, nothing does.

        Shapes: logits [N, V], the model's own; rows, chosen [N] int64; num_reported by row, int32: 1 + n, at most
        1 + `draw_sizes.MAX_REPORTED`; 0 for rows that do not ask.
        """

    def greedy(self, logits: AdjustedLogits) -> torch.Tensor:
        """Return each position's most likely token, the lowest of equals, int64 [N]. Shapes: logits [N, V]."""

    def draw(
        self,
        logits: AdjustedLogits,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tables: RowTables,
        *,
        truncates: bool = True,
    ) -> torch.Tensor:
        """Return a draw per position, int64 [N]; see `raypp.ops.sample.draw.sample`, whose draws these are.

        Shapes: logits [N, V]; rows, positions [N] int64. `truncates` says whether any row does: kernels find that out
        row by row, torch does it for all.
        """


class TorchTokenChoice:
    """See `TokenChoice`."""

    def adjust(self, logits: torch.Tensor, asked: Asked) -> AdjustedLogits:
        """Do what needs and masks say to all rows."""
        return AdjustedLogits(adjusted(logits, asked))

    def remember(self, tokens: StepTokens, needs: torch.Tensor, history: TokenHistory, *, counts: bool) -> None:
        """Write tokens to the history of all rows."""
        history.remember(tokens, counts=counts)

    hold = staticmethod(hold)

    def report(
        self, logits: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, num_reported: torch.Tensor
    ) -> TopLogprobs:
        """Return the log-probabilities of all rows, as many as any may ask for."""
        return top_logprobs(logits, chosen, min(MAX_REPORTED, logits.shape[1]))

    def greedy(self, logits: AdjustedLogits) -> torch.Tensor:
        """Return each position's most likely token."""
        return sample_greedy(logits.own)

    def draw(
        self,
        logits: AdjustedLogits,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tables: RowTables,
        *,
        truncates: bool = True,
    ) -> torch.Tensor:
        """Return a draw per position."""
        temperature, seeds = tables.temperature.index_select(0, rows), tables.seed.index_select(0, rows)
        truncation = None
        if truncates:
            top_k, top_p, min_p = (table.index_select(0, rows) for table in (tables.top_k, tables.top_p, tables.min_p))
            truncation = top_k, top_p, min_p
        return sample(logits.own, temperature, seeds, positions, truncation)
