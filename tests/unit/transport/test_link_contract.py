"""What every link must do; one set of tests, run over each of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import link_harness as harness
import pytest
from link_harness import (
    DEADLINE_S,
    DeviceCopyEdges,
    GlooEdges,
    LocalEdges,
    SlicedEdges,
    receive_steps,
    send_steps,
    sizes_of,
)

from raypp.errors import DeadlineError, EngineDeadError, RayppError, StageDiedError

Edges = LocalEdges | GlooEdges

MUCH_LESS_S = DEADLINE_S / 4
"""So long nothing takes, on whatever machine, unless it waits for the deadline."""


KINDS = {"local": LocalEdges, "device copy": DeviceCopyEdges, "gloo": GlooEdges, "slices": SlicedEdges}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def edges(request: pytest.FixtureRequest) -> Iterator[Edges]:
    edges = request.param()
    yield edges
    edges.close()


@pytest.mark.parametrize(("near", "posted_ahead"), [("sender", 1), ("receiver", 8)])
def test_steps_arrive_whole_and_in_order(edges: Edges, near: harness.Role, posted_ahead: int) -> None:
    edge, sizes = edges.open(near), sizes_of(250, 1 << 16)
    if near == "sender":
        received = edge.far(receive_steps, sizes, 0, 0.0, posted_ahead)
        send_steps(edge.end, sizes)
        assert received.result(DEADLINE_S) == 250
    else:
        sent = edge.far(send_steps, sizes)
        assert receive_steps(edge.end, sizes, posted_ahead=posted_ahead) == 250
        sent.result(DEADLINE_S)
    edge.end.close()


def test_sender_faster_than_receiver(edges: Edges) -> None:
    edge, sizes = edges.open(), sizes_of(50, 4096)
    received = edge.far(receive_steps, sizes, 0, 0.005)
    send_steps(edge.end, sizes)
    assert received.result(DEADLINE_S) == 50
    edge.end.close()


def test_receiver_faster_than_sender(edges: Edges) -> None:
    edge, sizes = edges.open(), sizes_of(50, 4096)
    received = edge.far(receive_steps, sizes, 0, 0.0, 4)
    send_steps(edge.end, sizes, pause_s=0.005)
    assert received.result(DEADLINE_S) == 50
    edge.end.close()


def test_sends_do_not_wait_for_a_receiver_that_posts_late(edges: Edges) -> None:
    edge, sizes = edges.open(num_slots=8, slot_bytes=1 << 20), [1 << 20] * 8
    started = time.monotonic()
    send_steps(edge.end, sizes)
    assert time.monotonic() - started < MUCH_LESS_S, "a send waited"
    received = edge.far(receive_steps, sizes * 2, 0, 0.0, 1, 0.3)
    send_steps(edge.end, sizes, first=8)
    assert received.result(DEADLINE_S) == 16
    edge.end.close()


def test_a_wait_that_ends_just_in_time_leaves_the_edge_whole(edges: Edges) -> None:
    edge, sizes = edges.open("receiver", deadline_s=5.0), sizes_of(50, 4096)
    sent = edge.far(send_steps, sizes[:1], 0, 0.5)
    sent.add_done_callback(lambda _: edge.far(send_steps, sizes[1:], 1))
    assert receive_steps(edge.end, sizes) == 50
    edge.end.close()


def test_waiting_for_a_message_ends_at_the_deadline(edges: Edges) -> None:
    edge = edges.open("receiver", deadline_s=0.3)
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        harness.wait_for_nothing(edge.end)
    assert 0.29 < time.monotonic() - started < MUCH_LESS_S
    edge.end.close()


def test_waiting_for_a_slot_ends_at_the_deadline(edges: Edges) -> None:
    edge = edges.open("sender", num_slots=2, deadline_s=0.3)
    send_steps(edge.end, [8, 8])
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        edge.end.acquire(2)
    assert 0.29 < time.monotonic() - started < MUCH_LESS_S
    edge.end.close()


@pytest.mark.parametrize("near", ["sender", "receiver"])
def test_abort_from_another_thread_ends_a_wait(edges: Edges, near: harness.Role) -> None:
    edge = edges.open(near, num_slots=2)
    if near == "sender":
        send_steps(edge.end, [8, 8])
    timer = threading.Timer(0.2, edge.end.abort)
    timer.start()
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="abort"):
        edge.end.acquire(2) if near == "sender" else harness.wait_for_nothing(edge.end)
    assert time.monotonic() - started < MUCH_LESS_S
    timer.join()
    with pytest.raises(EngineDeadError):
        edge.end.acquire(2) if near == "sender" else edge.end.wait(0)
    edge.end.abort()
    edge.end.close()


def test_abort_ends_the_wait_of_the_other_end(edges: Edges) -> None:
    edge = edges.open("sender")
    waited = edge.far(harness.wait_for_nothing)
    edge.end.abort()
    with pytest.raises(EngineDeadError):
        waited.result(MUCH_LESS_S)
    edge.end.close()


def test_closing_one_end_ends_the_wait_of_the_other(edges: Edges) -> None:
    edge = edges.open("sender")
    waited = edge.far(harness.wait_for_nothing)
    edge.end.close()
    with pytest.raises(EngineDeadError):
        waited.result(MUCH_LESS_S)


def test_what_was_sent_before_close_is_received(edges: Edges) -> None:
    edge, sizes = edges.open("sender"), sizes_of(3, 1 << 16)
    received = edge.far(receive_steps, sizes, 0, 0.0, 3)
    send_steps(edge.end, sizes)
    edge.end.close()
    assert received.result(DEADLINE_S) == 3


def test_waiting_leaves_the_processor_and_the_gil_to_others(edges: Edges) -> None:
    edge = edges.open("receiver", deadline_s=0.3)
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.005):
            ticks += 1

    done = threading.Event()
    ticker = threading.Thread(target=tick)
    ticker.start()
    spent = time.process_time()
    with pytest.raises(RayppError):
        harness.wait_for_nothing(edge.end)
    spent = time.process_time() - spent
    done.set()
    ticker.join()
    assert ticks > 3, "the waiting thread held the GIL"
    assert spent < 0.15, f"0.3 s of waiting took {spent:.2f} s of processor time"
    edge.end.close()


def test_a_killed_peer_is_seen() -> None:
    edges = GlooEdges()
    sender, receiver = edges.open("sender", num_slots=2).end, edges.open("receiver", num_slots=2).end
    send_steps(sender, [8, 8])
    timer = threading.Timer(0.1, edges.process.kill)
    timer.start()
    started = time.monotonic()
    with pytest.raises(StageDiedError) as caught:
        harness.wait_for_nothing(receiver)
    assert caught.value.stage_index == 0
    with pytest.raises(StageDiedError) as caught:
        sender.acquire(2)
    assert caught.value.stage_index == 1
    assert time.monotonic() - started < MUCH_LESS_S
    timer.join()
    receiver.close()
    sender.close()
    edges.close()
