"""The edges of a pipeline: who is joined to whom, and with how many slots.

    stage 0 --forward--> stage 1 --forward--> ... --forward--> stage n-1
       ^                                                          |
       +-------------------------- feedback ----------------------+

Every edge has one name in all stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raypp.transport.link import LinkReceiver, LinkSender

NUM_FORWARD_SLOTS = 3
"""A step is read while the next arrives, and one more evens out what stages of unequal speed do."""


def num_feedback_slots(num_stages: int) -> int:
    """Return so many slots that the last stage never has to ask whether it may send: two for every cohort.

    Before the first stage begins a step, it takes in what was fed back by the one that had the slot before.
    """
    return 2 * num_stages


@dataclass(frozen=True)
class Edge:
    """One directed edge between two stages."""

    name: str
    sender: int  # stage index
    receiver: int
    num_slots: int
    slot_bytes: int

    def peer_of(self, stage_index: int) -> int:
        """Return the stage at the other end."""
        return self.receiver if stage_index == self.sender else self.sender


def pipeline_edges(num_stages: int, forward_bytes: Sequence[int], feedback_bytes: int) -> list[Edge]:
    """Return all edges of a pipeline, in the order in which every stage opens its own.

    Args:
        num_stages: At least 2.
        forward_bytes: The largest message from each stage to the next.
        feedback_bytes: The largest message from the last stage to the first.
    """
    forward = [
        Edge(f"forward {index}", index, index + 1, NUM_FORWARD_SLOTS, forward_bytes[index])
        for index in range(num_stages - 1)
    ]
    return [*forward, Edge("feedback", num_stages - 1, 0, num_feedback_slots(num_stages), feedback_bytes)]


def edges_at(stage_index: int, edges: Iterable[Edge]) -> list[Edge]:
    """Return the edges that have an end at a stage."""
    return [edge for edge in edges if stage_index in (edge.sender, edge.receiver)]


@dataclass(frozen=True)
class EdgeEnds:
    """The ends that one stage holds, by the names of their edges."""

    senders: dict[str, LinkSender] = field(default_factory=dict)
    receivers: dict[str, LinkReceiver] = field(default_factory=dict)

    def update(self, other: EdgeEnds) -> None:
        """Add ends."""
        self.senders.update(other.senders)
        self.receivers.update(other.receivers)
