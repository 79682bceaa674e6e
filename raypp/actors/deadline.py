"""Waiting for actors: one time limit shared by several waits, and Ray's exceptions as raypp's errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from raypp.errors import DeadlineError, EngineDeadError, RayppError


class Deadline:
    """A moment that was `seconds` away when this was made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends_s = time.monotonic() + seconds

    @property
    def remaining_s(self) -> float:
        """Seconds left, never less than 0."""
        return max(self._ends_s - time.monotonic(), 0.0)


def in_time(function: Callable[[], object], timeout_s: float) -> bool:
    """Call a function that may never return, in a thread of its own; return whether it did in time.

    Args:
        function: What to call. What it raises counts as an answer, and goes to `threading.excepthook`.
        timeout_s: How long it is waited for. It goes on after that.
    """
    thread = threading.Thread(target=function, name="bounded-call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def value_of(ref: Any) -> Any:
    """Return what a call that has ended returned, None when it failed."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayError:
        return None


@contextmanager
def raypp_errors(limit: str) -> Iterator[None]:
    """Raise a remote RayppError as itself, and every other failure of Ray as one.

    Args:
        limit: What bounds the wait, for the error when it runs out.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RayppError):
            raise error.cause from None
        raise EngineDeadError(
            "an actor of the engine failed", got=repr(error.cause), hint="this is a fault of raypp"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise EngineDeadError("an actor of the engine died", got=in_short(error)) from error
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineError(
            "the engine's driver did not answer in time", expected=f"an answer within {limit}"
        ) from error
    except ray.exceptions.RayError as error:
        raise EngineDeadError("Ray ended an actor of the engine", got=in_short(error)) from error


def in_short(error: BaseException) -> str:
    """Return what Ray says first and last: which actor, the event and its cause. The rest is for Ray's own log."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    actor = next((f"{line.split()[-1]}: " for line in lines if line.startswith("\tclass_name: ")), "")
    return actor + (lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}")
