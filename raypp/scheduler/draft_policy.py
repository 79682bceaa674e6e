"""How many drafts the decode rows of a step verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class DraftPolicy(Protocol):
    """Chooses K, the drafts per decode row, for one plan."""

    def num_drafts(self, num_decode_rows: int) -> int:
        """Return K for a step of that many decode rows."""


@dataclass(frozen=True, slots=True)
class FixedDrafts:
    """The same K for every step; 0 means no speculation."""

    count: int = 0

    def num_drafts(self, num_decode_rows: int) -> int:
        """Return K for a step of that many decode rows."""
        return self.count
