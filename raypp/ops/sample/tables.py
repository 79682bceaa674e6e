"""Tables of rows' parameters for the choice of tokens, of fixed width, and what a step asks at its positions.

S rows of the tables, N positions at which a token is chosen (a row may have several), V vocabulary, W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntFlag

import torch

from raypp.ops.sample.token_history import TokenHistory
from raypp.ops.sample.truncation import Truncation

ANY_TOKEN = -1
"""Stands in `bad_words` before the beginning of a short word, and matches every token."""


class Needs(IntFlag):
    """What a row's parameters ask of the sampler."""

    GREEDY = 0
    DRAW = 1
    TRUNCATE = 2
    BIAS = 4
    PENALTIES = 8
    MIN_TOKENS = 16
    BAD_WORDS = 32
    ALLOWED = 64
    LOGPROBS = 128
    GRAMMAR = 256
    # Those that change the logits themselves, before grammar and temperature, in this order.
    CHANGES = BIAS | PENALTIES | MIN_TOKENS | BAD_WORDS | ALLOWED
    # Those that look at earlier tokens.
    HISTORY = PENALTIES | BAD_WORDS | GRAMMAR
    ALL = DRAW | TRUNCATE | CHANGES | LOGPROBS


@dataclass(frozen=True, eq=False)
class DrawTables:
    """How rows draw."""

    temperature: torch.Tensor  # [S] float32, 0 is greedy
    top_k: torch.Tensor  # [S] int32, 0 for all
    top_p: torch.Tensor  # [S] float32, 1 for all
    min_p: torch.Tensor  # [S] float32, 0 for all
    seeds: torch.Tensor  # [S] int64

    @property
    def truncation(self) -> Truncation:
        """top_k, top_p and min_p."""
        return self.top_k, self.top_p, self.min_p


@dataclass(frozen=True, eq=False)
class RowTables:
    """Parameters by row. B biased tokens, E end tokens, P bad words of at most L tokens."""

    needs: torch.Tensor  # [S] int32, of `Needs`
    bias_token_ids: torch.Tensor  # [S, B] int32
    bias: torch.Tensor  # [S, B] float32, 0 behind the last
    num_biased: torch.Tensor  # [S] int32
    repetition: torch.Tensor  # [S] float32, 1 is neutral
    frequency: torch.Tensor  # [S] float32, 0 is neutral
    presence: torch.Tensor  # [S] float32, 0 is neutral
    min_lengths: torch.Tensor  # [S] int64, tokens before which no end token may come
    end_token_ids: torch.Tensor  # [S, E] int32, NO_TOKEN behind the last
    bad_words: torch.Tensor  # [S, P, L] int32, each at the end of its place, ANY_TOKEN in front of it
    num_bad_words: torch.Tensor  # [S] int32
    allowed: torch.Tensor  # [S, W] int32, a bit per token
    num_reported: torch.Tensor  # [S] int32, see `raypp.ops.sample.token_choice.TokenChoice.report`


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
class Asked:
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

    def part(self, positions: slice) -> Asked:
        """Return what is asked at some positions."""
        masks = None if self.masks is None else self.masks.part(positions)
        return replace(self, rows=self.rows[positions], positions=self.positions[positions], masks=masks)
