"""The rows of the stages' tables, and when each was last used."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from raypp.messages import NO_STEP


class RowPool:
    """Hands out rows, the one that has been free for longest first."""

    def __init__(self, num_rows: int) -> None:
        self._free = deque(range(num_rows))
        self._last_steps = [NO_STEP] * num_rows

    @property
    def num_free(self) -> int:
        """Rows that `take` can hand out."""
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """Return a free row, and the last step that contained its previous owner.

        The first stage takes feedback in lazily; it must have that step's before the new owner moves in, else the old
        owner's tokens would land on it.
        """
        row = self._free.popleft()
        return row, self._last_steps[row]

    def give_back(self, row: int, last_step: int) -> None:
        """Free a row. `last_step` was the last that contained its owner, and its result has been collected."""
        self._last_steps[row] = last_step
        self._free.append(row)

    def check_integrity(self, owned: Collection[int], uncollected: Collection[int]) -> None:
        """Assert that each row is free, owned, or waits for its owner's last step to be collected."""
        assert sorted([*self._free, *owned, *uncollected]) == list(range(len(self._last_steps))), "a row leaked"
