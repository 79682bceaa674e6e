"""Logs now and then how many drafts were accepted."""

from __future__ import annotations

import logging

from raypp.scheduler.scheduler_stats import SchedulerStats

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 10.0


class DraftLog:
    """Logs, at most every ten seconds, what became of the drafts since the last line; nothing when there were none."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._last: SchedulerStats | None = None

    def note(self, stats: SchedulerStats, now_s: float) -> None:
        """Take in the engine's figures at a monotonic time, seconds."""
        if now_s < self._next_s:
            return
        last, self._last, self._next_s = self._last, stats, now_s + _INTERVAL_S
        drafted = stats.num_draft_tokens - (last.num_draft_tokens if last else 0)
        if not drafted:
            return
        accepted = stats.num_accepted_tokens - (last.num_accepted_tokens if last else 0)
        rows = stats.num_verified_rows - (last.num_verified_rows if last else 0)
        rates = [
            f"{_since(last.accepted_by_position if last else [], stats.accepted_by_position, place) / count:.2f}"
            for place in range(len(stats.drafted_by_position))
            if (count := _since(last.drafted_by_position if last else [], stats.drafted_by_position, place))
        ]
        _LOG.info(
            "speculation: %d drafts, %.0f %% accepted, %.2f tokens per row and step; by position %s",
            drafted,
            100 * accepted / drafted,
            1 + accepted / rows,
            " ".join(rates),
        )


def _since(before: list[int], now: list[int], place: int) -> int:
    return now[place] - (before[place] if before else 0)
