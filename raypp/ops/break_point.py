"""Marks operations that no CUDA graph may hold, because what they launch depends on what the host knows of the step.

    @break_point
    def attend(q, batch, out): ...

A call of such an operation ends the graph that is being recorded, runs, and begins the next one. At every replay it is
called again, with the same arguments: so what differs from step to step must be in an object or a buffer that is passed
and changed, and what it writes must be a buffer that is passed. An operation that should be marked
and is not replays what the host knew at the time of recording; `raypp.graphs.debug` finds it.

The idea is SGLang's breakable CUDA graph (2026).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Breakable(Protocol):
    """A capture in progress that can be interrupted."""

    def interrupt(self, op: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """End the graph, call the operation now and at every replay, begin the next graph."""


# Per thread, like the stream that torch captures. Set while a graph is captured.
_in_progress: ContextVar[Breakable | None] = ContextVar("recording", default=None)


def break_point(op: Callable[P, R]) -> Callable[P, R]:
    """Mark an operation. Outside of a breakable capture it is simply called."""

    @wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        recording = _in_progress.get()
        return op(*args, **kwargs) if recording is None else recording.interrupt(op, *args, **kwargs)

    return call


@contextmanager
def breaking_at(recording: Breakable | None) -> Iterator[None]:
    """Have break points interrupt `recording` meanwhile; None: they run as part of their caller."""
    token = _in_progress.set(recording)
    try:
        yield
    finally:
        _in_progress.reset(token)
