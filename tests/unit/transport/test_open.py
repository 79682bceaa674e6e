"""Whole pipelines of links: who is joined to whom, agreement at the start, and rings that do not deadlock."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from raypp.config.sections import TransportKind
from raypp.errors import ConfigError, DeadlineError, ResourceError
from raypp.transport.edges import StageLinks
from raypp.transport.host.ring import RingSender
from raypp.transport.link_choice import StagePlace
from raypp.transport.open import open_local_links, open_stage_links
from raypp.transport.rendezvous import Meeting, Rendezvous, RendezvousServer
from raypp.transport.schema import MessageSpec, feedback_schema, hidden_states_schema

FORWARD = MessageSpec(hidden_states_schema(8, torch.float32), max_rows=4, max_tokens=16)
FEEDBACK = MessageSpec(feedback_schema(2), max_rows=4, max_tokens=4)
DEADLINE_S = 20.0


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer()
    yield server
    server.close()


def open_in_threads(
    server: RendezvousServer, pool: ThreadPoolExecutor, forwards: list[MessageSpec], kind: TransportKind = "gloo"
) -> list[Future[StageLinks]]:
    """Open the links of as many stages as there are `forwards`, each in a thread and with a store of its own."""
    return [
        pool.submit(
            open_stage_links,
            kind,
            index,
            len(forwards),
            forward=[forward] * (len(forwards) - 1),
            feedback=FEEDBACK,
            rendezvous=server.address,
            open_timeout_s=DEADLINE_S,
            deadline_s=DEADLINE_S,
        )
        for index, forward in enumerate(forwards)
    ]


def hold(links: StageLinks) -> tuple[bool, ...]:
    return tuple(end is not None for end in (links.previous, links.next, links.feedback_in, links.feedback_out))


def test_a_single_stage_feeds_back_to_itself() -> None:
    links = open_stage_links("local", 0, 1, forward=[], feedback=FEEDBACK)
    assert hold(links) == (False, False, True, True)
    assert links.feedback_in is not None
    assert links.feedback_out is not None
    for step_id in range(6):
        links.feedback_in.post_recv(step_id, 48)
        links.feedback_out.acquire(step_id)[0] = step_id
        links.feedback_out.send(step_id, 48)
        assert links.feedback_in.wait(step_id)[0] == step_id
        links.feedback_in.release(step_id)
    links.close()


def test_local_links_do_not_join_processes() -> None:
    with pytest.raises(ConfigError, match="cannot join"):
        open_stage_links("local", 0, 2, forward=[FORWARD], feedback=FEEDBACK)


def run_ring_stage(
    links: StageLinks, index: int, num_stages: int, num_steps: int, late_s: float, full: threading.Event
) -> list[int]:
    """Run steps as a stage does: receive, count one up, send; return what the first stage was fed back.

    The first stage posts its feedback receives only when the ring is `full`, that is, when the last stage has sent as
    many steps as there are slots, and `late_s` after that. The third posts its first receive late, too.
    """
    ring = 2 * num_stages
    unposted: deque[int] = deque()
    expected: deque[int] = deque()
    fed_back = []

    def take_feedback(until: int) -> None:
        while expected and expected[0] <= until:
            step_id = expected.popleft()
            assert links.feedback_in is not None
            fed_back.append(int(links.feedback_in.wait(step_id)[0]))
            links.feedback_in.release(step_id)

    for step_id in range(num_steps):
        value = step_id % 100
        if links.feedback_in is not None:
            if step_id >= ring:
                if step_id == ring:
                    assert full.wait(DEADLINE_S), "the last stage had to wait for permission to send"
                    time.sleep(late_s)
                while unposted:
                    links.feedback_in.post_recv(unposted.popleft(), 16)
                take_feedback(step_id - ring)
            unposted.append(step_id)
            expected.append(step_id)
        if links.previous is not None:
            if step_id == 0 and index == 2:
                time.sleep(late_s / 4)
            links.previous.post_recv(step_id, 16)
            value = int(links.previous.wait(step_id)[0])
            links.previous.release(step_id)
        for end in (links.next, links.feedback_out):
            if end is not None:
                end.acquire(step_id)[:16] = value + 1
                end.send(step_id, 16)
        if links.feedback_out is not None and step_id == ring - 1:
            full.set()
    if links.feedback_in is not None:
        while unposted:
            links.feedback_in.post_recv(unposted.popleft(), 16)
        take_feedback(num_steps)
    return fed_back


def test_a_full_ring_of_stages_with_late_receivers_does_not_deadlock(server: RendezvousServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        opened = [future.result(DEADLINE_S) for future in open_in_threads(server, pool, [FORWARD] * 4)]
        assert [hold(links) for links in opened] == [
            (False, True, True, False),
            (True, True, False, False),
            (True, True, False, False),
            (True, False, False, True),
        ]
        full = threading.Event()
        runs = [pool.submit(run_ring_stage, links, index, 4, 100, 1.0, full) for index, links in enumerate(opened)]
        assert runs[0].result(DEADLINE_S) == [step_id % 100 + 4 for step_id in range(100)]
        for run in runs:
            run.result(DEADLINE_S)
        for closed in [pool.submit(links.close) for links in opened]:
            closed.result(DEADLINE_S)


def test_auto_joins_cpus_over_gloo(server: RendezvousServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        opened = [future.result(DEADLINE_S) for future in open_in_threads(server, pool, [FORWARD] * 2, "auto")]
        assert isinstance(opened[0].next, RingSender)
        full = threading.Event()
        runs = [pool.submit(run_ring_stage, links, index, 2, 10, 0.0, full) for index, links in enumerate(opened)]
        assert runs[0].result(DEADLINE_S) == [step_id + 2 for step_id in range(10)]
        runs[1].result(DEADLINE_S)
        for closed in [pool.submit(links.close) for links in opened]:
            closed.result(DEADLINE_S)


def test_links_that_cannot_be_are_refused_by_every_stage(server: RendezvousServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        for future in open_in_threads(server, pool, [FORWARD] * 3, "ipc"):
            with pytest.raises(ConfigError, match="ipc links cannot join stage 0 and stage 1; got: a stage without"):
                future.result(DEADLINE_S)


def test_local_links_of_a_pipeline_in_one_thread() -> None:
    stages = open_local_links(3, forward=[FORWARD] * 2, feedback=FEEDBACK)
    first, last = stages[0].feedback_in, stages[2].feedback_out
    assert first is not None
    assert last is not None
    for step_id in range(12):
        first.post_recv(step_id, 16)
        value = step_id
        for links in stages:
            if links.previous is not None:
                links.previous.post_recv(step_id, 16)
                value = int(links.previous.wait(step_id)[0]) + 1
                links.previous.release(step_id)
            if links.next is not None:
                links.next.acquire(step_id)[0] = value
                links.next.send(step_id, 16)
        last.acquire(step_id)[0] = value
        last.send(step_id, 16)
        if step_id >= 5:  # feedback may stay in the ring for 2 * num_stages steps
            assert first.wait(step_id - 5)[0] == step_id - 5 + 2
            first.release(step_id - 5)


@pytest.mark.parametrize(
    "other",
    [
        MessageSpec(hidden_states_schema(8, torch.bfloat16), max_rows=4, max_tokens=16),
        MessageSpec(hidden_states_schema(8, torch.float32), max_rows=4, max_tokens=32),
    ],
    ids=["dtype", "size"],
)
def test_a_mismatch_stops_every_stage_and_names_both_sides(server: RendezvousServer, other: MessageSpec) -> None:
    with ThreadPoolExecutor(3) as pool:
        for future in open_in_threads(server, pool, [FORWARD, FORWARD, other]):
            with pytest.raises(ConfigError, match="stage 1 and stage 2 disagree"):
                future.result(DEADLINE_S)


def test_a_stage_that_does_not_come_is_named(server: RendezvousServer) -> None:
    with pytest.raises(DeadlineError, match="stage 1 did not come"):
        open_stage_links(
            "gloo", 0, 2, forward=[FORWARD], feedback=FEEDBACK, rendezvous=server.address, open_timeout_s=0.3
        )


def test_a_stage_that_agrees_but_never_connects_is_named(server: RendezvousServer) -> None:
    meeting = Meeting(server.address, DEADLINE_S)
    meeting.tell("forward 0 expects", json.dumps(FORWARD.describe()))
    meeting.tell("feedback sends", json.dumps(FEEDBACK.describe()))
    meeting.tell("place 1", StagePlace.here(torch.device("cpu")).to_json())
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="no connection to stage 1"):
        open_stage_links(
            "gloo", 0, 2, forward=[FORWARD], feedback=FEEDBACK, rendezvous=server.address, open_timeout_s=1.0
        )
    assert time.monotonic() - started < DEADLINE_S / 2


def test_nobody_at_the_rendezvous_is_a_deadline_error() -> None:
    server = RendezvousServer()
    server.close()
    with pytest.raises(DeadlineError, match="rendezvous"):
        open_stage_links(
            "gloo", 1, 2, forward=[FORWARD], feedback=FEEDBACK, rendezvous=server.address, open_timeout_s=0.2
        )


def test_a_foreign_address_cannot_be_hosted() -> None:
    with pytest.raises(ResourceError, match="cannot listen"):
        RendezvousServer("192.0.2.1")


def listening_ports() -> set[str]:
    own = {
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").exists()
    }
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                ports.add(fields[1])
    return ports


def test_the_rendezvous_listens_on_its_own_interface_alone(server: RendezvousServer) -> None:
    ports = {address for address in listening_ports() if address.endswith(f":{server.address.port:04X}")}
    assert ports == {f"0100007F:{server.address.port:04X}"}
    assert server.address == Rendezvous("127.0.0.1", server.address.port)


def test_close_leaves_no_thread_and_no_port() -> None:
    gc.collect()
    threads, ports = set(os.listdir("/proc/self/task")), listening_ports()
    server = RendezvousServer()
    with ThreadPoolExecutor(2) as pool:
        opened = [future.result(DEADLINE_S) for future in open_in_threads(server, pool, [FORWARD] * 2)]
        assert listening_ports() > ports
        full = threading.Event()
        runs = [pool.submit(run_ring_stage, links, index, 2, 10, 0.0, full) for index, links in enumerate(opened)]
        for run in runs:
            run.result(DEADLINE_S)
        del runs
    server.close()
    for links in opened:
        links.close()
    # Threads that have ended leave /proc a moment later.
    ends = time.monotonic() + DEADLINE_S
    while set(os.listdir("/proc/self/task")) - threads and time.monotonic() < ends:
        time.sleep(0.01)
    assert set(os.listdir("/proc/self/task")) <= threads
    assert listening_ports() <= ports
