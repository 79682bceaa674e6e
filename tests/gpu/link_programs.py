"""What stages do with their links in the tests: messages whose every byte is checked on the GPU.

Nothing here waits on the host inside a step, as in the engine. What went wrong is counted in GPU memory.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import torch
from stage_processes import DEADLINE_S, LinkedStage, bytes_message

from raypp.errors import EngineDeadError, RayppError
from raypp.transport.link import LinkReceiver, LinkSender
from raypp.transport.open import make_members, open_local_links, open_members
from raypp.transport.rendezvous import Rendezvous

_PATTERN_BYTES = 1 << 24


class Checker:
    """Writes messages, and counts the bytes of received ones that are wrong."""

    def __init__(self, device: torch.device) -> None:
        self._pattern = (torch.arange(_PATTERN_BYTES, device=device) * 7).to(torch.uint8)
        self._wrong = torch.zeros((), dtype=torch.int64, device=device)

    def write(self, slot: torch.Tensor, edge: int, step_id: int, num_bytes: int) -> None:
        torch.add(self._pattern[:num_bytes], (edge * 101 + step_id * 13) % 256, out=slot[:num_bytes])

    def check(self, slot: torch.Tensor, edge: int, step_id: int, num_bytes: int) -> None:
        expected = self._pattern[:num_bytes] + (edge * 101 + step_id * 13) % 256
        self._wrong += (slot[:num_bytes] != expected).sum()

    @property
    def num_wrong_bytes(self) -> int:
        return int(self._wrong)


def is_drained(device: torch.device, timeout_s: float = DEADLINE_S / 2) -> bool:
    """Wait until the current stream is done; return whether it is."""
    if device.type != "cuda":
        return True
    done = torch.cuda.Event()
    done.record()
    ends = time.monotonic() + timeout_s
    while not done.query():
        if time.monotonic() > ends:
            return False
        time.sleep(0.001)
    return True


def sizes_of(num_steps: int, max_bytes: int, seed: int) -> list[int]:
    """Return message sizes, the same in all stages; the smallest and the largest are among them."""
    draw = random.Random(seed)
    drawn = [max(1, int(max_bytes ** draw.random())) for _ in range(num_steps - 2)]
    return [1, max_bytes, *drawn]


def run_ring(
    stage: LinkedStage,
    num_steps: int,
    forward_bytes: int,
    feedback_bytes: int,
    pauses_ms: dict[int, float] | None = None,
    late_s: float = 0.0,
    full: str | None = None,
    replay: bool = False,
) -> int:
    """Run steps as stages do: receive, check, write, send; return how many received bytes were wrong.

    Args:
        stage: Of this process.
        num_steps: To run.
        forward_bytes: The largest message forward.
        feedback_bytes: The largest message back.
        pauses_ms: By stage: how long its GPU takes for a step.
        late_s: How long the first stage waits with its first feedback after the reverse edge is full.
        full: A file that the last stage makes when it has filled the reverse edge.
        replay: Put a CUDA graph between receiving and sending.
    """
    links, device = stage.links, stage.device
    assert links is not None
    forward, feedback = sizes_of(num_steps, forward_bytes, 1), sizes_of(num_steps, feedback_bytes, 2)
    checker = Checker(device)
    work = _GraphedWork(device) if replay else None
    pause_ms = (pauses_ms or {}).get(stage.index, 0.0)
    ring = 2 * stage.num_stages

    def take_feedback(step_id: int) -> None:
        _receive(checker, links.feedback_in, stage.num_stages, step_id, feedback[step_id])

    for step_id in range(num_steps):
        if stage.is_first and step_id >= ring:
            if step_id == ring and full is not None:
                _await_file(full)
                time.sleep(late_s)
            take_feedback(step_id - ring)
        if links.previous is not None:
            _receive(checker, links.previous, stage.index, step_id, forward[step_id])
        if work is not None:
            work.replay()
        if pause_ms and device.type == "cuda":
            torch.cuda._sleep(int(pause_ms * 1.5e6))  # cycles
        if links.next is not None:
            _send(checker, links.next, stage.index + 1, step_id, forward[step_id])
        if links.feedback_out is not None:
            _send(checker, links.feedback_out, stage.num_stages, step_id, feedback[step_id])
            if step_id == ring - 1 and full is not None:
                assert is_drained(device), "the last stage had to wait for permission to send"
                Path(full).touch()
    if stage.is_first:
        for step_id in range(max(num_steps - ring, 0), num_steps):
            take_feedback(step_id)
    assert is_drained(device), f"the stream of stage {stage.index} hangs"
    assert work is None or work.num_replays == num_steps
    return checker.num_wrong_bytes


def hang_and_abort(stage: LinkedStage, aborting: list[int]) -> dict[str, float]:
    """Let two stages wait for each other with more to do queued behind, then abort on some of them.

    Stages that do not abort must be let go by those that do. Returns whether the stream hung before, and how many
    seconds the abort then took to free it.
    """
    links = stage.links
    assert links is not None
    sender, receiver = (links.next, links.feedback_in) if stage.is_first else (links.feedback_out, links.previous)
    assert sender is not None
    assert receiver is not None
    num_sent = 2 if stage.is_first else 0
    for step_id in range(num_sent):
        sender.acquire(step_id)
        sender.send(step_id, 1024)
    for step_id in range(8):  # the first of them, or the third, never comes
        receiver.post_recv(step_id, 1024)
        receiver.wait(step_id)
        receiver.release(step_id)
    for step_id in range(num_sent, 6):
        sender.acquire(step_id)
        sender.send(step_id, 1024)
    hung = not is_drained(stage.device, 0.5)
    started = time.monotonic()
    if stage.index in aborting:
        aborter = threading.Timer(0.2, links.abort)
        aborter.start()
        aborter.join(DEADLINE_S / 2)
        assert not aborter.is_alive(), "abort does not come back"
    assert is_drained(stage.device, DEADLINE_S / 4), f"the stream of stage {stage.index} still hangs after the abort"
    let_go_s = time.monotonic() - started
    if stage.index in aborting:
        try:
            sender.acquire(6)
        except EngineDeadError:
            pass
        else:
            raise AssertionError("an aborted link can still be used")
    return {"hung": hung, "let_go_s": round(let_go_s, 3)}


def wait_for_a_dead_peer(stage: LinkedStage, result: str) -> None:
    """Wait for a message that never comes, until the stream is aborted, and leave as a stage does."""
    links = stage.links
    assert links is not None
    receiver = links.feedback_in or links.previous
    assert receiver is not None
    sender = links.next or links.feedback_out
    assert sender is not None
    for step_id in range(20):
        try:
            sender.acquire(step_id)
            sender.send(step_id, 64)
        except RayppError:
            break
    receiver.post_recv(0, 64)
    receiver.wait(0)
    Path(result + ".waiting").touch()
    _await_file(result + ".killed")
    started = time.monotonic()
    links.abort()
    drained = is_drained(stage.device, DEADLINE_S / 4)
    Path(result).write_text(f"drained {drained} after {time.monotonic() - started:.3f} s")
    os._exit(7)


def gpu_bytes_in_use(stage: LinkedStage) -> int:
    """Return the bytes of the stage's GPU that anybody uses."""
    torch.cuda.synchronize(stage.device)
    free, total = torch.cuda.mem_get_info(stage.device)
    return total - free


class _GraphedWork:
    """A CUDA graph that counts its replays."""

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._count += 1
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):  # torch's own may be one of another device
            self._count += 1
        self._count.zero_()

    def replay(self) -> None:
        self._graph.replay()

    @property
    def num_replays(self) -> int:
        return int(self._count)


def _send(checker: Checker, sender: LinkSender, edge: int, step_id: int, num_bytes: int) -> None:
    checker.write(sender.acquire(step_id), edge, step_id, num_bytes)
    sender.send(step_id, num_bytes)


def _receive(checker: Checker, receiver: LinkReceiver | None, edge: int, step_id: int, num_bytes: int) -> None:
    assert receiver is not None
    receiver.post_recv(step_id, num_bytes)
    checker.check(receiver.wait(step_id), edge, step_id, num_bytes)
    receiver.release(step_id)


def _await_file(path: str) -> None:
    ends = time.monotonic() + DEADLINE_S / 2
    while not Path(path).exists():
        assert time.monotonic() < ends, f"{path} did not come"
        time.sleep(0.01)


def run_slices(
    stage: LinkedStage, rendezvous: Rendezvous, device: torch.device, rank: int, num_steps: int, max_bytes: int
) -> int:
    """Be one of two members of two stages, as if these were on two nodes; return how many bytes arrived wrong.

    Between steps members sum, as layers do, in the same stream. Nothing waits on the host.
    """
    stage.device = device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    members = make_members(1, rank, 2, device)
    assert members is not None
    timeouts = {"open_timeout_s": DEADLINE_S / 2, "deadline_s": DEADLINE_S / 2}
    open_members(members, 1, rendezvous, own_host="127.0.0.1", **timeouts)
    specs = {"forward": [bytes_message(max_bytes)], "feedback": bytes_message(16)}
    sending, receiving = open_local_links(2, **specs, device=device, members=[members, members])
    sender, receiver = sending.next, receiving.previous
    assert sender is not None
    assert receiver is not None
    checker, ones = Checker(device), torch.ones(1000, device=device)
    for step_id, num_bytes in enumerate(sizes_of(num_steps, max_bytes, 1)):
        checker.write(sender.acquire(step_id), 0, step_id, num_bytes)
        sender.send(step_id, num_bytes)
        receiver.post_recv(step_id, num_bytes)
        checker.check(receiver.wait(step_id), 0, step_id, num_bytes)
        receiver.release(step_id)
        members.sum_(ones).mul_(0.5)
    assert is_drained(device)
    num_wrong = checker.num_wrong_bytes + int((ones != 1).sum())
    for links in (sending, receiving):
        links.close()
    members.close()
    return num_wrong
