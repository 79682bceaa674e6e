"""Messages between stages of several members on two nodes: who sends what, and that the whole message arrives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from link_harness import DEADLINE_S, content_of

from raypp.transport.host.gloo import GlooConnection
from raypp.transport.host.host_members import GlooMembers
from raypp.transport.link_choice import StagePlace
from raypp.transport.open import open_members, open_stage_links
from raypp.transport.rendezvous import RendezvousServer
from raypp.transport.schema import MessageSpec, feedback_schema, hidden_states_schema
from raypp.transport.slices import slice_bytes

NUM_STAGES = 3
HIDDEN_SIZE = 7  # which no number of members here divides
FORWARD = MessageSpec(hidden_states_schema(HIDDEN_SIZE, torch.float32), max_rows=4, max_tokens=33)
FEEDBACK = MessageSpec(feedback_schema(2), max_rows=4, max_tokens=4)
SIZES = [FORWARD.slot_bytes, FORWARD.schema.num_bytes(1, 1), FORWARD.schema.num_bytes(3, 17), 1, 16, 17]


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_slices_cover_a_message_and_little_more(count: int) -> None:
    for num_bytes in (*range(1, 300), 8192, 16 << 20):
        size = slice_bytes(num_bytes, count)
        assert size % 16 == 0
        assert num_bytes <= count * size < num_bytes + 16 * count


class _Sent:
    """Counts the bytes that pass each connection, by its thread's stage and rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_member: dict[tuple[int, int], list[int]] = {}
        self.here = threading.local()
        send = GlooConnection.send

        def counted(connection: GlooConnection, tensor: torch.Tensor, tag: int) -> Any:
            self.by_member.setdefault(self.here.member, []).append(tensor.numel())
            return send(connection, tensor, tag)

        monkeypatch.setattr(GlooConnection, "send", counted)


def _on_nodes(monkeypatch: pytest.MonkeyPatch, here: Any, node_of: Callable[[int], int]) -> None:
    place = StagePlace.here(torch.device("cpu"))
    monkeypatch.setattr(
        StagePlace, "here", classmethod(lambda cls, device: replace(place, node=f"node {node_of(here.member[0])}"))
    )


def _run(server: RendezvousServer, sent: _Sent, index: int, rank: int, count: int) -> list[int]:
    """Pass messages through a member of a stage; return the steps that arrived whole."""
    sent.here.member, timeouts = (index, rank), {"open_timeout_s": DEADLINE_S, "deadline_s": DEADLINE_S}
    members = GlooMembers(index, rank, count) if count > 1 else None
    if members is not None:
        open_members(members, index, server.address, own_host="127.0.0.1", **timeouts)
    forward = [FORWARD] * (NUM_STAGES - 1)
    links = open_stage_links(
        "gloo",
        index,
        NUM_STAGES,
        forward=forward,
        feedback=FEEDBACK,
        rendezvous=server.address,
        members=members,
        **timeouts,
    )
    arrived = []
    for step_id, num_bytes in enumerate(SIZES):
        content = content_of(step_id, num_bytes)
        if links.previous is not None:
            links.previous.post_recv(step_id, num_bytes)
            if torch.equal(links.previous.wait(step_id)[:num_bytes], content):
                arrived.append(step_id)
            links.previous.release(step_id)
        if links.next is not None:
            links.next.acquire(step_id)[:num_bytes] = content
            links.next.send(step_id, num_bytes)
    if links.feedback_out is not None:
        links.feedback_out.acquire(0)[:48] = content_of(rank, 48)
        links.feedback_out.send(0, 48)
    if links.feedback_in is not None:
        links.feedback_in.post_recv(0, 48)
        assert torch.equal(links.feedback_in.wait(0)[:48], content_of(rank, 48)), "feedback of another member"
        links.feedback_in.release(0)
    links.close()
    if members is not None:
        members.close()
    return arrived


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_between_nodes_each_member_sends_its_slice_and_all_get_the_whole(count: int, monkeypatch: Any) -> None:
    """Stages 0 and 1 are on one node, stage 2 is on another one."""
    sent, server = _Sent(monkeypatch), RendezvousServer()
    _on_nodes(monkeypatch, sent.here, lambda index: index // 2)
    places = [(index, rank) for index in range(NUM_STAGES) for rank in range(count)]
    with ThreadPoolExecutor(len(places)) as pool:
        running = [pool.submit(_run, server, sent, index, rank, count) for index, rank in places]
        arrived = [each.result(2 * DEADLINE_S) for each in running]
    server.close()
    for (index, _), steps in zip(places, arrived, strict=True):
        assert steps == (list(range(len(SIZES))) if index else [])
    slices = SIZES if count == 1 else [slice_bytes(size, count) for size in SIZES]
    for rank in range(count):
        assert sent.by_member[0, rank] == SIZES, "on one node nothing changes"
        assert sent.by_member[1, rank] == slices
        assert sent.by_member[2, rank] == [48], "feedback goes whole"
