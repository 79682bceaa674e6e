"""The report of a stage that gives up: the error, and whether the stage itself is at fault.

A stage that dies takes its neighbours' waits with it. They fail too, often before anyone hears of the death itself; the
driver must not blame them.
"""

from __future__ import annotations

import logging
from typing import Any

from raypp.client_messages import error_from_dict, error_to_dict
from raypp.errors import DeadlineError, EngineDeadError, RayppError, StageDiedError, name_process

_LOG = logging.getLogger(__name__)


def name_failure(index: int, num_members: int, error: BaseException) -> tuple[EngineDeadError, bool]:
    """Return what the error of a stage's process means for the engine, and whether that process is the cause.

    The traceback of an error that raypp does not expect is logged.

    Args:
        index: See `name_process`.
        num_members: See there.
        error: What it ended with.
    """
    name, stage_index = name_process(index, num_members)
    # A neighbour that is gone or does not answer, or a silent driver, is noticed by a stage that is well itself.
    is_cause = not isinstance(error, EngineDeadError | DeadlineError)
    if isinstance(error, EngineDeadError):
        return error, is_cause
    if isinstance(error, RayppError):
        named = StageDiedError(
            f"{name} failed: {error.message}",
            stage_index=stage_index,
            got=error.got,
            expected=error.expected,
            hint=error.hint,
        )
    else:
        _LOG.error("%s failed", name, exc_info=error)
        named = StageDiedError(f"{name} failed", stage_index=stage_index, got=f"{type(error).__name__}: {error}")
    return named, is_cause


def describe_failure(index: int, num_members: int, error: Exception) -> dict[str, Any]:
    """Return the error of a stage's process, see `name_failure`, as plain values for `read_failure`."""
    named, is_cause = name_failure(index, num_members, error)
    return {"is_cause": is_cause, "error": error_to_dict(named)}


def read_failure(description: dict[str, Any]) -> tuple[RayppError, bool]:
    """Return the error that `describe_failure` described, and whether the stage that sent it is the cause."""
    return error_from_dict(description["error"]), bool(description["is_cause"])
