"""The tokens that the choice of the next one depends on: counts for penalties, and the last tokens.

The last stage keeps both, for the rows that need them. With speculation a token is chosen before it is known whether
the drafts in front of it are right: drafts are put among the row's tokens, and are counted for the positions after them
alone. The tokens that were kept are counted afterwards.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.ops.host_to_device import to_device
from raypp.ops.row_tokens import RowTokens, StepTokens


class TokenHistory:
    """Token counts by row, beside the rows' tokens. R rows of a step, N positions, V vocabulary.

    Args:
        tokens: Of all rows; they are written here for the rows that need it, whoever else writes them.
        vocab_size: V.
        max_drafts: The most tokens in front of a position that are not counted.
        device: Where counts lie.
    """

    def __init__(self, tokens: RowTokens, vocab_size: int, max_drafts: int, device: torch.device) -> None:
        self.tokens = tokens
        self.max_drafts = max_drafts
        self._num_rows = len(tokens.table)
        self._vocab_size = vocab_size
        self._device = device
        self.lengths = torch.zeros(self._num_rows, dtype=torch.int64, device=device)
        """Tokens that are counted, int64 [num_rows]."""
        self._counts: torch.Tensor | None = None  # [num_rows, V] int32
        self._in_prompt: torch.Tensor | None = None  # [num_rows, V] bool

    @property
    def output_counts(self) -> torch.Tensor:
        """How often each token was generated, int32 [num_rows, V]."""
        return self._count_tables()[0]

    @property
    def in_prompt(self) -> torch.Tensor:
        """Whether each token is in the prompt, bool [num_rows, V]."""
        return self._count_tables()[1]

    def reserve(self) -> None:
        """Keep counts from now on; they never move."""
        self._count_tables()

    def start(self, row: int, token_ids: NDArray[np.int32], prompt_len: int, *, counts: bool) -> None:
        """Begin a row, whose tokens are in the table.

        Args:
            row: The row.
            token_ids: Its known tokens.
            prompt_len: How many of them are the prompt.
            counts: Whether it needs counts.
        """
        self.lengths[row].fill_(len(token_ids))  # an assignment to one element copies it from ordinary memory
        if counts:
            table, in_prompt = self._count_tables()
            known = to_device(token_ids.astype(np.int64), self._device)
            generated = known[prompt_len:]
            table[row] = 0
            table[row].index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
            in_prompt[row] = False
            in_prompt[row].index_fill_(0, known[:prompt_len], True)

    def remember(self, new: StepTokens, *, counts: bool) -> None:
        """Write tokens; see `raypp.ops.sample.token_choice.TokenChoice.remember`."""
        self.tokens.write(new)
        if not counts:
            return
        rows, token_ids, num_valid = new.rows, new.token_ids, new.num_valid
        width = token_ids.shape[1]
        if num_valid is None:
            is_valid = torch.ones(token_ids.shape, dtype=torch.int32, device=self._device)
            self.lengths.index_copy_(0, rows, new.positions + width)
        else:
            is_valid = (torch.arange(width, device=self._device) < num_valid.unsqueeze(1)).to(torch.int32)
            self.lengths.index_copy_(0, rows, new.positions + num_valid)
        if self._counts is not None:
            places = (rows.unsqueeze(1) * self._vocab_size + token_ids.clamp(min=0)).view(-1)
            self._counts.view(-1).index_add_(0, places, is_valid.view(-1))

    def counts(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what was seen before each position.

        Shapes: rows, positions [N] int64.

        Returns:
            How often each token was generated, int32 [N, V], and whether it is in the prompt, bool [N, V].
        """
        counts = self.output_counts.index_select(0, rows)
        if self.max_drafts:
            drafted = positions.unsqueeze(1) - 1 - torch.arange(self.max_drafts, device=self._device)
            token_ids = self.tokens.read(rows, drafted).clamp_(min=0).to(torch.int64)
            is_uncounted = drafted >= self.lengths.index_select(0, rows).unsqueeze(1)
            counts.scatter_add_(1, token_ids, is_uncounted.to(torch.int32))
        return counts, self.in_prompt.index_select(0, rows)

    def _count_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._counts is None or self._in_prompt is None:
            shape = (self._num_rows, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self._counts, self._in_prompt
