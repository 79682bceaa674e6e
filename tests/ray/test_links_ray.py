"""Links over Ray's own collectives, between real actors; the other links need no Ray to be tested."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import ray
import torch

from raypp.errors import EngineDeadError
from raypp.transport.edges import StageLinks
from raypp.transport.open import open_stage_links
from raypp.transport.rendezvous import Rendezvous, RendezvousServer
from raypp.transport.schema import MessageSpec, Schema, TensorSpec

NUM_STAGES = 3
MESSAGES = MessageSpec(Schema((TensorSpec("bytes", torch.uint8, (4096,), "token"),)), max_rows=1, max_tokens=16)
NUM_BYTES = MESSAGES.slot_bytes
DEADLINE_S = 40.0
MUCH_LESS_S = DEADLINE_S / 4
"""So long nothing takes, on whatever machine, unless it waits for the deadline."""


@ray.remote(num_cpus=0.01)
class LinkedActor:
    """One stage's links, and what a stage does with them."""

    def __init__(self, stage_index: int) -> None:
        self._index = stage_index
        self._server: RendezvousServer | None = None
        self._links: StageLinks | None = None

    def host(self) -> Rendezvous:
        self._server = RendezvousServer()
        return self._server.address

    def pid(self) -> int:
        return os.getpid()

    def open(self, rendezvous: Rendezvous) -> None:
        self._links = open_stage_links(
            "ray_collective",
            self._index,
            NUM_STAGES,
            forward=[MESSAGES] * (NUM_STAGES - 1),
            feedback=MESSAGES,
            rendezvous=rendezvous,
            open_timeout_s=60.0,
            deadline_s=DEADLINE_S,
        )

    def run(self, num_steps: int) -> list[int]:
        """Pass each step on, one counted up; return what the first stage was fed back, two rings late."""
        links, fed_back = self._links, []
        assert links is not None
        feedback_in = links.feedback_in
        for step_id in range(num_steps + 2 * NUM_STAGES):
            if feedback_in is not None and step_id >= 2 * NUM_STAGES:
                fed_back.append(self._read(feedback_in, step_id - 2 * NUM_STAGES))
            if step_id >= num_steps:
                continue
            value = step_id % 100
            if feedback_in is not None:
                feedback_in.post_recv(step_id, NUM_BYTES)
            if links.previous is not None:
                links.previous.post_recv(step_id, NUM_BYTES)
                value = self._read(links.previous, step_id)
            for end in (links.next, links.feedback_out):
                if end is not None:
                    end.acquire(step_id).fill_(value + 1)
                    end.send(step_id, NUM_BYTES)
        return fed_back

    def close(self) -> None:
        assert self._links is not None
        self._links.close()

    def wait_for_more(self, step_id: int, abort_after_s: float = 60.0) -> tuple[str, float]:
        """Wait for a step that nobody sends; return the error's name and the seconds it took."""
        assert self._links is not None
        receiver = self._links.previous or self._links.feedback_in
        assert receiver is not None
        timer = threading.Timer(abort_after_s, self._links.abort)
        timer.start()
        started = time.monotonic()
        try:
            receiver.post_recv(step_id, NUM_BYTES)
            receiver.wait(step_id)
        except EngineDeadError as error:
            return type(error).__name__, time.monotonic() - started
        finally:
            timer.cancel()
        return "nothing", time.monotonic() - started

    def _read(self, end: Any, step_id: int) -> int:
        slot = end.wait(step_id)[:NUM_BYTES]
        assert bool((slot == slot[0]).all()), f"step {step_id} is torn"
        value = int(slot[0])
        end.release(step_id)
        return value


def open_actors() -> list[Any]:
    actors = [LinkedActor.remote(index) for index in range(NUM_STAGES)]
    rendezvous = ray.get(actors[0].host.remote(), timeout=60)
    ray.get([actor.open.remote(rendezvous) for actor in actors], timeout=90)
    return actors


@pytest.mark.usefixtures("local_ray")
def test_a_ring_over_ray_collective_and_a_killed_stage() -> None:
    actors = open_actors()
    fed_back, *_ = ray.get([actor.run.remote(200) for actor in actors], timeout=60)
    assert fed_back == [step_id % 100 + NUM_STAGES for step_id in range(200)]

    waiting = actors[2].wait_for_more.remote(200)
    os.kill(ray.get(actors[1].pid.remote(), timeout=60), 9)
    error, seconds = ray.get(waiting, timeout=2 * DEADLINE_S)
    assert error == "StageDiedError"
    assert seconds < MUCH_LESS_S


@pytest.mark.full
@pytest.mark.usefixtures("local_ray")
def test_links_over_ray_collective_close_open_again_and_abort() -> None:
    actors = open_actors()
    for _ in range(2):
        ray.get([actor.run.remote(10) for actor in actors], timeout=60)
        ray.get([actor.close.remote() for actor in actors], timeout=60)
        rendezvous = ray.get(actors[0].host.remote(), timeout=60)
        ray.get([actor.open.remote(rendezvous) for actor in actors], timeout=90)

    error, seconds = ray.get(actors[2].wait_for_more.remote(0, 0.3), timeout=2 * DEADLINE_S)
    assert error == "EngineDeadError"
    assert seconds < MUCH_LESS_S
    error, seconds = ray.get(actors[0].wait_for_more.remote(0), timeout=2 * DEADLINE_S)
    assert error == "StageDiedError", "the stage that it sends to hears of it"
    assert seconds < MUCH_LESS_S
