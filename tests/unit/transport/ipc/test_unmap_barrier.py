"""Stages wait until their neighbours have unmapped their memory; a dead one has."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raypp.errors import DeadlineError
from raypp.transport.ipc.region import UnmapBarrier

DEADLINE_S = 20.0


def open_ring(num_stages: int) -> list[UnmapBarrier]:
    stages = [UnmapBarrier(index) for index in range(num_stages)]
    with ThreadPoolExecutor(num_stages) as pool:
        met = [
            pool.submit(
                stage.connect,
                {peer: stages[peer].address for peer in {(index - 1) % num_stages, (index + 1) % num_stages}},
                DEADLINE_S,
            )
            for index, stage in enumerate(stages)
        ]
        for each in met:
            each.result(DEADLINE_S)
    return stages


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_all_pass_whatever_the_order(num_stages: int) -> None:
    stages = open_ring(num_stages)
    with ThreadPoolExecutor(num_stages) as pool:
        waits = []
        for stage in stages:
            stage.arrive()
            waits.append(pool.submit(stage.wait, DEADLINE_S))
        assert [each.result(DEADLINE_S) for each in waits] == [[]] * num_stages
    for stage in stages:
        stage.close()


def test_a_missing_neighbour_is_named_after_the_deadline() -> None:
    first, second = open_ring(2)
    started = time.monotonic()
    first.arrive()
    assert first.wait(0.2) == [1]
    assert time.monotonic() - started > 0.19
    second.close()
    assert first.wait(DEADLINE_S) == [], "one that is gone uses no memory"
    first.close()


def join_and_die(address: str) -> None:
    UnmapBarrier(1).connect({0: address}, DEADLINE_S)


def test_a_dead_neighbour_counts_as_arrived() -> None:
    first = UnmapBarrier(0)
    process = multiprocessing.get_context("fork").Process(target=join_and_die, args=(first.address,), daemon=True)
    process.start()
    first.connect({1: "unused"}, DEADLINE_S)
    process.kill()
    process.join(DEADLINE_S)
    assert first.wait(DEADLINE_S) == []
    first.close()


def test_a_neighbour_that_does_not_come_is_named() -> None:
    stage = UnmapBarrier(0)
    with pytest.raises(DeadlineError, match="stage 2 did not connect"):
        stage.connect({2: "unused"}, 0.1)
    stage.close()


def test_a_neighbour_that_is_not_there_is_named() -> None:
    stage = UnmapBarrier(3)
    with pytest.raises(DeadlineError, match="stage 2 cannot be reached"):
        stage.connect({2: "raypp-nobody"}, 0.1)
    stage.close()


def test_strangers_are_not_taken_for_neighbours() -> None:
    first, stranger, second = UnmapBarrier(0), UnmapBarrier(7), UnmapBarrier(1)
    stranger.connect({0: first.address}, DEADLINE_S)
    second.connect({0: first.address}, DEADLINE_S)
    first.connect({1: second.address}, DEADLINE_S)
    second.arrive()
    assert first.wait(DEADLINE_S) == []
    for stage in (first, stranger, second):
        stage.close()


def test_other_users_are_not_taken_for_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = UnmapBarrier(0), UnmapBarrier(1)
    second.connect({0: first.address}, DEADLINE_S)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    silent.connect(f"\0{first.address}")
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(DeadlineError, match="stage 1 did not connect"):
            first.connect({1: second.address}, 0.2)
    assert silent.recv(1) == b"", "it is refused at once, and does not keep others waiting"
    again = UnmapBarrier(1)
    again.connect({0: first.address}, DEADLINE_S)
    first.connect({1: again.address}, DEADLINE_S)
    for each in (first, second, again, silent):
        each.close()


def test_other_users_do_not_take_a_neighbours_place(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = UnmapBarrier(0), UnmapBarrier(1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(DeadlineError, match=r"stage 0 cannot be reached.*of user \d+, this process of user 12345"):
        second.connect({0: first.address}, DEADLINE_S)
    first.close()
    second.close()
