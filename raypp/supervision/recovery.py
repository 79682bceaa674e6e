"""What users of an engine hear when it dies and comes back, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from raypp.errors import RayppError


@dataclass(frozen=True)
class StartTimes:
    """What the last start of an engine took, by part.

    Attributes:
        num_kept_stages: Stages that kept their process and their weights.
        weights_s: Until all stages had their weights. Seconds.
        links_and_graphs_s: Until they were linked, had warmed up and recorded their graphs. Seconds.
    """

    num_kept_stages: int = 0
    weights_s: float = 0.0
    links_and_graphs_s: float = 0.0


@dataclass(frozen=True)
class Recovery:
    """One pause of an engine: parts of it died, and it was started again.

    Attributes:
        died: Who died, and of what, in words: the error of the first death; or that it was restarted on purpose.
        notice_s: From the last sign of life, as far as whoever reported the death knows it, to the decision. Seconds.
        end_s: Until nothing was left of the old engine. Seconds.
        start_s: Until a new one could be used, waiting for room and starts that failed included. Seconds.
        num_starts: How many starts it took.
        num_lost_nodes: How many of the machines that it ran on were gone then.
        last_start: Parts of the last one.
    """

    died: str
    notice_s: float
    end_s: float
    start_s: float
    num_starts: int = 1
    num_lost_nodes: int = 0
    last_start: StartTimes = StartTimes()

    @property
    def total_s(self) -> float:
        """All of the pause, without what clients need to hand their requests over. Seconds."""
        return self.notice_s + self.end_s + self.start_s


class EngineWatcher(Protocol):
    """Whoever uses an engine. Called from threads of the engine's owner, one call at a time; must return soon."""

    def engine_lost(self, error: RayppError | None) -> None:
        """Hear that a part died. The engine is being started again: `engine_back` or `engine_dead` follows.

        Args:
            error: What it died of; None: it is replaced on purpose.
        """

    def engine_back(self, client_address: str, *, is_explained: bool) -> None:
        """Hear that it runs again, at this address.

        Args:
            client_address: Of its driver.
            is_explained: Whether it is known that it died of no request: it was replaced on purpose, or lost a node.
        """

    def engine_dead(self, error: RayppError) -> None:
        """Hear that it is gone for good: its restarts are used up, or it cannot start. Nothing follows."""
