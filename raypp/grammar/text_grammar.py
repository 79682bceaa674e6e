"""One text under a grammar: which tokens may come next, after what has been accepted and behind each of its drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypp.errors import RequestError
from raypp.grammar.compile import CompiledGrammar
from raypp.messages import Int32s


class TextGrammar:
    """Follows a text, for one thread at a time."""

    def __init__(self, compiled: CompiledGrammar, allowed_token_ids: Sequence[int] | None) -> None:
        """Begin an empty text.

        Args:
            compiled: What it is held to.
            allowed_token_ids: Of what the grammar allows these alone, wherever any of them is left.
        """
        self.num_accepted = 0
        self._matcher = compiled.matcher()
        self._num_words = -(-compiled.vocabulary.vocab_size // 32)
        self._allowed = None if allowed_token_ids is None else _bits(allowed_token_ids, self._num_words)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were chosen.

        Raises:
            RequestError: the grammar does not allow one of them.
            RuntimeError: it cannot be computed.
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

    def masks(self, draft_ids: Sequence[int]) -> tuple[list[int], Int32s]:
        """Return the first drafts with a mask behind them, and all masks: behind the text, and behind these drafts.

        A mask is a bit per token, [1 + those drafts, W].

        Raises:
            RequestError: nothing at all may come next.
            RuntimeError: it cannot be computed.
        """
        rows = np.zeros((1 + len(draft_ids), self._num_words), np.int32)
        if not self._fill(rows, 0):
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
            if not _allows(rows[len(followed)], draft_id) or not self._matcher.accept_token(draft_id):
                break
            num_followed += 1
            if self._matcher.is_terminated or not self._fill(rows, 1 + len(followed)):
                break
            followed.append(draft_id)
        if num_followed:
            self._matcher.rollback(num_followed)
        return followed, rows[: 1 + len(followed)]

    def _fill(self, rows: Int32s, index: int) -> bool:
        """Write what may come next into a row; return whether anything may."""
        self._matcher.fill_next_token_bitmask(rows, index)
        row = rows[index]
        if self._allowed is not None and np.count_nonzero(row & self._allowed):
            row &= self._allowed
        return bool(np.count_nonzero(row))  # sooner done than `any`


def _allows(row: Int32s, token_id: int) -> bool:
    return 0 <= token_id < 32 * len(row) and bool(row[token_id // 32] >> (token_id % 32) & 1)


def _bits(token_ids: Sequence[int], num_words: int) -> Int32s:
    is_set = np.zeros(num_words * 32, np.bool_)
    is_set[list(token_ids)] = True
    return np.packbits(is_set, bitorder="little").view("<i4")
