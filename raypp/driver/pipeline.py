"""The driver's interface to stages: plans go in, results come out, both in step order."""

from __future__ import annotations

from typing import Protocol

from raypp.messages import MaskUpdate, StepPlan, StepResult


class Pipeline(Protocol):
    """A pipeline of stages, wherever they run."""

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to every stage. Does not wait for it to be executed.

        Raises:
            DeadlineError: a stage does not take its plans.
        """

    def send_masks(self, update: MaskUpdate) -> None:
        """Tell the last stage which tokens grammars allow. Does not wait."""

    def collect(self) -> list[StepResult]:
        """Return the results that have arrived since the last call, in step order; does not wait.

        Raises:
            StageDiedError: a stage reported an error.
        """

    def close(self) -> None:
        """Tell the stages to stop."""
