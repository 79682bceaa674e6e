"""How many drafts the decode rows of a step verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class DraftPolicy(Protocol):
    """Chooses K, the drafts per decode row, for one plan. All rows of a step have the same K."""

    def num_drafts(self, cohort: int, num_rows: int, most: int) -> int:
        """Return K for a step.

        Args:
            cohort: Whose step it is.
            num_rows: Its decode rows, at least 1.
            most: Drafts per row that the step has room for.
        """

    def note_result(
        self, cohort: int, num_drafts: int, num_drafted: NDArray[np.int32], num_matched: NDArray[np.int32]
    ) -> None:
        """Take in what became of the drafts of a step's decode rows; see `StepResult`.

        Args:
            cohort: Whose step it was.
            num_drafts: Its K.
            num_drafted: Drafts compared, of each decode row.
            num_matched: Leading ones that the model agreed with, of each decode row.
        """


@dataclass(frozen=True, slots=True)
class FixedDrafts:
    """The same K for every step, less where it does not fit; 0 means no speculation."""

    count: int = 0

    def num_drafts(self, cohort: int, num_rows: int, most: int) -> int:
        """Return K for a step."""
        return min(self.count, most)

    def note_result(
        self, cohort: int, num_drafts: int, num_drafted: NDArray[np.int32], num_matched: NDArray[np.int32]
    ) -> None:
        """Take in nothing."""
