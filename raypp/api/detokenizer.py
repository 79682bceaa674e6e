"""Token ids to text while the tokens are still coming.

    window:  [ context | pending ]        context: the last tokens whose text is out
    text of pending = decode(window) without decode(context)

A token alone has no text: its first character may have begun in the token before, and a leading space may depend on
there being one. So a short window is decoded, twice. While its text ends in U+FFFD the last character is incomplete,
and nothing of the pending tokens is given out.

Vocabularies with byte fallback have tokens that are one byte each. A run of them is text if all its bytes together are
valid UTF-8; if one is not, each of them becomes U+FFFD, the valid ones too. So a run is kept back until it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

_INCOMPLETE = "\ufffd"
_MAX_PENDING = 16
"""A character has at most 4 tokens. More pending ones are bytes that are no text, and the window must not grow."""


class Decoder(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out."""

    @property
    def byte_token_ids(self) -> frozenset[int]:
        """The tokens of a byte fallback, one byte each; empty without one."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""

    def token_text(self, token_id: int) -> str:
        """Return the text of a token alone, special ones too."""


class ShowingDecoder:
    """A decoder to which some special tokens are text like any other."""

    def __init__(self, decoder: Decoder, shown_token_ids: Iterable[int]) -> None:
        self._decoder = decoder
        self.special_token_ids = decoder.special_token_ids - frozenset(shown_token_ids)

    @property
    def byte_token_ids(self) -> frozenset[int]:
        """The tokens of a byte fallback, one byte each; empty without one."""
        return self._decoder.byte_token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.special_token_ids]
        return self._decoder.decode(token_ids, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token alone, special ones too."""
        return self._decoder.token_text(token_id)


class Detokenizer:
    """The text of one request. What `add` and `finish` return, joined, is the decoding of all tokens at once."""

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._decode = partial(decoder.decode, skip_special_tokens=skip_special_tokens)
        self._skipped_token_ids = decoder.special_token_ids if skip_special_tokens else frozenset()
        self._byte_token_ids = decoder.byte_token_ids
        self._run: list[int] = []  # the newest tokens, as far as they are single bytes
        self._window: list[int] = []
        self._num_context = 0  # tokens of the window whose text is out
        self._context_text_len = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Take in tokens and return the text that they complete; no character of it will change any more."""
        pending = self._without_open_run([t for t in token_ids if t not in self._skipped_token_ids])
        if not pending:
            return ""
        window = self._window
        window.extend(pending)
        text = self._decode(window)
        if text.endswith(_INCOMPLETE):
            return self._settle_part(text) if len(window) - self._num_context > _MAX_PENDING else ""
        new_text = text[self._context_text_len :]
        self._set_context(window[self._num_context :], num_pending=0)
        return new_text

    def finish(self) -> str:
        """Return the text of what is still pending, incomplete characters as U+FFFD."""
        new_text = self._decode(self._window + self._run)[self._context_text_len :]
        self._run = []
        self._set_context([], num_pending=0)
        return new_text

    def _without_open_run(self, token_ids: list[int]) -> list[int]:
        """Return the tokens up to the last one that is no single byte; keep those behind it back."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._byte_token_ids:
            end -= 1
        if not end:
            self._run += token_ids
            return []
        closed = self._run + token_ids[:end]
        self._run = token_ids[end:]
        return closed

    def _settle_part(self, text: str) -> str:
        """Give out the pending tokens but the last few, cut where the text is the same cut or whole."""
        window = self._window
        for num_kept in range(1, _MAX_PENDING // 2):
            head = self._decode(window[:-num_kept])
            if head + self._decode(window[-num_kept:]) == text:
                new_text = head[self._context_text_len :]
                self._set_context(window[-num_kept:], num_pending=num_kept)
                return new_text
        return ""

    def _set_context(self, window: list[int], num_pending: int) -> None:
        self._window = window
        self._num_context = len(window) - num_pending
        self._context_text_len = len(self._decode(window[: self._num_context])) if self._num_context else 0
