"""The report of a stage that gives up: the error, and whether the stage itself is at fault.

A stage that dies takes its neighbours' waits with it. They fail too, often before anyone hears of the death itself; the
driver must not blame them.
"""

from __future__ import annotations

from typing import Any

from raypp.client_messages import error_from_dict, error_to_dict
from raypp.errors import DeadlineError, EngineDeadError, RayppError, StageDiedError


def name_process(index: int, num_members: int) -> tuple[str, int]:
    """Return what a process of the stages is called, and its stage's index.

    Args:
        index: Of the process: the members of a stage follow each other.
        num_members: Of each stage.
    """
    stage_index, rank = divmod(index, num_members)
    return (f"stage {stage_index}" if num_members == 1 else f"member {rank} of stage {stage_index}"), stage_index


def name_failure(stage_index: int, error: BaseException) -> tuple[EngineDeadError, bool]:
    """Return what the error of a stage means for the engine, and whether that stage is the cause."""
    # A neighbour that is gone or does not answer, or a silent driver, is noticed by a stage that is well itself.
    is_cause = not isinstance(error, EngineDeadError | DeadlineError)
    if isinstance(error, EngineDeadError):
        return error, is_cause
    if isinstance(error, RayppError):
        named = StageDiedError(
            f"stage {stage_index} failed: {error.message}",
            stage_index=stage_index,
            got=error.got,
            expected=error.expected,
            hint=error.hint,
        )
    else:
        named = StageDiedError(
            f"stage {stage_index} failed", stage_index=stage_index, got=f"{type(error).__name__}: {error}"
        )
    return named, is_cause


def describe_failure(stage_index: int, error: Exception) -> dict[str, Any]:
    """Return the error of a stage as plain values, for `read_failure`."""
    named, is_cause = name_failure(stage_index, error)
    return {"is_cause": is_cause, "error": error_to_dict(named)}


def read_failure(description: dict[str, Any]) -> tuple[RayppError, bool]:
    """Return the error that `describe_failure` described, and whether the stage that sent it is the cause."""
    return error_from_dict(description["error"]), bool(description["is_cause"])
