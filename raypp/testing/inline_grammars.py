"""Grammars compiled and followed in the calling thread: nothing is late unless that is asked for."""

from __future__ import annotations

import random
from collections import deque
from functools import cached_property

from raypp.grammar.grammar_threads import Job, MaskJob
from raypp.grammar.vocabulary import Vocabulary, VocabularySource


class InlineGrammars:
    """A `GrammarBackend`."""

    def __init__(self, source: VocabularySource, *, lateness: random.Random | None = None) -> None:
        """Do nothing yet; the tokenizer is loaded when the first grammar comes.

        Args:
            source: Of the vocabulary.
            lateness: Hold masks back at random, by this many calls of `receive`.
        """
        self._source = source
        self._lateness = lateness
        self._done: deque[tuple[int, Job]] = deque()
        self._num_calls = 0

    def submit(self, job: Job) -> None:
        """Do a job now."""
        job.run(lambda: self._vocabulary)
        is_late = self._lateness is not None and isinstance(job, MaskJob)
        delay = self._lateness.choice((0, 0, 1, 2, 5)) if is_late and self._lateness is not None else 0
        self._done.append((self._num_calls + delay, job))

    def receive(self) -> list[Job]:
        """Return what is due."""
        self._num_calls += 1
        due = [job for call, job in self._done if call <= self._num_calls]
        self._done = deque(entry for entry in self._done if entry[0] > self._num_calls)
        return due

    def fileno(self) -> int | None:
        """Return nothing: a job is done as soon as it was submitted."""
        return None

    def give_up(self, job: Job) -> None:
        """Do nothing: no job is under way between two calls."""

    def close(self) -> None:
        """End nothing."""

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._source.load()
