"""Token ids to text while the tokens are still coming.

Text is the UTF-8 of its tokens' bytes, one behind the other. A token alone has no text: its first character may have
begun in the token before, and the space of a word is text only behind another token.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from raypp.messages import Int32s
from raypp.types import SamplingParams

_Utf8Decoder = getincrementaldecoder("utf-8")


class Decoder(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out."""

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text, special ones too."""

    def token_text(self, token_id: int) -> str:
        """Return the text of a token behind others, special ones too."""


class Detokenizer:
    """The text of one request. What `add` and `finish` return, joined, is the decoding of all tokens at once."""

    def __init__(self, decoder: Decoder, *, skipped: Collection[int] = (), prompt: Sequence[int] | Int32s = ()) -> None:
        """Begin empty.

        Args:
            decoder: Tells the tokens' bytes.
            skipped: Tokens that have no text.
            prompt: The tokens that the text continues.
        """
        self._token_bytes = decoder.token_bytes
        self._skipped = skipped
        self._utf8 = _Utf8Decoder("replace")
        self._is_begun = any(decoder.token_bytes(int(t)) for t in reversed(prompt) if t not in skipped)

    @classmethod
    def of_continuation(cls, decoder: Decoder, params: SamplingParams, prompt: Sequence[int] | Int32s) -> Detokenizer:
        """Return one for what continues a prompt, with the special tokens that the parameters show."""
        skipped = decoder.special_token_ids.difference(params.shown_special_tokens)
        return cls(decoder, skipped=skipped if params.skip_special_tokens else (), prompt=prompt)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of the next token."""
        piece = b"" if token_id in self._skipped else self._token_bytes(token_id)
        if piece and not self._is_begun:
            self._is_begun = True
            return self._token_bytes(token_id, is_first=True)
        return piece

    def add(self, token_ids: Iterable[int]) -> str:
        """Take in tokens and return the text that they complete; no character of it will change any more."""
        return self._utf8.decode(b"".join(map(self.piece, token_ids)))

    def finish(self) -> str:
        """Return the text of what is still pending: an incomplete character as U+FFFD."""
        return self._utf8.decode(b"", final=True)


class TokenPlaces:
    """Where the tokens of a text begin in it, in characters."""

    def __init__(self, num_chars: int = 0) -> None:
        """Begin with the next token behind so many characters."""
        self._utf8 = _Utf8Decoder("replace")
        self.num_chars = num_chars
        """Characters that are complete."""

    def add(self, piece: bytes) -> int:
        """Take in the bytes of a token; return the place of the character that the first of them is in."""
        if not piece:
            return self.num_chars
        self.num_chars += len(self._utf8.decode(piece[:1]))
        is_open = bool(self._utf8.getstate()[0])
        place = self.num_chars - 1 + is_open
        self.num_chars += len(self._utf8.decode(piece[1:]))
        return place


def prompt_places(decoder: Decoder, prompt: str, token_ids: Iterable[int]) -> list[int]:
    """Return where the tokens of a prompt begin in its text.

    What the tokenizer put in front of a text is not in it: special tokens, and the space of a first word.
    """
    places, found = TokenPlaces(), list[int]()
    special = decoder.special_token_ids
    for token_id in token_ids:
        piece, at = decoder.token_bytes(token_id), places.num_chars
        if token_id in special and not prompt.startswith(decoder.token_text(token_id), at):
            piece = b""
        elif piece.startswith(b" ") and not prompt.startswith(" ", at):
            piece = piece[1:]
        found.append(places.add(piece))
    return found
