"""What became of the drafts of one request, or of all."""

from __future__ import annotations

from itertools import accumulate


class DraftCounts:
    """Counts row-steps that verified drafts. Two additions each, since every row of every step is counted."""

    __slots__ = ("_by_accepted", "_by_drafted")

    def __init__(self, max_drafts: int) -> None:
        self._by_drafted = [0] * (max_drafts + 1)  # [d]: row-steps that verified d drafts
        self._by_accepted = [0] * (max_drafts + 1)  # [a]: row-steps that accepted a of them

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count a row-step that verified at least one draft."""
        self._by_drafted[num_drafted] += 1
        self._by_accepted[num_accepted] += 1

    @property
    def num_rows(self) -> int:
        """Row-steps."""
        return sum(self._by_drafted)

    @property
    def num_drafted(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafted_by_position)

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(self.accepted_by_position)

    @property
    def drafted_by_position(self) -> list[int]:
        """How often a draft at that place behind the row's last token was verified, [K_max]."""
        return _at_least(self._by_drafted)

    @property
    def accepted_by_position(self) -> list[int]:
        """How often a draft at that place was accepted, [K_max]."""
        return _at_least(self._by_accepted)


def _at_least(counts: list[int]) -> list[int]:
    """Return, for 1 and above, how often it was that or more."""
    return list(accumulate(reversed(counts[1:])))[::-1]
