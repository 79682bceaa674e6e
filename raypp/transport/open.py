"""Opening the links of a stage: who is joined to whom, and that both ends mean the same.

    stage 0 --forward--> stage 1 --forward--> ... --forward--> stage n-1
       ^                                                          |
       +-------------------------- feedback ----------------------+

Before any edge opens, every stage publishes what it sends and expects, and checks all edges: a mismatch anywhere stops
every stage with the same error, instead of leaving some to wait for neighbours that gave up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it without types

from raypp.config.sections import LinkKind
from raypp.errors import ConfigError
from raypp.transport.gloo import GlooConnection, GlooDevice
from raypp.transport.link import LinkReceiver, LinkSender
from raypp.transport.local import open_local_edge
from raypp.transport.rendezvous import Meeting, Rendezvous
from raypp.transport.ring import Connection, RingReceiver, RingSender
from raypp.transport.schema import Schema, check_schemas

_CPU = torch.device("cpu")

NUM_FORWARD_SLOTS = 3
"""A step is read while the next arrives, and one more evens out what stages of unequal speed do."""


@dataclass(frozen=True)
class MessageSpec:
    """What the messages of an edge hold, and how large they get."""

    schema: Schema
    max_rows: int
    max_tokens: int

    @property
    def slot_bytes(self) -> int:
        """The largest message, bytes."""
        return self.schema.num_bytes(self.max_rows, self.max_tokens)

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
    kind: LinkKind,
    stage_index: int,
    num_stages: int,
    *,
    forward: MessageSpec,
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
        kind: `local` takes one stage, the others any number; `ray_collective` only inside Ray actors.
        stage_index: Of the calling stage, 0-based.
        num_stages: Of the pipeline. A single stage needs no rendezvous: its feedback is local.
        forward: What stages send to the next.
        feedback: What the last stage sends to the first.
        rendezvous: The address that `RendezvousServer` has on the first stage.
        own_host: An address of this node that the neighbours can reach.
        open_timeout_s: How long the stages may take to meet.
        deadline_s: How long a wait on a link may take.
        device: Where the messages are written and read.

    Raises:
        ConfigError: two stages disagree about the messages between them, or the kind cannot join this many stages.
        DeadlineError: a stage did not come.
    """
    if num_stages == 1:
        sender, receiver = open_local_edge(_num_feedback_slots(1), feedback.slot_bytes, device=device)
        return StageLinks(None, None, receiver, sender)
    if kind == "local" or rendezvous is None:
        raise ConfigError(
            "these links cannot join the stages",
            got=f"{kind} links, {num_stages} stages, rendezvous {rendezvous}",
            expected="gloo or ray_collective links, and a rendezvous, for more than one stage",
        )

    meeting = Meeting(rendezvous, open_timeout_s)
    specs = {name: feedback if name == "feedback" else forward for name, _, _ in _edges(num_stages)}
    _agree(meeting, stage_index, num_stages, specs)
    with ExitStack() as opened:
        if kind == "gloo":
            connect = _connect_over_gloo(meeting, own_host, deadline_s)
        else:
            connect = _connect_over_ray(meeting, stage_index, num_stages, rendezvous, deadline_s)
        links = _open_edges(connect, stage_index, num_stages, specs, opened)
        meeting.tell(f"opened/{stage_index}", "")
        if stage_index == 0:
            meeting.await_all((f"opened/{index}", index) for index in range(num_stages))
        opened.pop_all()
    return links


def open_local_links(
    num_stages: int, *, forward: MessageSpec, feedback: MessageSpec, device: torch.device = _CPU
) -> list[StageLinks]:
    """Return the links of all stages of a pipeline that one thread runs, step by step."""
    forwards = [open_local_edge(NUM_FORWARD_SLOTS, forward.slot_bytes, device=device) for _ in range(num_stages - 1)]
    feedback_out, feedback_in = open_local_edge(_num_feedback_slots(num_stages), feedback.slot_bytes, device=device)
    return [
        StageLinks(
            previous=forwards[index - 1][1] if index > 0 else None,
            next=forwards[index][0] if index < num_stages - 1 else None,
            feedback_in=feedback_in if index == 0 else None,
            feedback_out=feedback_out if index == num_stages - 1 else None,
        )
        for index in range(num_stages)
    ]


def _num_feedback_slots(num_stages: int) -> int:
    # As many as there are steps in flight: so the last stage never has to ask whether it may send.
    return 2 * num_stages


def _edges(num_stages: int) -> list[tuple[str, int, int]]:
    """Return all edges as (name, sending stage, receiving stage), in the order in which every stage opens its own."""
    forward = [(f"forward {index}", index, index + 1) for index in range(num_stages - 1)]
    return [*forward, ("feedback", num_stages - 1, 0)]


def _agree(meeting: Meeting, stage_index: int, num_stages: int, specs: dict[str, MessageSpec]) -> None:
    """Publish what this stage sends and expects, and check every edge of the pipeline."""
    edges = _edges(num_stages)
    for name, sender, receiver in edges:
        for end, index in (("sends", sender), ("expects", receiver)):
            if index == stage_index:
                meeting.tell(f"{name} {end}", json.dumps(specs[name].describe()))
    for name, sender, receiver in edges:
        check_schemas(
            f"stage {sender}",
            json.loads(meeting.ask(f"{name} sends", sender)),
            f"stage {receiver}",
            json.loads(meeting.ask(f"{name} expects", receiver)),
        )


Connect = Callable[[str, int, int], Connection[Any]]
"""Connects one end of an edge: its name, this end's rank (0 sends, 1 receives), the stage at the other end."""


def _connect_over_gloo(meeting: Meeting, own_host: str, deadline_s: float) -> Connect:
    device = GlooDevice(own_host)

    def connect(name: str, rank: int, peer_index: int) -> GlooConnection:
        return GlooConnection(
            device,
            PrefixStore(name, meeting.store),
            rank,
            peer_index=peer_index,
            open_timeout_s=meeting.remaining_s,
            deadline_s=deadline_s,
        )

    return connect


def _connect_over_ray(
    meeting: Meeting, stage_index: int, num_stages: int, rendezvous: Rendezvous, deadline_s: float
) -> Connect:
    from raypp.transport.ray_collective import CollectiveConnection, CollectiveGroup  # importing Ray takes a second

    name = f"raypp-{rendezvous.host}-{rendezvous.port}"
    group = CollectiveGroup(name, stage_index, num_stages, meeting.remaining_s)

    def connect(name: str, rank: int, peer_index: int) -> CollectiveConnection:
        return group.connect(peer_index, deadline_s)

    return connect


def _open_edges(
    connect: Connect, stage_index: int, num_stages: int, specs: dict[str, MessageSpec], opened: ExitStack
) -> StageLinks:
    senders: dict[str, RingSender[Any]] = {}
    receivers: dict[str, RingReceiver[Any]] = {}
    for name, sender, receiver in _edges(num_stages):
        num_slots = _num_feedback_slots(num_stages) if name == "feedback" else NUM_FORWARD_SLOTS
        if stage_index == sender:
            connection = connect(name, 0, receiver)
            senders[name] = RingSender(connection, num_slots, specs[name].slot_bytes)
        elif stage_index == receiver:
            connection = connect(name, 1, sender)
            receivers[name] = RingReceiver(connection, num_slots, specs[name].slot_bytes)
        else:
            continue
        opened.callback(connection.close)
    return StageLinks(
        previous=receivers.get(f"forward {stage_index - 1}"),
        next=senders.get(f"forward {stage_index}"),
        feedback_in=receivers.get("feedback"),
        feedback_out=senders.get("feedback"),
    )
