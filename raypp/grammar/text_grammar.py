"""One text under a grammar: which tokens may come next, after what has been accepted and behind each of its drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypp.errors import RequestError
from raypp.grammar.compile import CompiledGrammar, is_at_a_loss
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
        self._stop_token_ids = compiled.vocabulary.stop_token_ids
        self._is_ended = False  # by an end token, which the matcher never sees
        self._num_words = -(-compiled.vocabulary.vocab_size // 32)
        self._allowed = None if allowed_token_ids is None else _bits(allowed_token_ids, self._num_words)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were chosen.

        Raises:
            RequestError: the grammar does not allow one of them.
            RuntimeError: it cannot be computed.
        """
        for token_id in token_ids:
            if not self._goes_on(token_id):
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
        followed = list[int]()
        num_followed = 0
        for draft_id in draft_ids:
            row = rows[len(followed)]
            is_allowed = 0 <= draft_id < 32 * len(row) and bool(row[draft_id // 32] >> (draft_id % 32) & 1)
            if not is_allowed or not self._goes_on(draft_id):
                break
            if self._is_ended:
                self._is_ended = False
                break
            num_followed += 1
            if not self._fill(rows, 1 + len(followed)):
                break
            followed.append(draft_id)
        if num_followed:
            self._matcher.rollback(num_followed)
            self._check()
        return followed, rows[: 1 + len(followed)]

    def _goes_on(self, token_id: int) -> bool:
        """Go on by a token, an end token too; return False if it may not come."""
        if self._is_ended:
            return False
        if token_id in self._stop_token_ids:
            self._is_ended = bool(self._matcher.is_accepting())
            return self._is_ended
        is_taken: bool = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return is_taken

    def _fill(self, rows: Int32s, index: int) -> bool:
        """Write what may come next into a row of words, [N, W]; return whether anything may."""
        row = rows[index]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if is_at_a_loss(self._matcher):
            row.fill(0)
            return False
        self._check()
        if self._allowed is not None and np.count_nonzero(row & self._allowed):
            row &= self._allowed
        return bool(np.count_nonzero(row))  # sooner done than `any`

    def _check(self) -> None:
        if self._matcher.is_error() or self._matcher.stop_reason() not in ("NotStopped", "NoExtension"):
            raise RuntimeError(self._matcher.get_error() or self._matcher.stop_reason())


def _bits(token_ids: Sequence[int], num_words: int) -> Int32s:
    is_set = np.zeros(num_words * 32, np.bool_)
    is_set[list(token_ids)] = True
    return np.packbits(is_set, bitorder="little").view("<i4")
