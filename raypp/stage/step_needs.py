"""What the rows of a decode step ask of its end: found out once, and kept until a request takes a row over."""

from __future__ import annotations

from typing import NamedTuple

from raypp.ops.adjust import Needs
from raypp.stage.logprobs import LogprobReporter
from raypp.stage.sampler import Sampler
from raypp.stage.step_shape import StepShape

_MAX_KEPT = 64


class Asked(NamedTuple):
    """What any of a step's rows asks for."""

    needs: Needs  # of the sampler
    logprobs: bool


class StepNeeds:
    """Asks the tables of the last stage.

    Args:
        sampler: Of all rows.
        logprobs: Likewise.
    """

    def __init__(self, sampler: Sampler, logprobs: LogprobReporter) -> None:
        self._sampler = sampler
        self._logprobs = logprobs
        self._kept: dict[StepShape, Asked] = {}

    def of(self, shape: StepShape) -> Asked:
        """Return what the rows of a step ask for, all of which decode."""
        asked = self._kept.get(shape)
        if asked is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            rows = shape.rows_np
            asked = self._kept[shape] = Asked(self._sampler.needs(rows), self._logprobs.is_asked(rows))
        return asked

    def forget(self) -> None:
        """Say that rows have started."""
        self._kept.clear()
