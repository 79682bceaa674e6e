"""Opens the links of a stage, after all stages have agreed on their messages and on the kind of each link.

Before any edge opens, every stage publishes what it sends and expects and where it runs, and checks all edges. So a
mismatch anywhere stops every stage with the same error, and none waits for a neighbour that gave up.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it without types

from raypp.config.sections import LinkKind, TransportKind
from raypp.errors import ConfigError, name_process
from raypp.members import Members
from raypp.transport.edges import Edge, EdgeEnds, OpenEdge, StageLinks, edges_at, ends_in_one_process, pipeline_edges
from raypp.transport.host.gloo import GlooConnection, GlooDevice
from raypp.transport.host.host_members import GlooMembers, thread_members
from raypp.transport.host.local import LocalReceiver, LocalSender, open_local_edge
from raypp.transport.host.ring import Connection, RingReceiver, RingSender
from raypp.transport.ipc.cuda_device import CudaDevice
from raypp.transport.ipc.member_region import MemberRegion
from raypp.transport.ipc.region import IpcRegion
from raypp.transport.link_choice import StagePlace, ipc_obstacle, resolve_link
from raypp.transport.nccl.nccl_ends import NcclEdges
from raypp.transport.nccl.nccl_members import NcclMembers
from raypp.transport.reach import check_reach
from raypp.transport.rendezvous import Meeting, Rendezvous
from raypp.transport.schema import MessageSpec, check_schemas
from raypp.transport.slices import add_slices, sliced_edges

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
open_local_members = thread_members
StageMembers = GlooMembers | NcclMembers


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
    members: StageMembers | None = None,
) -> StageLinks:
    """Open the links of one member of a stage to those with its rank; returns when these have opened theirs.

    On the first stage's first member it returns only when all are done, so that the rendezvous may be closed then.
    Between nodes members send slices of hidden states, see `slices.py`.

    Args:
        kind: What the configuration asks for; see `link_choice.py`. `local` takes one stage, the others any number;
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
        members: Of the stage, which have met; None: it has one, as all stages have.

    Raises:
        ConfigError: two stages disagree about the messages between them, or the kind cannot join this many stages.
        DeadlineError: a stage did not come.
        ResourceError: there is not enough GPU memory, or it cannot be shared; or a neighbour cannot be reached.
    """
    if num_stages == 1:
        return open_local_links(1, forward=(), feedback=feedback, device=device)[0]
    if kind == "local" or rendezvous is None:
        raise ConfigError(
            "these links cannot join the stages",
            got=f"{kind} links, {num_stages} stages, rendezvous {rendezvous}",
            expected="other links, and a rendezvous, for more than one stage",
        )

    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    rank, num_members = (0, 1) if members is None else (members.rank, members.count)
    meeting = Meeting(rendezvous, open_timeout_s, _prefix(rank, num_members))
    edges = pipeline_edges(num_stages, [spec.slot_bytes for spec in forward], feedback.slot_bytes)
    _agree(meeting, stage_index, edges, forward, feedback)
    places = _places(meeting, stage_index, num_stages, StagePlace.here(device))
    kinds = {edge.name: resolve_link(kind, edge, places[edge.sender], places[edge.receiver]) for edge in edges}
    cut = sliced_edges(edges, num_members, lambda edge: places[edge.sender].node != places[edge.receiver].node)
    edges = [cut.get(edge.name, edge) for edge in edges]
    if stage_index == 0:
        logger.info("links: %s; in slices: %s", kinds, list(cut))
    _check_neighbours(meeting, stage_index, edges, places, own_host)
    opener = _LinkOpener(meeting, stage_index, num_stages, device, own_host, deadline_s, rank, num_members)
    with ExitStack() as opened:
        ends = EdgeEnds()
        # One kind after the other, in the same order on all stages: else two stages could wait for each other.
        for each in sorted(set(kinds.values())):
            ends.update(opener.open(each, [edge for edge in edges if kinds[edge.name] == each], opened))
        if members is not None:
            add_slices(ends, cut, members)
        meeting.tell(f"opened/{stage_index}", "")
        if stage_index == 0 and rank == 0:
            for other in range(num_members):
                of_rank = Meeting(rendezvous, meeting.remaining_s, _prefix(other, num_members))
                of_rank.await_all((f"opened/{index}", index) for index in range(num_stages))
        opened.pop_all()
    return StageLinks.of(stage_index, ends)


def _prefix(rank: int, num_members: int) -> str:
    """Return what the keys of those with a rank begin with, where they meet."""
    return f"rank {rank}/" if num_members > 1 else ""


def open_members(
    members: StageMembers,
    stage_index: int,
    rendezvous: Rendezvous,
    *,
    own_host: str,
    open_timeout_s: float,
    deadline_s: float,
) -> None:
    """Have the members of a stage meet; the first one returns when all have.

    Args:
        members: This process's.
        stage_index: Theirs.
        rendezvous: The address that `RendezvousServer` has on the first stage.
        own_host: An address of this node.
        open_timeout_s: How long they may take to meet.
        deadline_s: How long an operation of theirs may take.

    Raises:
        DeadlineError: one did not come.
    """
    meeting = Meeting(rendezvous, open_timeout_s, f"members of {stage_index}/")
    members.open(meeting, own_host=own_host, deadline_s=deadline_s)
    meeting.tell(f"opened/{members.rank}", "")
    if members.rank == 0:
        meeting.await_all((f"opened/{rank}", stage_index) for rank in range(members.count))


def make_members(stage_index: int, rank: int, count: int, device: torch.device) -> StageMembers | None:
    """Return the members of a stage as one of them sees them, for `open_members`; None where there is one."""
    if count == 1:
        return None
    on_host = GlooMembers(stage_index, rank, count)
    return on_host if device.type == "cpu" else NcclMembers(on_host, stage_index, device, _member_memory)


def _member_memory(device: torch.device, rank: int, count: int, meeting: Meeting) -> MemberRegion | None:
    """Open what members share; None: a GPU does not reach another's memory."""
    meeting.tell(f"place {rank}", StagePlace.here(device).to_json())
    places = [StagePlace.from_json(meeting.ask(f"place {each}", each)) for each in range(count)]
    for one, other in itertools.combinations(places, 2):
        if (obstacle := ipc_obstacle(one, other)) is not None:
            logger.info("NCCL makes all sums of the members: %s", obstacle)
            return None
    return MemberRegion(CudaDevice(device), rank, count, meeting)


def open_local_links(
    num_stages: int,
    *,
    forward: Sequence[MessageSpec],
    feedback: MessageSpec,
    device: torch.device = _CPU,
    deadline_s: float = 0.0,
    open_edge: OpenEdge | None = None,
    members: Sequence[Members] | None = None,
) -> list[StageLinks]:
    """Return the links of all stages of a pipeline that lives in one process, on one device.

    Args:
        num_stages: Of the pipeline.
        forward: What each stage sends to the next.
        feedback: What the last stage sends to the first.
        device: Of the slots.
        deadline_s: How long a wait may take; 0 when one thread runs all stages, step by step.
        open_edge: Opens each edge, in place of local links: a link of your own. `device` and `deadline_s` are then its.
        members: Of each stage, where each is to be linked as if it had a node of its own; None: all have one node.
    """

    def open_local(edge: Edge) -> tuple[LocalSender, LocalReceiver]:
        return open_local_edge(edge.num_slots, edge.slot_bytes, deadline_s, device=device)

    edges = pipeline_edges(num_stages, [spec.slot_bytes for spec in forward], feedback.slot_bytes)
    cut = sliced_edges(edges, 1 if members is None else members[0].count, lambda edge: True)
    stages = ends_in_one_process([cut.get(edge.name, edge) for edge in edges], open_edge or open_local)
    for ends, of_stage in zip(stages, members or (), strict=False):
        add_slices(ends, cut, of_stage)
    return [StageLinks.of(index, ends) for index, ends in enumerate(stages)]


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


def _places(meeting: Meeting, stage_index: int, num_stages: int, place: StagePlace) -> list[StagePlace]:
    """Publish where this stage is, and return where all are."""
    meeting.tell(f"place {stage_index}", place.to_json())
    return [StagePlace.from_json(meeting.ask(f"place {index}", index)) for index in range(num_stages)]


def _check_neighbours(
    meeting: Meeting, stage_index: int, edges: list[Edge], places: list[StagePlace], own_host: str
) -> None:
    """Have a stage and each neighbour on another node connect to each other, on ports like those of links.

    Raises:
        ResourceError: a neighbour cannot be reached.
    """
    neighbours = {edge.peer_of(stage_index) for edge in edges_at(stage_index, edges)}
    away = sorted(index for index in neighbours if places[index].node != places[stage_index].node)
    if not away:
        return
    with socket.create_server((own_host, 0), backlog=len(away)) as listener:
        meeting.tell(f"port {stage_index}", f"{own_host}:{listener.getsockname()[1]}")
        for peer in away:
            address = meeting.ask(f"port {peer}", peer)
            check_reach(f"stage {stage_index}", f"stage {peer}", address, meeting.remaining_s)
        meeting.tell(f"reached {stage_index}", "")
        meeting.await_all((f"reached {peer}", peer) for peer in away)


@dataclass(frozen=True)
class _LinkOpener:
    """Opens one stage's ends. Every method waits for the stages at the other ends."""

    meeting: Meeting
    stage_index: int
    num_stages: int
    device: torch.device
    own_host: str
    deadline_s: float
    rank: int
    num_members: int

    def open(self, kind: LinkKind, edges: list[Edge], opened: ExitStack) -> EdgeEnds:
        """Return this stage's ends of all edges of one kind.

        Args:
            kind: Not `local`.
            edges: All edges of the kind, of the whole pipeline and in its order.
            opened: Gets what closes these ends again.
        """
        own = edges_at(self.stage_index, edges)
        if kind == "ipc":
            return self._open_ipc(edges, opened) if own else EdgeEnds()
        if kind == "nccl":
            edges_of_stage = NcclEdges(self.stage_index, own, self.device, self.meeting)
            opened.callback(edges_of_stage.abort)
            return edges_of_stage.ends
        assert kind in ("gloo", "ray_collective"), kind
        return self._open_rings(own, self._gloo() if kind == "gloo" else self._ray_collective(), opened)

    def _open_ipc(self, edges: list[Edge], opened: ExitStack) -> EdgeEnds:
        region = IpcRegion(CudaDevice(self.device), self.stage_index, edges, self.meeting)
        opened.callback(region.close, 1.0)
        return region.ends()

    def _open_rings(self, edges: list[Edge], connect: Callable[[Edge], Connection[Any]], opened: ExitStack) -> EdgeEnds:
        ends, device = EdgeEnds(), None if self.device.type == "cpu" else self.device
        for edge in edges:
            connection = connect(edge)
            opened.callback(connection.close)
            if self.stage_index == edge.sender:
                ends.senders[edge.name] = RingSender(connection, edge.num_slots, edge.slot_bytes, device)
            else:
                ends.receivers[edge.name] = RingReceiver(connection, edge.num_slots, edge.slot_bytes, device)
        return ends

    def _gloo(self) -> Callable[[Edge], Connection[Any]]:
        device = GlooDevice(self.own_host)

        def connect(edge: Edge) -> Connection[Any]:
            return GlooConnection(
                device,
                PrefixStore(edge.name, self.meeting.store),
                0 if self.stage_index == edge.sender else 1,
                peer_index=(peer := edge.peer_of(self.stage_index)),
                peer_name=name_process(peer * self.num_members + self.rank, self.num_members)[0],
                open_timeout_s=self.meeting.remaining_s,
                deadline_s=self.deadline_s,
            )

        return connect

    def _ray_collective(self) -> Callable[[Edge], Connection[Any]]:
        from raypp.transport.host.ray_collective import CollectiveGroup  # importing Ray takes a second

        rendezvous = self.meeting.rendezvous
        name = f"raypp-{rendezvous.host}-{rendezvous.port}-{self.rank}"  # members of a rank are a group
        group = CollectiveGroup(name, self.stage_index, self.num_stages, self.meeting.remaining_s)
        return lambda edge: group.connect(edge.peer_of(self.stage_index), self.deadline_s)
