"""The text of one request: detokenized as the tokens come, ended by a stop string, shown as far as it is certain."""

from __future__ import annotations

from collections.abc import Sequence

from raypp.api.detokenizer import Decoder, Detokenizer
from raypp.api.stop import StopChecker


class RequestText:
    """Grows with the tokens of one request."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._stop_checker = StopChecker(stops) if stops else None
        self._text = ""
        self._is_finished = False

    def add(self, token_ids: Sequence[int]) -> str | None:
        """Take in tokens; return the stop string that they complete, if any. The text then ends before it."""
        return self._append(self._detokenizer.add(token_ids))

    def finish(self) -> str | None:
        """Take in that no more tokens come; return the stop string that the last characters complete, if any."""
        self._is_finished = True
        return self._append(self._detokenizer.finish())

    @property
    def visible(self) -> str:
        """The text so far, without what may yet turn out to be the beginning of a stop string."""
        if self._is_finished or self._stop_checker is None:
            return self._text
        return self._text[: self._stop_checker.num_safe(self._text)]

    def _append(self, new_text: str) -> str | None:
        self._text += new_text
        if self._stop_checker is None:
            return None
        match = self._stop_checker.find(self._text, len(new_text))
        if match is None:
            return None
        self._text = self._text[: match.text_len]
        self._is_finished = True
        return match.stop
