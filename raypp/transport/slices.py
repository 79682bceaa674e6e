"""Messages between stages of several members on two nodes: each member sends a slice, and the receivers gather them.

    sender:    whole message --its slice--> slot of the link
    receiver:  slot of the link --gathered by rank--> whole message

All members of a stage have the same message at its border. It is cut by bytes, into as many runs as there are members.
Each is contiguous, for one row as for a long prompt, whatever tensors the message holds and whatever sizes these have:
nothing is packed, and what is gathered lies in its place. A message crosses the network once, not once per member.

Sizes follow from the plan, as those of whole messages do, and which edges are cut follows from the stages' places: both
ends agree. The members of a stage receive in the order of steps, as they sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from raypp.members import Members
from raypp.transport.edges import Edge, EdgeEnds
from raypp.transport.link import LinkReceiver, LinkSender

_ALIGNMENT = 16
_WORD = torch.int32  # what all members' ways of gathering move

EndT = TypeVar("EndT", bound=LinkSender | LinkReceiver)


def slice_bytes(num_bytes: int, count: int) -> int:
    """Return the bytes that each of `count` members sends of a message; the last slices may reach beyond its end."""
    return -(-num_bytes // (count * _ALIGNMENT)) * _ALIGNMENT


def sliced_edges(edges: Iterable[Edge], count: int, is_apart: Callable[[Edge], bool]) -> dict[str, Edge]:
    """Return the edges that carry slices, with slots for these, by name.

    Feedback, a few bytes per row, goes whole from member to member.

    Args:
        edges: Of the pipeline.
        count: Members of each stage.
        is_apart: Whether an edge joins stages on two nodes.
    """
    return {
        edge.name: replace(edge, slot_bytes=slice_bytes(edge.slot_bytes, count))
        for edge in edges
        if count > 1 and edge.sender < edge.receiver and is_apart(edge)
    }


def add_slices(ends: EdgeEnds, names: Iterable[str], members: Members) -> None:
    """Put ends for whole messages in place of a stage's ends of edges that were opened for slices."""
    for name in names:
        if name in ends.senders:
            ends.senders[name] = SliceSender(ends.senders[name], members)
        if name in ends.receivers:
            ends.receivers[name] = SliceReceiver(ends.receivers[name], members)


class _SliceEnd(Generic[EndT]):
    """What both ends do alike.

    Args:
        link: For slices.
        members: Of this end's stage.
    """

    def __init__(self, link: EndT, members: Members) -> None:
        self._link = link
        self._rank, self._count, self._gathered = members.rank, members.count, members.gathered
        num_bytes = members.count * link.slots.shape[1]
        self.slots = torch.zeros(1, num_bytes, dtype=torch.uint8, device=link.slots.device)
        """uint8 [1, bytes of the largest message]: one is enough, for the link's own slots hold what is on its way."""

    def abort(self) -> None:
        """End waits in progress for the link, from any thread; those for other members end with the members."""
        self._link.abort()

    def close(self) -> None:
        """Release everything, once the messages that were sent are out."""
        self._link.close()


class SliceSender(_SliceEnd[LinkSender]):
    """The sending end; see `LinkSender`."""

    _slot: torch.Tensor

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return the place of the whole message, once the link has a free slot for its slice."""
        self._slot = self._link.acquire(step_id)
        return self.slots[0]

    def send(self, step_id: int, num_bytes: int) -> None:
        """Send this member's slice."""
        size = slice_bytes(num_bytes, self._count)
        self._slot[:size].copy_(self.slots[0, self._rank * size : (self._rank + 1) * size])
        self._link.send(step_id, size)


class SliceReceiver(_SliceEnd[LinkReceiver]):
    """The receiving end; see `LinkReceiver`. All members wait for the same steps, in one order."""

    def __init__(self, link: LinkReceiver, members: Members) -> None:
        super().__init__(link, members)
        self._sizes: dict[int, int] = {}  # of the slices of posted steps

    def post_recv(self, step_id: int, num_bytes: int) -> None:
        """Say that the step's slice will be wanted. From any one thread."""
        size = self._sizes[step_id] = slice_bytes(num_bytes, self._count)
        self._link.post_recv(step_id, size)

    def wait(self, step_id: int) -> torch.Tensor:
        """Return the place of the whole message, once all members have received their slices."""
        own, size = self._link.wait(step_id), self._sizes.pop(step_id)
        whole = self.slots[0, : self._count * size]
        self._gathered(own[:size].view(_WORD), out=whole.view(_WORD).view(self._count, -1))
        self._link.release(step_id)
        return self.slots[0]

    def release(self, step_id: int) -> None:
        """Do nothing: the link has its slot back since `wait`, and the next step's slices are gathered later."""
