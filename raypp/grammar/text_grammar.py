"""One text under a grammar: which tokens may come next, after what has been accepted and behind each of its drafts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raypp.errors import RequestError
from raypp.messages import Int32s


@dataclass(frozen=True)
class Advance:
    """What one step brought."""

    step_id: int
    token_ids: list[int]
    draft_ids: list[int]


@dataclass(frozen=True)
class NextMasks:
    """What is allowed next. M masks: behind the text, and behind each of the first M - 1 drafts."""

    num_accepted: int
    draft_ids: list[int]  # M - 1
    bitmasks: Int32s  # [M, W]


class TextGrammar:
    """Follows a text. `lock` is for whoever advances it; `waiting` is appended to by one thread alone."""

    def __init__(self, compiled: Any, vocab_size: int, allowed_token_ids: Sequence[int] | None) -> None:
        """Begin an empty text.

        Args:
            compiled: xgrammar's `CompiledGrammar`.
            vocab_size: V.
            allowed_token_ids: Of what the grammar allows these alone, wherever any of them is left.
        """
        import xgrammar

        self.lock = threading.Lock()
        self.waiting: deque[Advance] = deque()
        self.is_slow = False  # whether it took long the last time
        self._matcher = xgrammar.GrammarMatcher(compiled)
        num_words = -(-vocab_size // 32)
        self._buffer = np.empty((1, num_words), np.int32)
        self._filled = torch.from_numpy(self._buffer)
        self._num_accepted = 0
        self._allowed = None if allowed_token_ids is None else _bits(allowed_token_ids, num_words)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were chosen.

        Raises:
            RequestError: the grammar does not allow one of them.
        """
        for token_id in token_ids:
            if not self._matcher.accept_token(token_id):
                raise RequestError(
                    "a text left its grammar",
                    got=f"token {token_id} after {self._num_accepted} tokens",
                    expected="a token that the grammar allows",
                )
            self._num_accepted += 1

    def next_masks(self, draft_ids: Sequence[int]) -> NextMasks:
        """Return what may come next.

        Raises:
            RequestError: nothing at all may.
        """
        masks = [self._mask()]
        if not masks[0].any():
            raise RequestError(
                "nothing that the model's tokens can write goes on with this text under its grammar",
                got=f"a text of {self._num_accepted} tokens",
                expected="a grammar all of whose beginnings can be completed",
            )
        followed: list[int] = []
        for draft_id in draft_ids:
            if not _has_bit(masks[-1], draft_id) or not self._matcher.accept_token(draft_id):
                break
            followed.append(draft_id)
            mask = None if self._matcher.is_terminated() else self._mask()
            if mask is None or not mask.any():
                break
            masks.append(mask)
        if followed:
            self._matcher.rollback(len(followed))
        return NextMasks(
            self._num_accepted, followed[: len(masks) - 1], masks[0][None] if len(masks) == 1 else np.stack(masks)
        )

    def _mask(self) -> Int32s:
        self._buffer[:] = -1  # where everything is allowed, xgrammar writes nothing
        self._matcher.fill_next_token_bitmask(self._filled)
        bits: Int32s = self._buffer[0].copy()
        if self._allowed is not None and (bits & self._allowed).any():
            bits &= self._allowed
        return bits


def _bits(token_ids: Sequence[int], num_words: int) -> Int32s:
    is_set = np.zeros(num_words * 32, np.bool_)
    is_set[list(token_ids)] = True
    return np.packbits(is_set, bitorder="little").view("<i4")


def _has_bit(mask: Int32s, token_id: int) -> bool:
    return token_id >= 0 and bool(mask[token_id // 32] >> (token_id % 32) & 1)
