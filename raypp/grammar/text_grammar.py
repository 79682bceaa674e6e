"""One text under a grammar: which tokens may come next, after what has been accepted and behind each of its drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from raypp.errors import RequestError
from raypp.grammar.compiled_grammar import CompiledGrammar, Matcher
from raypp.messages import Int32s

Advance = tuple[int, list[int], list[int]]
"""What one step brought: its id, the tokens, the drafts behind them. There are many of them: no class of their own."""


class MaskRows:
    """Bit masks of several texts, one after the other: filled in place, sent as they are."""

    def __init__(self, capacity: int, vocab_size: int) -> None:
        """Have room for some; there may be more."""
        self._rows = np.empty((capacity, -(-vocab_size // 32)), np.int32)
        self.count = 0
        """Those that are there; to be lowered by whoever takes the last ones back."""

    def add(self, matcher: Matcher, allowed: Int32s | None) -> bool:
        """Add what may come next, of that `allowed` alone where any is left. Return False if nothing may, and add none.

        Args:
            matcher: Of the text.
            allowed: A mask of its own, [W].
        """
        if self.count == len(self._rows):
            self._rows = np.concatenate((self._rows, np.empty_like(self._rows)))
        row = self._rows[self.count]
        row.fill(-1)  # where everything is allowed, xgrammar writes nothing
        matcher.fill_next_token_bitmask(self._rows, self.count)
        if not np.count_nonzero(row):  # sooner done than `any`
            return False
        if allowed is not None and np.count_nonzero(row & allowed):
            row &= allowed
        self.count += 1
        return True

    def last_allows(self, token_id: int) -> bool:
        """Return whether the mask that was added last allows a token."""
        return token_id >= 0 and bool(self._rows[self.count - 1, token_id // 32] >> (token_id % 32) & 1)

    def bitmasks(self, first: int, end: int) -> Int32s:
        """Return those from one up to another, [end - first, W]."""
        return self._rows[first:end]


class TextGrammar:
    """Follows a text, for one thread at a time."""

    def __init__(
        self, number: int, compiled: CompiledGrammar, vocab_size: int, allowed_token_ids: Sequence[int] | None
    ) -> None:
        """Begin an empty text.

        Args:
            number: The driver's.
            compiled: What it is held to.
            vocab_size: V.
            allowed_token_ids: Of what the grammar allows these alone, wherever any of them is left.
        """
        self.number = number
        # The state of `MaskMakers`:
        self.waiting: deque[Advance] = deque()
        self.is_due = False  # whether somebody will look at what waits
        self.is_slow = False  # whether it took long the last time
        self.is_closed = False
        self.num_accepted = 0
        self._compiled = compiled
        self._allowed = None if allowed_token_ids is None else _bits(allowed_token_ids, -(-vocab_size // 32))

    @cached_property
    def _matcher(self) -> Matcher:
        """Made by whoever makes the first mask, since it may take long."""
        return self._compiled.matcher()

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were chosen.

        Raises:
            RequestError: the grammar does not allow one of them.
        """
        for token_id in token_ids:
            if not self._matcher.accept_token(token_id):
                raise RequestError(
                    "a text left its grammar",
                    got=f"token {token_id} after {self.num_accepted} tokens",
                    expected="a token that the grammar allows",
                    param="structured_outputs",
                )
            self.num_accepted += 1

    def add_masks(self, draft_ids: Sequence[int], rows: MaskRows) -> list[int]:
        """Add what may come next: behind the text, and behind each of the first drafts; return these drafts.

        Raises:
            RequestError: nothing at all may.
        """
        if not rows.add(self._matcher, self._allowed):
            raise RequestError(
                "no token of the model continues this text under its grammar",
                got=f"a text of {self.num_accepted} tokens",
                expected="a grammar all of whose beginnings can be completed, by tokens that do not end a text",
                hint="if every JSON form fails, eos_token_id in config.json or generation_config.json may name a token "
                "of ordinary text, such as a quote: no text can hold it; name the model's end token there",
                param="structured_outputs",
            )
        num_followed, followed = 0, list[int]()
        for draft_id in draft_ids:
            if not rows.last_allows(draft_id) or not self._matcher.accept_token(draft_id):
                break
            num_followed += 1
            if self._matcher.is_terminated() or not rows.add(self._matcher, self._allowed):
                break
            followed.append(draft_id)
        if num_followed:
            self._matcher.rollback(num_followed)
        return followed


def _bits(token_ids: Sequence[int], num_words: int) -> Int32s:
    is_set = np.zeros(num_words * 32, np.bool_)
    is_set[list(token_ids)] = True
    return np.packbits(is_set, bitorder="little").view("<i4")
