"""The edges of a pipeline: which stages they join, their slots, and the ends that each stage holds.

    stage 0 --forward--> stage 1 --forward--> ... --forward--> stage n-1
       ^                                                          |
       +-------------------------- feedback ----------------------+

Every edge has one name in all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from raypp.errors import EngineDeadError
from raypp.messages import NO_STEP
from raypp.transport.link import LinkReceiver, LinkSender

NUM_FORWARD_SLOTS = 3
"""One message is read while the next arrives; a third slot evens out stages of unequal speed."""


def num_feedback_slots(num_stages: int) -> int:
    """Return so many slots that the last stage never waits for a free one: two for every cohort.

    Before the first stage begins a step, it takes in the message that had the step's slot before.
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
        num_stages: Of the pipeline. A single stage has a feedback edge to itself.
        forward_bytes: The largest message from each stage to the next, bytes.
        feedback_bytes: The largest message from the last stage to the first, bytes.
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


class StreamEnd:
    """What the ends of links between GPUs have in common.

    Args:
        slots: uint8 [num_slots, slot_bytes].
        on_close: Called once, when the end is closed.
    """

    def __init__(self, slots: torch.Tensor, on_close: Callable[[], None]) -> None:
        self.slots = slots
        self._slots = slots.unbind()
        self._on_close = on_close
        self._acquired = NO_STEP
        self._is_aborted = False
        self._is_closed = False

    def close(self) -> None:
        """Give the end up. What a stage's ends share is released with the last of them."""
        if not self._is_closed:
            self._is_closed = True
            self._on_close()

    def _check(self, step_id: int) -> None:
        if self._is_aborted:
            raise EngineDeadError(f"the link was aborted before step {step_id}")

    def _check_acquired(self, step_id: int) -> None:
        assert step_id == self._acquired, f"step {step_id} is sent, but {self._acquired} was acquired"
        self._check(step_id)
        self._acquired = NO_STEP


def after_last(count: int, function: Callable[[], None]) -> Callable[[], None]:
    """Return a function whose `count`-th call calls `function`: what the ends of a stage share goes with the last."""
    left = [None] * count

    def call() -> None:
        left.pop()
        if not left:
            function()

    return call


@dataclass(frozen=True)
class StageLinks:
    """The ends that one stage holds, by what they are for; None for those that this stage does not have."""

    previous: LinkReceiver | None
    next: LinkSender | None
    feedback_in: LinkReceiver | None  # first stage
    feedback_out: LinkSender | None  # last stage

    @classmethod
    def of(cls, stage_index: int, ends: EdgeEnds) -> StageLinks:
        """Return the links of a stage that holds these ends of `pipeline_edges`."""
        return cls(
            previous=ends.receivers.get(f"forward {stage_index - 1}"),
            next=ends.senders.get(f"forward {stage_index}"),
            feedback_in=ends.receivers.get("feedback"),
            feedback_out=ends.senders.get("feedback"),
        )

    @property
    def entering(self) -> LinkReceiver:
        """Where the input of a step of decode rows comes from: the previous stage, or feedback on the first one."""
        end = self.previous or self.feedback_in
        assert end is not None
        return end

    @property
    def leaving(self) -> LinkSender:
        """Where the output of such a step goes."""
        end = self.next or self.feedback_out
        assert end is not None
        return end

    def _ends(self) -> Iterator[LinkSender | LinkReceiver]:
        # Senders first: closing one waits for its messages to be out.
        for end in (self.next, self.feedback_out, self.previous, self.feedback_in):
            if end is not None:
                yield end

    def abort(self) -> None:
        """End all waits in progress with an error, from any thread. The links cannot be used again."""
        for end in self._ends():
            end.abort()

    def close(self) -> None:
        """Release everything, once the messages that were sent are out."""
        for end in self._ends():
            end.close()


OpenEdge = Callable[[Edge], tuple[LinkSender, LinkReceiver]]
"""Returns both ends of an edge inside one process."""


def ends_in_one_process(edges: Sequence[Edge], open_edge: OpenEdge) -> list[EdgeEnds]:
    """Return the ends of all stages of a pipeline that lives in one process.

    Args:
        edges: All of the pipeline's; see `pipeline_edges`.
        open_edge: Opens each of them.
    """
    stages = [EdgeEnds() for _ in {edge.sender for edge in edges}]
    for edge in edges:
        stages[edge.sender].senders[edge.name], stages[edge.receiver].receivers[edge.name] = open_edge(edge)
    return stages
