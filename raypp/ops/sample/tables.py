"""Tables of rows' parameters for the choice of tokens, of fixed width, and what a step asks at its positions.

S rows of the tables, N positions at which a token is chosen (a row may have several), V vocabulary, W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from raypp.ops.row_tokens import NO_TOKEN, StepTokens
from raypp.ops.sample.token_history import TokenHistory
from raypp.row_params import WORDS, Needs
from raypp.sampling_params import MAX_BAD_WORD_SPELLINGS, MAX_BAD_WORD_TOKENS, MAX_BIASED_TOKENS, MAX_END_TOKENS

ANY_TOKEN = -1
"""Stands in `bad_words` before the beginning of a short word, and matches every token."""
_ALIGNED = 4  # rows, so that each column begins at a multiple of 16 bytes


class RowTables:
    """Sampling parameters by row, each a tensor: numbers by their columns' names, and lists.

    Lists are of fixed width; B biased tokens, E end tokens, P bad words of at most L tokens:

        needs            [S] int32, of `Needs`
        bias_token_ids   [S, B] int32
        bias             [S, B] float32, 0 behind the last
        end_token_ids    [S, E] int32, NO_TOKEN behind the last
        bad_words        [S, P, L] int32, each at the end of its place, ANY_TOKEN in front of it
        allowed          [S, W] int32, a bit per token
    """

    def __init__(self, **tables: torch.Tensor) -> None:
        vars(self).update(tables)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> torch.Tensor: ...

    @classmethod
    def neutral(cls, num_rows: int, vocab_size: int, device: torch.device) -> RowTables:
        """Return tables whose rows ask for nothing."""

        def full(value: float, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((num_rows, *shape), value, dtype=dtype, device=device)

        words = torch.zeros(len(WORDS), -(-num_rows // _ALIGNED) * _ALIGNED, dtype=torch.int32, device=device)
        tables = cls(
            words=words,
            seed=full(0, dtype=torch.int64),
            needs=full(0),
            bias_token_ids=full(0, MAX_BIASED_TOKENS),
            bias=full(0, MAX_BIASED_TOKENS, dtype=torch.float32),
            end_token_ids=full(NO_TOKEN, MAX_END_TOKENS),
            bad_words=full(ANY_TOKEN, MAX_BAD_WORD_SPELLINGS, MAX_BAD_WORD_TOKENS),
            allowed=full(-1, -(-vocab_size // 32)),
        )
        for row, column in zip(words.unbind(), WORDS, strict=True):
            table = row[:num_rows].view(torch.float32) if column.dtype == "f4" else row[:num_rows]
            setattr(tables, column.name, table.fill_(column.neutral))
        return tables

    def start(self, rows: torch.Tensor, needs: torch.Tensor, words: torch.Tensor, seeds: torch.Tensor) -> None:
        """Take over the numbers of rows that start; see `raypp.starting_rows`."""
        self.words.index_copy_(1, rows, words)
        self.needs.index_copy_(0, rows, needs)
        self.seed.index_copy_(0, rows, seeds)

    def clear_lists(self, rows: torch.Tensor) -> None:
        """Empty the lists of rows."""
        self.bias.index_fill_(0, rows, 0)
        self.end_token_ids.index_fill_(0, rows, NO_TOKEN)
        self.bad_words.index_fill_(0, rows, ANY_TOKEN)
        self.allowed.index_fill_(0, rows, -1)


@dataclass(frozen=True, eq=False)
class PositionMasks:
    """Which tokens grammars allow at a step's positions."""

    mask_of: torch.Tensor  # [N] int32, which of the masks is the position's; -1: none
    bitmasks: torch.Tensor  # [M, W] int32, M >= 1: bit t % 32 of word t // 32 is token t's

    def part(self, positions: slice) -> PositionMasks:
        """Return those of some positions."""
        return PositionMasks(self.mask_of[positions], self.bitmasks)


@dataclass(frozen=True)
class Widths:
    """How many entries of a row torch looks at: none has more."""

    biased: int
    end_tokens: int
    bad_words: int


@dataclass(frozen=True, eq=False)
class AdjustedLogits:
    """What tokens are chosen from: the model's own logits, or at positions that were changed, the changed ones."""

    own: torch.Tensor  # [N, V] float32
    changed: torch.Tensor | None = None  # [N or more, V] float32
    is_changed: torch.Tensor | None = None  # [N or more] int32; None: at no position


@dataclass(frozen=True, eq=False)
class Adjustments:
    """What is asked of the logits of N positions.

    Kernels read by row and position what there is to do; torch does what `needs` and `widths` say, to all rows.
    """

    rows: torch.Tensor  # [N] int64, the row of each
    positions: torch.Tensor  # [N] int64, absolute, of the token that is chosen
    tables: RowTables
    history: TokenHistory
    needs: Needs  # at least what the rows need
    widths: Widths
    masks: PositionMasks | None

    def part(self, positions: slice) -> Adjustments:
        """Return what is asked at some positions."""
        masks = None if self.masks is None else self.masks.part(positions)
        return replace(self, rows=self.rows[positions], positions=self.positions[positions], masks=masks)


FREE = -1
"""The number of masks of a row without a grammar."""


@dataclass(frozen=True, eq=False)
class StepMasks:
    """Masks of a step. A row is held to its masks only where they are for its true position and its true drafts."""

    num_masks: torch.Tensor  # [Y] int32, at most 1 + K; 0 where none came in time, `FREE` where there is no grammar
    positions: torch.Tensor  # [Y] int32, that the rows' first masks are for
    draft_ids: torch.Tensor  # [Y, K] int32, that the later masks are for
    of_positions: PositionMasks


def hold(
    tokens: StepTokens, masks: StepMasks, table: torch.Tensor, draft_table: torch.Tensor | None = None
) -> torch.Tensor:
    """Let each row keep at most as many tokens as it has masks for; return the rows' lengths, int64 [Y].

    A row that keeps none gets its last token as the first that it yields, where others look for its last one. Changes
    the tokens, `num_valid`, which must be there, and the numbers of drafts in place.

    Shapes: table [max_num_seqs, H] int32, the tokens of rows, see `raypp.ops.row_tokens`; draft_table [max_num_seqs, K
    or more] int32, the drafts by row; None: K is 0.
    """
    rows, token_ids, num_valid, num_drafts = tokens.rows, tokens.token_ids, tokens.num_valid, masks.draft_ids.shape[1]
    assert num_valid is not None
    allowed, is_free = masks.num_masks, masks.num_masks == FREE
    if draft_table is not None and num_drafts:
        is_same = draft_table.index_select(0, rows)[:, :num_drafts] == masks.draft_ids
        allowed = torch.minimum(allowed, 1 + is_same.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32))
    allowed = allowed * (tokens.positions == masks.positions)
    num_valid.copy_(torch.where(is_free, num_valid, torch.minimum(num_valid, allowed)))
    has_kept = num_valid > 0
    before = table[rows, (tokens.positions - 1) % table.shape[1]]
    token_ids[:, 0] = torch.where(has_kept, token_ids[:, 0], before)
    for count in (tokens.num_drafted, tokens.num_matched):
        if count is not None:
            count.mul_(has_kept)
    return tokens.positions + num_valid
