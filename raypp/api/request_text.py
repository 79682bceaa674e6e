"""The text of one continuation: detokenized as tokens come, ended by a stop string, shown as far as it is certain."""

from __future__ import annotations

from collections.abc import Sequence

from raypp.api.detokenizer import Detokenizer
from raypp.api.stop import StopChecker, StopScope, WholeText


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
        self._text = self._text[: match.text_len + (len(match.stop) if self._include_stop else 0)]
        self._is_finished = True
        return match.stop
