"""The GPU memory that one stage shares with its neighbours for its `ipc` edges: one allocation with flags and slots.

    | flag of end 0 | flag of end 1 | ... | slots of the first receiving edge | slots of the second | ...

The flag of a receiving end holds what was published to it, that of a sending end what was released to it. Neighbours
know the layout from the edges alone, so they exchange only a handle and an address.

Memory is freed only after all neighbours have unmapped it, see `UnmapBarrier`. A stage that was killed needs to send
nothing: its socket ends with it. Sockets are in Linux's abstract namespace, so no file is left over; but other users of
the machine see the names, and may connect. So both ends check whose process the other is.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from raypp.errors import DeadlineError
from raypp.transport.edges import Edge, EdgeEnds, after_last, edges_at
from raypp.transport.ipc.cuda_device import CudaDevice
from raypp.transport.ipc.ipc_ends import INITIAL_VALUE, FlagForcer, IpcEdgeMemory, IpcReceiver, IpcSender
from raypp.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)

_FLAG_STRIDE = 128  # each flag has a cache line of its own: polling it does not slow writes of another
_SLOT_ALIGNMENT = 512
_CLOSE_TIMEOUT_S = 5.0
_STAGE_INDEX = struct.Struct("<i")
_CREDENTIALS = struct.Struct("3i")  # pid, user, group: `ucred` of Linux


@dataclass(frozen=True)
class RegionLayout:
    """Where things lie in a stage's region: offsets in bytes, by edge name."""

    flags: dict[str, int]
    slots: dict[str, int]  # receiving edges only
    slot_stride: dict[str, int]
    num_bytes: int

    @classmethod
    def of(cls, stage_index: int, edges: Sequence[Edge]) -> RegionLayout:
        """Return the layout of a stage's region. `edges` are all `ipc` edges of the pipeline, in their order."""
        own = edges_at(stage_index, edges)
        flags = {edge.name: index * _FLAG_STRIDE for index, edge in enumerate(own)}
        slots: dict[str, int] = {}
        strides: dict[str, int] = {}
        offset = _round_up(len(own) * _FLAG_STRIDE)
        for edge in own:
            if edge.receiver == stage_index:
                slots[edge.name], strides[edge.name] = offset, _round_up(edge.slot_bytes)
                offset += edge.num_slots * strides[edge.name]
        return cls(flags, slots, strides, offset)


class IpcRegion:
    """A stage's own region, and its neighbours' regions as this process sees them.

    Args:
        device: Of this stage.
        stage_index: Of this stage.
        edges: All `ipc` edges of the pipeline.
        meeting: Where the stages meet; the constructor waits for the neighbours.

    Raises:
        DeadlineError: a neighbour did not come.
        ResourceError: there is not enough memory, or it cannot be shared.
    """

    def __init__(self, device: CudaDevice, stage_index: int, edges: Sequence[Edge], meeting: Meeting) -> None:
        self._device = device
        self._stage_index = stage_index
        self._edges = list(edges)
        self._own_edges = edges_at(stage_index, edges)
        self._forcer = FlagForcer(device)
        self._barrier = UnmapBarrier(stage_index)
        self._mapped: dict[int, int] = {}  # stage index -> base address
        self._is_closed = False
        self._layout = RegionLayout.of(stage_index, edges)
        self._base = device.allocate(self._layout.num_bytes)
        try:
            self._clear()
            self._meet(meeting)
        except BaseException:
            self.close(0.1)
            raise

    def ends(self) -> EdgeEnds:
        """Return the ends of this stage's edges. The region closes with the last of them."""
        ends, on_close = EdgeEnds(), after_last(len(self._own_edges), self.close)
        for edge in self._own_edges:
            memory = self._memory_of(edge)
            if edge.sender == self._stage_index:
                ends.senders[edge.name] = IpcSender(self._device, memory, self._forcer, on_close)
            else:
                ends.receivers[edge.name] = IpcReceiver(self._device, memory, self._forcer, on_close)
        return ends

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Unmap the neighbours' memory, and free this stage's once they have unmapped it.

        Memory that a stream or a neighbour may still use after `timeout_s` stays until the process ends.
        """
        if self._is_closed:
            return
        self._is_closed = True
        ends = time.monotonic() + timeout_s
        is_idle = self._device.drain(timeout_s) and self._forcer.stop(max(ends - time.monotonic(), 0.1))
        if is_idle:
            self._barrier.give_back(self._device, self._mapped.values(), self._base, ends)
        else:
            logger.warning("stage %d closes its links with work in flight; their memory stays", self._stage_index)
            self._barrier.close()

    def _clear(self) -> None:
        memory = self._device.tensor(self._base, self._layout.num_bytes)
        memory.zero_()
        flags = memory[: len(self._own_edges) * _FLAG_STRIDE].view(torch.int32)
        flags.fill_(INITIAL_VALUE - (1 << 32))  # signed
        self._device.settle()

    def _meet(self, meeting: Meeting) -> None:
        about = {"handle": self._device.export(self._base).hex(), "address": self._barrier.address}
        meeting.tell(f"ipc {self._stage_index}", json.dumps(about))
        neighbours = sorted({edge.peer_of(self._stage_index) for edge in self._own_edges})
        theirs = {peer: json.loads(meeting.ask(f"ipc {peer}", peer)) for peer in neighbours}
        self._barrier.connect({peer: theirs[peer]["address"] for peer in neighbours}, meeting.remaining_s)
        for peer in neighbours:
            self._mapped[peer] = self._device.map(bytes.fromhex(theirs[peer]["handle"]))

    def _memory_of(self, edge: Edge) -> IpcEdgeMemory:
        bases = {**self._mapped, self._stage_index: self._base}
        sender = RegionLayout.of(edge.sender, self._edges)
        receiver = RegionLayout.of(edge.receiver, self._edges)
        first = bases[edge.receiver] + receiver.slots[edge.name]
        stride = receiver.slot_stride[edge.name]
        return IpcEdgeMemory(
            slots=self._device.tensor(first, edge.num_slots * stride).view(-1, stride)[:, : edge.slot_bytes],
            published=bases[edge.receiver] + receiver.flags[edge.name],
            released=bases[edge.sender] + sender.flags[edge.name],
        )


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


class UnmapBarrier:
    """One process's sockets to others, one each.

    Args:
        index: Of this one, among those that meet.
        noun: What they are: for errors.
    """

    def __init__(self, index: int, noun: str = "stage") -> None:
        self._index = index
        self._noun = noun
        self._sockets: dict[int, socket.socket] = {}
        self.address = f"raypp-{secrets.token_hex(16)}"
        """Where neighbours of a higher index connect to."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(64)

    def connect(self, addresses: Mapping[int, str], timeout_s: float) -> None:
        """Connect to all neighbours.

        Args:
            addresses: Of the neighbours, by stage index.
            timeout_s: How long they may take to come.

        Raises:
            DeadlineError: one did not come, or cannot be reached.
        """
        ends = time.monotonic() + timeout_s
        for peer, address in addresses.items():
            if peer < self._index:
                self._sockets[peer] = self._connect_to(peer, address, timeout_s)
        awaited = {peer for peer in addresses if peer > self._index}
        while awaited:
            self._listener.settimeout(max(ends - time.monotonic(), 0.001))
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(max(ends - time.monotonic(), 0.001))
                received = b""
                if _user_of(connection) == os.geteuid():
                    received = connection.recv(_STAGE_INDEX.size, socket.MSG_WAITALL)
            except OSError as error:
                raise DeadlineError(
                    f"{self._noun} {min(awaited)} did not connect",
                    got=str(error),
                    expected=f"a connection in {timeout_s} s",
                ) from error
            newcomer = _STAGE_INDEX.unpack(received)[0] if len(received) == _STAGE_INDEX.size else None
            if newcomer in awaited:
                awaited.remove(newcomer)
                self._sockets[newcomer] = connection
            else:
                connection.close()
        self._listener.close()

    def arrive(self) -> None:
        """Tell all neighbours that this stage has unmapped their memory."""
        for connection in self._sockets.values():
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                continue  # it is gone

    def wait(self, timeout_s: float) -> list[int]:
        """Wait until all neighbours have arrived or are gone; return the stages that took longer than `timeout_s`."""
        ends = time.monotonic() + timeout_s
        missing = []
        for peer, connection in self._sockets.items():
            connection.settimeout(max(ends - time.monotonic(), 0.001))
            try:
                connection.recv(1)
            except TimeoutError:
                missing.append(peer)
            except OSError:
                continue  # it is gone
        return missing

    def give_back(self, device: CudaDevice, mapped: Iterable[int], base: int, ends: float) -> None:
        """Unmap the others' memory, free this one's once they have unmapped it, and close the sockets.

        Args:
            device: Of this process, done with all of it.
            mapped: Addresses of the others' memory.
            base: Of this one's.
            ends: When to wait no longer, by `time.monotonic`; the memory stays then.
        """
        for address in mapped:
            device.unmap(address)
        self.arrive()
        missing = self.wait(max(ends - time.monotonic(), 0.1))
        if missing:
            logger.warning("%ss %s still use the link memory of %s %d", self._noun, missing, self._noun, self._index)
        else:
            device.free(base)
        self.close()

    def close(self) -> None:
        """Close the sockets."""
        for connection in [self._listener, *self._sockets.values()]:
            connection.close()

    def _connect_to(self, peer: int, address: str, timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(f"\0{address}")
            if (user := _user_of(connection)) != os.geteuid():
                raise PermissionError(f"its socket is of user {user}, this process of user {os.geteuid()}")
            connection.sendall(_STAGE_INDEX.pack(self._index))
        except OSError as error:
            connection.close()
            raise DeadlineError(
                f"{self._noun} {peer} cannot be reached",
                got=str(error),
                hint="ipc links need stages in one network namespace of one node; transport=nccl does not",
            ) from error
        return connection


def _user_of(connection: socket.socket) -> int:
    """Return the id of the user whose process is at the other end."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
