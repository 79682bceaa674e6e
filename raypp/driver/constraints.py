"""Compiles the grammars that requests ask for: once for equal ones, a few at a time, in turn."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from raypp.errors import RayppError
from raypp.grammar.compile import CompiledGrammar, kind_and_value, refused
from raypp.grammar.grammar_threads import MAX_COMPILERS, CompileJob, GrammarBackend, GrammarCompileJob
from raypp.structured_outputs import source_of

_MAX_KEPT_BYTES = 512 << 20
"""Of compiled grammars; the one used last is kept in any case."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Constraint(Generic[T]):
    """What the texts of unfinished requests share."""

    key: str
    value: Mapping[str, Any]  # `SamplingParams.structured_outputs`
    is_queued: bool = False  # to be compiled, or being so
    is_slow: bool = False  # whether the newest masks of one of its texts took long
    num_texts: int = 0
    waiting: dict[T, None] = field(default_factory=dict)  # texts that can go on once it is compiled


class Constraints(Generic[T]):
    """All constraints of unfinished requests, whose texts are of type T, and compiled ones of others."""

    def __init__(self, backend: GrammarBackend, timeout_s: float) -> None:
        """Know none yet.

        Args:
            backend: Compiles them.
            timeout_s: What one may take, seconds.
        """
        self._backend = backend
        self._timeout_s = timeout_s
        self._by_key: dict[str, Constraint[T]] = {}
        self._queue: deque[Constraint[T]] = deque()
        self._compiling: dict[CompileJob, Constraint[T]] = {}
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()  # by key, the last used ones last
        self._num_kept_bytes = 0

    def join(self, value: Mapping[str, Any]) -> Constraint[T]:
        """Return the constraint of one more text."""
        key = blake2b(source_of(dict(value)).encode(), digest_size=16).hexdigest()
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

    def compiled(self, constraint: Constraint[T]) -> CompiledGrammar | None:
        """Return the constraint's grammar; None if it has to be compiled, perhaps once more."""
        if constraint.key in self._kept:
            self._kept.move_to_end(constraint.key)
        return self._kept.get(constraint.key)

    def want(self, constraint: Constraint[T], text: T) -> None:
        """Have a constraint compiled that a text needs; `compile_next` has to follow."""
        constraint.waiting[text] = None
        if not constraint.is_queued:
            constraint.is_queued = True
            self._queue.append(constraint)

    def compile_next(self) -> None:
        """Have as many constraints compiled as are at a time."""
        while self._queue and len(self._compiling) < MAX_COMPILERS:
            constraint = self._queue.popleft()
            if constraint.waiting:
                source = source_of(dict(constraint.value))
                job = (GrammarCompileJob if "grammar" in constraint.value else CompileJob)(source)
                self._compiling[job] = constraint
                self._backend.submit(job)
            else:
                constraint.is_queued = False
                self._forget_unused(constraint)

    def take(self, job: CompileJob) -> list[T]:
        """Take in what a job has brought; return the texts that waited for that."""
        constraint = self._compiling.pop(job, None)
        if constraint is None:  # it was given up
            return []
        if job.compiled is not None:
            self._keep(constraint.key, job.compiled)
        return self._release(constraint)

    def take_late(self) -> list[tuple[list[T], RayppError]]:
        """Give up the jobs that are over their time; return the texts that waited for each, and why they do in vain."""
        now_s = time.monotonic()
        late = [job for job in self._compiling if job.began_s is not None and now_s - job.began_s > self._timeout_s]
        given_up = list[tuple[list[T], RayppError]]()
        for job in late:
            self._backend.give_up(job)
            kind, _ = kind_and_value(job.source)
            why = f"compiling it takes longer than grammar_compile_timeout_s = {self._timeout_s:g}"
            given_up.append((self._release(self._compiling.pop(job)), refused(kind, why)))
        return given_up

    def _release(self, constraint: Constraint[T]) -> list[T]:
        """Return the texts that waited for a constraint, which is no longer to be compiled."""
        constraint.is_queued = False
        texts, constraint.waiting = list(constraint.waiting), {}
        self._forget_unused(constraint)
        return texts

    def _keep(self, key: str, compiled: CompiledGrammar) -> None:
        self._kept[key] = compiled
        self._num_kept_bytes += compiled.memory_size_bytes
        while self._num_kept_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= oldest.memory_size_bytes

    def _forget_unused(self, constraint: Constraint[T]) -> None:
        if not constraint.num_texts and not constraint.is_queued:
            self._by_key.pop(constraint.key, None)
