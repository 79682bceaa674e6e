"""What was seen so far, as far as choosing the next token depends on it: counts for penalties, and the last tokens.

The last stage keeps it, for the rows that need it. With speculation a position is judged before it is known whether the
drafts in front of it are right: they are put among the last tokens, and counted on the way, for the positions after
them alone. `commit` then takes in what was really kept.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.ops.host_to_device import to_device
from raypp.ops.sample.tables import NO_TOKEN, NewTokens
from raypp.request_limits import MAX_BAD_WORD_TOKENS
from raypp.stage.spec import StageSpec


class TokenHistory:
    """Token counts and the last tokens by row. R rows of a step, D of them with drafts, N positions, V vocabulary."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._num_rows = spec.max_num_seqs
        self._vocab_size = spec.vocab_size
        self.max_drafts = spec.max_drafts
        self._device = device
        # The token at position p is at p modulo the width. Drafts, and what a refused draft left, lie in front of the
        # true ones and must not overwrite those that a bad word may begin with.
        self._width = MAX_BAD_WORD_TOKENS + 2 * (spec.max_drafts + 1)
        self.last = torch.full((self._num_rows, self._width), NO_TOKEN, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(self._num_rows, dtype=torch.int64, device=device)  # tokens that were counted
        self._counts: torch.Tensor | None = None  # [rows, V] int32, how often each token was generated
        self._in_prompt: torch.Tensor | None = None  # [rows, V] bool

    @property
    def has_counts(self) -> bool:
        """Whether any row ever needed counts."""
        return self._counts is not None

    @property
    def output_counts(self) -> torch.Tensor:
        """How often each token was generated, int32 [max_num_seqs, V]."""
        return self._count_tables()[0]

    @property
    def in_prompt(self) -> torch.Tensor:
        """Whether each token is in the prompt, bool [max_num_seqs, V]."""
        return self._count_tables()[1]

    def reserve(self) -> None:
        """Keep counts from now on; they never move."""
        self._count_tables()

    def start(self, row: int, token_ids: NDArray[np.int32], prompt_len: int, *, counts: bool) -> None:
        """Begin a row.

        Args:
            row: The row.
            token_ids: Its known tokens.
            prompt_len: How many of them are the prompt.
            counts: Whether it needs counts; the last tokens are always kept.
        """
        first = max(0, len(token_ids) - self._width)
        places = to_device(np.arange(first, len(token_ids)) % self._width, self._device)
        self.last[row, places] = to_device(token_ids[first:], self._device)
        self.lengths[row].fill_(len(token_ids))  # an assignment to one element copies it from ordinary memory
        if counts:
            table, in_prompt = self._count_tables()
            known = to_device(token_ids.astype(np.int64), self._device)
            generated = known[prompt_len:]
            table[row] = 0
            table[row].index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
            in_prompt[row] = False
            in_prompt[row].index_fill_(0, known[:prompt_len], True)

    def remember(self, tokens: NewTokens, *, counts: bool) -> None:
        """Write tokens among the last ones; see `raypp.ops.sample.token_choice.TokenChoice.remember`."""
        rows, positions, token_ids, num_valid = tokens.rows, tokens.positions, tokens.token_ids, tokens.num_valid
        self._write(rows, positions, token_ids)
        if not counts:
            return
        width = token_ids.shape[1]
        if num_valid is None:
            is_valid = torch.ones(token_ids.shape, dtype=torch.int32, device=self._device)
            self.lengths.index_copy_(0, rows, positions + width)
        else:
            is_valid = (torch.arange(width, device=self._device) < num_valid.unsqueeze(1)).to(torch.int32)
            self.lengths.index_copy_(0, rows, positions + num_valid)
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
            token_ids = self._read(rows, drafted).clamp_(min=0).to(torch.int64)
            is_uncounted = drafted >= self.lengths.index_select(0, rows).unsqueeze(1)
            counts.scatter_add_(1, token_ids, is_uncounted.to(torch.int32))
        return counts, self.in_prompt.index_select(0, rows)

    def before(self, rows: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the last tokens before each position, NO_TOKEN before the first one: int32 [N, num_tokens].

        Shapes: rows, positions [N] int64; num_tokens < MAX_BAD_WORD_TOKENS.
        """
        return self._read(rows, positions.unsqueeze(1) + torch.arange(-num_tokens, 0, device=self._device))

    def _read(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        token_ids = self.last[rows.unsqueeze(1), positions % self._width]
        return token_ids.masked_fill_(positions < 0, NO_TOKEN)

    def _write(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        places = (positions.unsqueeze(1) + torch.arange(token_ids.shape[1], device=self._device)) % self._width
        self.last[rows.unsqueeze(1), places] = token_ids.to(torch.int32)

    def _count_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._counts is None or self._in_prompt is None:
            shape = (self._num_rows, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self._counts, self._in_prompt
