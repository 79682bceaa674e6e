"""Opening the links of a stage: who is joined to whom by which link, and that both ends mean the same.

Before any edge opens, every stage publishes what it sends and expects and where it runs, and checks all edges: a
mismatch anywhere stops every stage with the same error, instead of leaving some to wait for neighbours that gave up.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from raypp.config.sections import LinkKind, TransportKind
from raypp.errors import ConfigError
from raypp.transport.edges import NUM_FORWARD_SLOTS, Edge, EdgeEnds, edges_at, num_feedback_slots, pipeline_edges
from raypp.transport.link import LinkReceiver, LinkSender
from raypp.transport.link_opening import LinkOpening
from raypp.transport.local import LocalReceiver, LocalSender, open_local_edge
from raypp.transport.place import StagePlace
from raypp.transport.rendezvous import Meeting, Rendezvous
from raypp.transport.resolve import resolve_link
from raypp.transport.schema import Schema, check_schemas

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MessageSpec:
    """What the messages of an edge hold, and how large they get."""

    schema: Schema
    max_rows: int
    max_tokens: int

    @property
    def slot_bytes(self) -> int:
        """The largest message, bytes."""
        return self.schema.num_bytes(self.max_rows, self.max_tokens, self.max_tokens)

    def describe(self) -> list[str]:
        """Return what both ends of an edge must agree on, one line each."""
        return [*self.schema.describe(), f"at most {self.max_rows} rows and {self.max_tokens} tokens a step"]


@dataclass(frozen=True)
class StageLinks:
    """The ends of the edges that a stage holds; None where the pipeline's shape has none."""

    previous: LinkReceiver | None
    next: LinkSender | None
    feedback_in: LinkReceiver | None  # first stage
    feedback_out: LinkSender | None  # last stage

    @property
    def entering(self) -> LinkReceiver:
        """Where the input of a step of decode rows alone comes from: on the first stage it is fed back."""
        end = self.previous or self.feedback_in
        assert end is not None
        return end

    @property
    def leaving(self) -> LinkSender:
        """Where its output goes."""
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


def open_stage_links(
    kind: TransportKind,
    stage_index: int,
    num_stages: int,
    *,
    forward: Sequence[MessageSpec],
    feedback: MessageSpec,
    rendezvous: Rendezvous | None = None,
    own_host: str = "127.0.0.1",
    open_timeout_s: float = 600.0,
    deadline_s: float = 60.0,
    device: torch.device = _CPU,
) -> StageLinks:
    """Open the links of one stage; returns when its neighbours have opened theirs.

    On the first stage it returns only when all stages are done, so that the rendezvous may be closed then.

    Args:
        kind: What the configuration asks for; see `resolve.py`. `local` takes one stage, the others any number;
            `ray_collective` only inside Ray actors.
        stage_index: Of the calling stage, 0-based.
        num_stages: Of the pipeline. A single stage needs no rendezvous: its feedback is local.
        forward: What each stage sends to the next.
        feedback: What the last stage sends to the first.
        rendezvous: The address that `RendezvousServer` has on the first stage.
        own_host: An address of this node that the neighbours can reach.
        open_timeout_s: How long the stages may take to meet.
        deadline_s: How long a wait on a link may take. The links between GPUs never wait on the host.
        device: Where the stage's tensors are, and so the slots. A CUDA device is the calling thread's current one.

    Raises:
        ConfigError: two stages disagree about the messages between them, or the kind cannot join this many stages.
        DeadlineError: a stage did not come.
        ResourceError: GPU memory lacks or cannot be shared.
    """
    if num_stages == 1:
        sender, receiver = open_local_edge(num_feedback_slots(1), feedback.slot_bytes, device=device)
        return StageLinks(None, None, receiver, sender)
    if kind == "local" or rendezvous is None:
        raise ConfigError(
            "these links cannot join the stages",
            got=f"{kind} links, {num_stages} stages, rendezvous {rendezvous}",
            expected="other links, and a rendezvous, for more than one stage",
        )

    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    meeting = Meeting(rendezvous, open_timeout_s)
    edges = pipeline_edges(num_stages, [spec.slot_bytes for spec in forward], feedback.slot_bytes)
    _agree(meeting, stage_index, edges, forward, feedback)
    kinds = _resolve(meeting, kind, stage_index, edges, StagePlace.here(device))
    opening = LinkOpening(meeting, stage_index, num_stages, device, own_host, deadline_s)
    with ExitStack() as opened:
        ends = EdgeEnds()
        # One kind after the other, in the same order on all stages: those that wait for their peers never cross.
        for each in sorted(set(kinds.values())):
            ends.update(opening.open(each, [edge for edge in edges if kinds[edge.name] == each], opened))
        meeting.tell(f"opened/{stage_index}", "")
        if stage_index == 0:
            meeting.await_all((f"opened/{index}", index) for index in range(num_stages))
        opened.pop_all()
    return StageLinks(
        previous=ends.receivers.get(f"forward {stage_index - 1}"),
        next=ends.senders.get(f"forward {stage_index}"),
        feedback_in=ends.receivers.get("feedback"),
        feedback_out=ends.senders.get("feedback"),
    )


def open_local_links(
    num_stages: int,
    *,
    forward: Sequence[MessageSpec],
    feedback: MessageSpec,
    device: torch.device = _CPU,
    deadline_s: float = 0.0,
) -> list[StageLinks]:
    """Return the links of all stages of a pipeline that lives in one process, on one device.

    Args:
        num_stages: Of the pipeline.
        forward: What each stage sends to the next.
        feedback: What the last stage sends to the first.
        device: Of the slots.
        deadline_s: How long a wait may take; 0 when one thread runs all stages, step by step.
    """

    def edge(num_slots: int, slot_bytes: int) -> tuple[LocalSender, LocalReceiver]:
        return open_local_edge(num_slots, slot_bytes, deadline_s, device=device)

    forwards = [edge(NUM_FORWARD_SLOTS, spec.slot_bytes) for spec in forward]
    return links_of_stages(forwards, edge(num_feedback_slots(num_stages), feedback.slot_bytes))


def links_of_stages(
    forward: Sequence[tuple[LinkSender, LinkReceiver]], feedback: tuple[LinkSender, LinkReceiver]
) -> list[StageLinks]:
    """Return what each stage holds of the ends of all edges of a pipeline; the forward edges in their order."""
    last, (feedback_out, feedback_in) = len(forward), feedback
    return [
        StageLinks(
            previous=forward[index - 1][1] if index > 0 else None,
            next=forward[index][0] if index < last else None,
            feedback_in=feedback_in if index == 0 else None,
            feedback_out=feedback_out if index == last else None,
        )
        for index in range(last + 1)
    ]


def _agree(
    meeting: Meeting, stage_index: int, edges: list[Edge], forward: Sequence[MessageSpec], feedback: MessageSpec
) -> None:
    """Publish what this stage sends and expects, and check every edge of the pipeline."""
    for edge in edges_at(stage_index, edges):
        spec = feedback if edge.name == "feedback" else forward[edge.sender]
        for end, index in (("sends", edge.sender), ("expects", edge.receiver)):
            if index == stage_index:
                meeting.tell(f"{edge.name} {end}", json.dumps(spec.describe()))
    for edge in edges:
        check_schemas(
            f"stage {edge.sender}",
            json.loads(meeting.ask(f"{edge.name} sends", edge.sender)),
            f"stage {edge.receiver}",
            json.loads(meeting.ask(f"{edge.name} expects", edge.receiver)),
        )


def _resolve(
    meeting: Meeting, asked: TransportKind, stage_index: int, edges: list[Edge], place: StagePlace
) -> dict[str, LinkKind]:
    """Publish where this stage is, and return the link of every edge of the pipeline."""
    meeting.tell(f"place {stage_index}", place.to_json())
    stages = sorted({edge.sender for edge in edges})
    places = {index: StagePlace.from_json(meeting.ask(f"place {index}", index)) for index in stages}
    kinds = {edge.name: resolve_link(asked, edge, places[edge.sender], places[edge.receiver]) for edge in edges}
    if stage_index == 0:
        logger.info("links: %s", kinds)
    return kinds
