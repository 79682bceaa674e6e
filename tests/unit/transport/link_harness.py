"""Two ends of an edge, one here and one elsewhere, and things to do at the far end.

A far end is a thread or a process. What runs there is a function of this module or of a test's module, so that a
spawned process can import it.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore

from raypp.errors import RayppError
from raypp.transport.host.gloo import GlooConnection, GlooDevice
from raypp.transport.host.host_members import thread_members
from raypp.transport.host.local import open_local_edge
from raypp.transport.host.ring import RingReceiver, RingSender
from raypp.transport.rendezvous import Meeting, Rendezvous, RendezvousServer
from raypp.transport.slices import SliceReceiver, SliceSender, slice_bytes

End = Any  # LinkSender or LinkReceiver
Role = Literal["sender", "receiver"]
DEADLINE_S = 20.0
_PATTERN = (torch.arange(1 << 20) * 7).to(torch.uint8)


@dataclass
class Edge:
    """The near end, and the far end's executor."""

    end: End
    _far: Callable[..., Future[Any]]

    def far(self, function: Callable[..., Any], *args: object) -> Future[Any]:
        """Start `function(far_end, *args)` at the far end."""
        return self._far(function, *args)


def open_gloo_end(
    rendezvous: Rendezvous,
    name: str,
    role: Role,
    num_slots: int,
    slot_bytes: int,
    deadline_s: float,
    device: torch.device | None,
) -> End:
    """Open one end of a gloo edge; stage 0 sends and stage 1 receives."""
    meeting = Meeting(rendezvous, DEADLINE_S)
    connection = GlooConnection(
        GlooDevice("127.0.0.1"),
        PrefixStore(name, meeting.store),
        0 if role == "sender" else 1,
        peer_index=1 if role == "sender" else 0,
        open_timeout_s=DEADLINE_S,
        deadline_s=deadline_s,
    )
    return (RingSender if role == "sender" else RingReceiver)(connection, num_slots, slot_bytes, device)


def serve_far_end(pipe: Connection, rendezvous: Rendezvous) -> None:
    """A process that opens ends and runs functions on them, until it is told None."""
    ends: list[End] = []
    while (order := pipe.recv()) is not None:
        function, args = order
        try:
            if function is open_gloo_end:
                ends.append(open_gloo_end(rendezvous, *args))
                pipe.send((True, len(ends) - 1))
            else:
                index, *rest = args
                pipe.send((True, function(ends[index], *rest)))
        except (RayppError, AssertionError) as error:
            pipe.send((False, error))
    for end in ends:
        end.close()


class FarProcess:
    """A spawned process that holds far ends, one after the other."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far_pipe = context.Pipe()
        self._process = context.Process(target=serve_far_end, args=(far_pipe, rendezvous), daemon=True)
        self._process.start()
        far_pipe.close()
        self._pool = ThreadPoolExecutor(1)

    def call(self, function: Callable[..., Any], *args: object) -> Future[Any]:
        return self._pool.submit(self._call, function, args)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        if self._process.is_alive():
            self._pool.submit(self._pipe.send, None)
            self._process.join(DEADLINE_S)
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._pool.shutdown()

    def _call(self, function: Callable[..., Any], args: tuple[object, ...]) -> Any:
        self._pipe.send((function, args))
        assert self._pipe.poll(2 * DEADLINE_S), f"{function.__name__} did not return"
        ok, value = self._pipe.recv()
        if not ok:
            raise value
        return value


class LocalEdges:
    """Edges inside this process; the far end is a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def open(
        self, near: Role = "sender", num_slots: int = 3, slot_bytes: int = 1 << 16, deadline_s: float = DEADLINE_S
    ) -> Edge:
        sender, receiver = self._open(num_slots, slot_bytes, deadline_s)
        end, far_end = (sender, receiver) if near == "sender" else (receiver, sender)
        return Edge(end, lambda function, *args: self._pool.submit(function, far_end, *args))

    def close(self) -> None:
        self._pool.shutdown()

    def _open(self, num_slots: int, slot_bytes: int, deadline_s: float) -> tuple[End, End]:
        return open_local_edge(num_slots, slot_bytes, deadline_s)


class SlicedEdges(LocalEdges):
    """Edges inside this process for slices, of a stage with one member."""

    def _open(self, num_slots: int, slot_bytes: int, deadline_s: float) -> tuple[End, End]:
        sender, receiver = super()._open(num_slots, slice_bytes(slot_bytes, 1), deadline_s)
        [member] = thread_members(1, deadline_s)
        return SliceSender(sender, member), SliceReceiver(receiver, member)


class GlooEdges:
    """Edges over gloo; the far end is a process."""

    device: torch.device | None = None

    def __init__(self) -> None:
        self._server = RendezvousServer()
        self._far = FarProcess(self._server.address)
        self._num_edges = 0

    @property
    def process(self) -> FarProcess:
        return self._far

    def open(
        self, near: Role = "sender", num_slots: int = 3, slot_bytes: int = 1 << 16, deadline_s: float = DEADLINE_S
    ) -> Edge:
        self._num_edges += 1
        settings = (num_slots, slot_bytes, deadline_s, self.device)
        name = f"edge {self._num_edges}"
        far_opened = self._far.call(open_gloo_end, name, "receiver" if near == "sender" else "sender", *settings)
        end = open_gloo_end(self._server.address, name, near, *settings)
        far_index = far_opened.result(DEADLINE_S)
        return Edge(end, lambda function, *args: self._far.call(function, far_index, *args))

    def close(self) -> None:
        self._far.close()
        self._server.close()


class DeviceCopyEdges(GlooEdges):
    """Edges whose messages are copied to a device and back; here the device is the CPU."""

    device = torch.device("cpu")


def sizes_of(num_steps: int, slot_bytes: int) -> list[int]:
    """Message sizes of a run, the same at both ends; the largest and the smallest possible are among them."""
    draw = random.Random(num_steps)
    return [1, slot_bytes, *(draw.randint(1, slot_bytes) for _ in range(num_steps - 2))]


def content_of(step_id: int, num_bytes: int) -> torch.Tensor:
    """What step `step_id` carries: no two steps nearby, and no two positions nearby, are alike."""
    return _PATTERN[:num_bytes] + step_id * 13 % 256


def send_steps(sender: End, sizes: list[int], first: int = 0, pause_s: float = 0.0) -> None:
    for step_id, num_bytes in enumerate(sizes, first):
        sender.acquire(step_id)[:num_bytes] = content_of(step_id, num_bytes)
        sender.send(step_id, num_bytes)
        time.sleep(pause_s)


def receive_steps(
    receiver: End, sizes: list[int], first: int = 0, pause_s: float = 0.0, posted_ahead: int = 1, late_s: float = 0.0
) -> int:
    """Receive and check the steps; return how many there were. `posted_ahead` may exceed the ring."""
    time.sleep(late_s)
    for step_id, num_bytes in enumerate(sizes[: posted_ahead - 1], first):
        receiver.post_recv(step_id, num_bytes)
    for step_id, num_bytes in enumerate(sizes, first):
        ahead = step_id - first + posted_ahead - 1
        if ahead < len(sizes):
            receiver.post_recv(first + ahead, sizes[ahead])
        assert torch.equal(receiver.wait(step_id)[:num_bytes], content_of(step_id, num_bytes)), f"step {step_id}"
        receiver.release(step_id)
        time.sleep(pause_s)
    return len(sizes)


def wait_for_nothing(receiver: End) -> None:
    receiver.post_recv(0, 8)
    receiver.wait(0)


def close_end(end: End) -> None:
    end.close()
