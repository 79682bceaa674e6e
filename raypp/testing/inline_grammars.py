"""Grammars followed in the calling thread: no process, no threads, nothing late unless that is asked for."""

from __future__ import annotations

import math
import random
from collections import deque

from raypp.driver.grammar_process import GrammarEvent
from raypp.errors import RequestError
from raypp.grammar.compile import compile_constraint
from raypp.grammar.grammar_messages import GrammarMasks, GrammarOrder, GrammarReply, decode, encode
from raypp.grammar.texts import Texts
from raypp.grammar.vocabulary import VocabularySource


class InlineGrammars:
    """A `GrammarBackend`."""

    def __init__(self, source: VocabularySource, *, lateness: random.Random | None = None) -> None:
        """Follow nothing yet; the tokenizer is loaded when the first grammar comes.

        Args:
            source: Of the vocabulary.
            lateness: Hold masks back at random, by this many calls of `receive`.
        """
        self._source = source
        self._lateness = lateness
        self._replies: deque[tuple[int, GrammarReply]] = deque()
        self._num_calls = 0
        self._texts: Texts | None = None

    compile_timeout_s = math.inf

    def send(self, order: GrammarOrder) -> None:
        """Do what is asked at once."""
        if self._texts is None:
            self._vocabulary = self._source.load()
            self._texts = Texts(self._vocabulary, self._source.vocab_size, self._compile, self._reply, threads=False)
        self._texts.handle(decode(encode(order)))
        self._texts.makers.make_due()

    def receive(self) -> list[GrammarEvent]:
        """Return what is due."""
        self._num_calls += 1
        due = [reply for call, reply in self._replies if call <= self._num_calls]
        self._replies = deque(entry for entry in self._replies if entry[0] > self._num_calls)
        return list(due)

    def fileno(self) -> int | None:
        """Return nothing: replies are there as soon as an order was sent."""
        return None

    def restart(self) -> None:
        """Forget everything."""
        self._texts = None
        self._replies.clear()

    def computing(self) -> list[tuple[int, float]]:
        """Return no text: nobody computes between two calls."""
        return []

    def close(self) -> None:
        """End nothing."""

    def _compile(self, source: str) -> None:
        assert self._texts is not None
        try:
            self._texts.take_compiled(source, compile_constraint(source, self._vocabulary))
        except RequestError as error:
            self._texts.take_compiled(source, error)

    def _reply(self, reply: GrammarReply) -> None:
        is_late = self._lateness is not None and isinstance(reply, GrammarMasks)
        delay = self._lateness.choice((0, 0, 1, 2, 5)) if is_late and self._lateness is not None else 0
        self._replies.append((self._num_calls + delay, decode(encode(reply))))
