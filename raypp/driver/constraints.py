"""Compiles the grammars that requests ask for: once for equal ones, a few at a time, in turn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from raypp.driver.grammar_process import GrammarBackend
from raypp.grammar.compilers import MAX_COMPILERS
from raypp.grammar.grammar_messages import CompileGrammar, key_of
from raypp.structured_outputs import source_of

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Constraint(Generic[T]):
    """What the texts of unfinished requests share."""

    key: str
    value: Mapping[str, Any]  # `SamplingParams.structured_outputs`
    is_compiled: bool = False
    is_queued: bool = False  # to be compiled, or being so
    num_failures: int = 0  # of processes that were to compile it
    num_texts: int = 0
    waiting: dict[T, None] = field(default_factory=dict)  # texts that can go on once it is compiled


class Constraints(Generic[T]):
    """All constraints of unfinished requests, whose texts are of type T."""

    def __init__(self, backend: GrammarBackend) -> None:
        """Know none yet; the backend compiles them."""
        self._backend = backend
        self._by_key: dict[str, Constraint[T]] = {}
        self._queue: deque[Constraint[T]] = deque()
        self.compiling: dict[Constraint[T], float] = {}
        """Those that the backend was told to compile and has not answered, and when, monotonic; the oldest first."""

    def join(self, value: Mapping[str, Any]) -> Constraint[T]:
        """Return the constraint of one more text."""
        key = key_of(source_of(dict(value)))
        constraint = self._by_key.get(key)
        if constraint is None:
            constraint = self._by_key[key] = Constraint(key, value)
        elif isinstance(value, dict):
            value.update(constraint.value)  # the same, so that its memory is kept only once
        constraint.num_texts += 1
        return constraint

    def leave(self, constraint: Constraint[T], text: T) -> None:
        """Forget one of a constraint's texts."""
        constraint.waiting.pop(text, None)
        constraint.num_texts -= 1
        self._forget_unused(constraint)

    def want(self, constraint: Constraint[T], text: T) -> None:
        """Have a constraint compiled that a text needs; `compile_next` has to follow."""
        constraint.waiting[text] = None
        if not constraint.is_queued:
            constraint.is_queued = True
            self._queue.append(constraint)

    def compile_next(self) -> None:
        """Order as many constraints as are compiled at a time: so it is known how long each may take."""
        while self._queue and len(self.compiling) < MAX_COMPILERS:
            constraint = self._queue.popleft()
            if constraint.waiting:
                self.compiling[constraint] = time.monotonic()
                self._backend.send(CompileGrammar(source_of(dict(constraint.value))))
            else:
                constraint.is_queued = False
                self._forget_unused(constraint)

    def take_compiled(self, key: str) -> list[T]:
        """Take in that a constraint is compiled; return the texts that waited for it."""
        constraint = self._by_key.get(key)
        if constraint is None:
            return []
        constraint.is_compiled = True
        return self.take_failed(constraint)

    def take_failed(self, constraint: Constraint[T] | str) -> list[T]:
        """Take in that a constraint is not going to be compiled; return the texts that waited for it."""
        found = self._by_key.get(constraint) if isinstance(constraint, str) else constraint
        if found is None:
            return []
        self.compiling.pop(found, None)
        found.is_queued = False
        texts, found.waiting = list(found.waiting), {}
        self._forget_unused(found)
        return texts

    def take_all(self) -> list[T]:
        """Give all constraints up that are not compiled; return the texts that waited for them."""
        queued = [*self.compiling, *self._queue]
        self._queue.clear()
        return [text for constraint in queued for text in self.take_failed(constraint)]

    def begin_again(self) -> None:
        """Take in that nothing is compiled any more; whatever was being compiled is the first in the queue."""
        for constraint in self._by_key.values():
            constraint.is_compiled = False
        self._queue.extendleft(reversed(self.compiling))
        self.compiling.clear()

    def _forget_unused(self, constraint: Constraint[T]) -> None:
        if not constraint.num_texts and not constraint.is_queued:
            self._by_key.pop(constraint.key, None)
