"""The text of one continuation: detokenized as tokens come, ended by a stop string, shown as far as it is certain.

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


class StopScope(Protocol):
    """Knows which parts of a growing text stop strings are about."""

    @property
    def content_spans(self) -> Sequence[tuple[int, int]]:
        """Start and end of each of these parts, as far as they have become clear; the last one may grow."""

    @property
    def num_settled(self) -> int:
        """How many characters are certain to be in one of these parts, or certain to be in none."""

    def feed(self, text: str, *, is_last: bool = False) -> object:
        """Read on. With the last text, all becomes clear."""


class WholeText:
    """All of the text."""

    def __init__(self) -> None:
        self.num_settled = 0

    @property
    def content_spans(self) -> Sequence[tuple[int, int]]:
        """One part."""
        return ((0, self.num_settled),)

    def feed(self, text: str, *, is_last: bool = False) -> None:
        """Read on."""
        self.num_settled += len(text)


class StopChecker:
    """Watches one growing text.

    The stop string that is complete first ends the text (of several complete at once, the longest), so the result does
    not depend on the pieces in which the text arrives.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._longest = len(self._stops[0])

    def find(self, text: str, span: tuple[int, int], num_old: int) -> tuple[int, str] | None:
        """Return where the first stop string in a span begins that ends behind `num_old` characters, and the string."""
        start, end = span
        if end <= num_old:
            return None
        found = [(text.find(stop, max(start, num_old - len(stop) + 1), end), stop) for stop in self._stops]
        return min((pair for pair in found if pair[0] >= 0), key=lambda pair: pair[0] + len(pair[1]), default=None)

    def num_safe(self, text: str) -> int:
        """Return how many characters of `text` no stop string can take back any more."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)


class RequestText:
    """Grows with the tokens of one continuation."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        scope: StopScope | None = None,
    ) -> None:
        """Begin empty.

        Args:
            detokenizer: Makes its text of tokens.
            stops: Strings that end the text.
            include_stop: Whether the text holds the string that ended it.
            scope: Which parts of the text the strings are about; None: all of it.
        """
        self._detokenizer = detokenizer
        self._stop_checker = StopChecker(stops) if stops else None
        self._include_stop = include_stop
        self._scope: StopScope = WholeText() if scope is None else scope
        self._num_searched = 0  # of the characters: a stop string that ends among them ends nothing
        self._text = ""
        self._is_finished = False

    def add(self, token_ids: Sequence[int], *, may_stop: bool = True) -> str | None:
        """Take in tokens; return the stop string that they complete, if any: the text then ends there.

        Args:
            token_ids: New tokens.
            may_stop: False: a stop string that they complete is text like any other.
        """
        return self._append(self._detokenizer.add(token_ids), may_stop)

    def finish(self, *, may_stop: bool = True) -> str | None:
        """Take in that no more tokens come; return the stop string that the last characters complete, if any."""
        self._is_finished = True
        return self._append(self._detokenizer.finish(), may_stop)

    @property
    def visible(self) -> str:
        """The text so far, without what may yet turn out to be the beginning of a stop string."""
        if self._is_finished or self._stop_checker is None:
            return self._text
        settled = self._text[: self._scope.num_settled]
        spans = self._scope.content_spans
        if self._include_stop or not spans or spans[-1][1] < len(settled):
            return settled
        return settled[: self._stop_checker.num_safe(settled)]

    def _append(self, new_text: str, may_stop: bool) -> str | None:
        self._text += new_text
        if self._stop_checker is None:
            return None
        self._scope.feed(new_text, is_last=self._is_finished)
        if not may_stop:
            self._num_searched = len(self._text)
            return None
        spans = self._scope.content_spans
        found = (self._stop_checker.find(self._text, span, self._num_searched) for span in spans)
        match = next(filter(None, found), None)
        if spans:
            self._num_searched = max(self._num_searched, spans[-1][1])
        if match is None:
            return None
        at, stop = match
        self._text = self._text[: at + (len(stop) if self._include_stop else 0)]
        self._is_finished = True
        return stop
