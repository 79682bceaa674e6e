"""The stages of a pipeline in one process, run one after the other: the same `Stage`, without actors.

For tests of what the stages compute. It is exact and simple, not fast: nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypp.messages import MaskUpdate, StepPlan, StepResult, pack, unpack
from raypp.stage.loop import SteppedStage


class LocalPipeline:
    """A `Pipeline` of stages joined by local links. Every plan is packed and unpacked, as it would be on the wire."""

    def __init__(self, stages: Sequence[SteppedStage]) -> None:
        self._stages = stages
        self._submitted: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan; `collect` executes it."""
        self._submitted.append(unpack(StepPlan, pack(plan)))

    def send_masks(self, update: MaskUpdate) -> None:
        """Tell the last stage which tokens grammars allow."""
        self._stages[-1].take_masks(unpack(MaskUpdate, pack(update)))

    def collect(self) -> list[StepResult]:
        """Execute the oldest plan and return its result: the others stay in flight, as they would in real life."""
        if not self._submitted:
            return []
        plan = self._submitted.pop(0)
        result = None
        with torch.inference_mode():
            for stage in self._stages:
                stage.announce(plan)
                result = stage.step(plan)
        assert result is not None
        return [unpack(StepResult, pack(result.wait()))]

    def close(self) -> None:
        """Forget the plans that were not executed."""
        self._submitted.clear()
