"""What the rows of a decode step ask of its end: found out once, and kept until a request takes a row over."""

from __future__ import annotations

from raypp.ops.sample.tables import Needs
from raypp.stage.sampler import Sampler
from raypp.stage.step_shape import StepShape

_MAX_KEPT = 64


class StepNeeds:
    """Asks the tables of the last stage.

    Args:
        sampler: Of all rows.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._kept: dict[StepShape, Needs] = {}

    def of(self, shape: StepShape) -> Needs:
        """Return what the rows of a step ask for, all of which decode."""
        needs = self._kept.get(shape)
        if needs is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            needs = self._kept[shape] = self._sampler.needs(shape.rows_np)
        return needs

    def forget(self) -> None:
        """Say that rows have started."""
        self._kept.clear()
