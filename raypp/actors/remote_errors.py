"""Turns Ray's exceptions into the error that was raised remotely, or into what it means for the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from raypp.errors import DeadlineError, EngineDeadError, RayppError


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


def in_short(error: Exception) -> str:
    """Return what Ray says first and last: which actor, the event and its cause. The rest is for Ray's own log."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    actor = next((f"{line.split()[-1]}: " for line in lines if line.startswith("\tclass_name: ")), "")
    return actor + (lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}")
