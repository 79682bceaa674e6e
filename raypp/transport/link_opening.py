"""How each kind of link is opened, for the ends that one stage holds."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it without types

from raypp.config.sections import LinkKind
from raypp.transport.cuda_device import CudaDevice
from raypp.transport.edges import Edge, EdgeEnds, edges_at
from raypp.transport.gloo import GlooConnection, GlooDevice
from raypp.transport.ipc_region import IpcRegion
from raypp.transport.link import LinkReceiver, LinkSender
from raypp.transport.nccl_edges import NcclEdges
from raypp.transport.rendezvous import Meeting
from raypp.transport.ring import Connection, RingReceiver, RingSender
from raypp.transport.staged import StagedReceiver, StagedSender


@dataclass(frozen=True)
class LinkOpening:
    """What it takes to open links. Every method waits for the stages at the other ends."""

    meeting: Meeting
    stage_index: int
    num_stages: int
    device: torch.device
    own_host: str
    deadline_s: float

    def open(self, kind: LinkKind, edges: list[Edge], opened: ExitStack) -> EdgeEnds:
        """Return this stage's ends of all of a pipeline's edges of one kind.

        Args:
            kind: Not `local`.
            edges: All edges of the kind, in the order of the pipeline.
            opened: Told how to undo it.
        """
        own = edges_at(self.stage_index, edges)
        if kind == "ipc":
            return self._open_ipc(edges, opened) if own else EdgeEnds()
        if kind == "nccl":
            edges_of_stage = NcclEdges(self.stage_index, own, self.device, self.meeting)
            opened.callback(edges_of_stage.abort)
            return edges_of_stage.ends
        if kind == "gloo":
            return self._open_gloo(own, opened)
        return self._open_ray(own, opened)

    def _open_ipc(self, edges: list[Edge], opened: ExitStack) -> EdgeEnds:
        region = IpcRegion(CudaDevice(self.device), self.stage_index, edges, self.meeting)
        opened.callback(region.close, 1.0)
        return region.ends()

    def _open_gloo(self, edges: list[Edge], opened: ExitStack) -> EdgeEnds:
        device = GlooDevice(self.own_host)
        ends = EdgeEnds()
        for edge in edges:
            peer = edge.peer_of(self.stage_index)
            connection = GlooConnection(
                device,
                PrefixStore(edge.name, self.meeting.store),
                0 if self.stage_index == edge.sender else 1,
                peer_index=peer,
                open_timeout_s=self.meeting.remaining_s,
                deadline_s=self.deadline_s,
            )
            opened.callback(connection.close)
            self._add_ring(ends, edge, connection)
        return ends

    def _open_ray(self, edges: list[Edge], opened: ExitStack) -> EdgeEnds:
        from raypp.transport.ray_collective import CollectiveGroup  # importing Ray takes a second

        rendezvous = self.meeting.rendezvous
        name = f"raypp-{rendezvous.host}-{rendezvous.port}"
        group = CollectiveGroup(name, self.stage_index, self.num_stages, self.meeting.remaining_s)
        ends = EdgeEnds()
        for edge in edges:
            connection = group.connect(edge.peer_of(self.stage_index), self.deadline_s)
            opened.callback(connection.close)
            self._add_ring(ends, edge, connection)
        return ends

    def _add_ring(self, ends: EdgeEnds, edge: Edge, connection: Connection[Any]) -> None:
        if self.stage_index == edge.sender:
            sender: LinkSender = RingSender(connection, edge.num_slots, edge.slot_bytes)
            if self.device.type != "cpu":
                sender = StagedSender(sender, edge.slot_bytes, self.device)
            ends.senders[edge.name] = sender
        else:
            receiver: LinkReceiver = RingReceiver(connection, edge.num_slots, edge.slot_bytes)
            if self.device.type != "cpu":
                receiver = StagedReceiver(receiver, edge.num_slots, edge.slot_bytes, self.device)
            ends.receivers[edge.name] = receiver
