"""The zmq sockets between driver and stages: plans and masks go out; results, heartbeats and errors come back.

    driver  PUSH (one per stage) --plan, masks, stop, alive--> PULL  stage
            PULL (one for all)   <--result, heartbeat, error-- PUSH

The driver binds, the stages connect. Every message is one zmq frame: a header of 8 bytes (kind, stage index), then the
payload, which stays 8-byte aligned so that `messages.unpack` can view it in place. Addresses are zmq's: `ipc://` on one
node, `tcp://` between nodes. All waits block in zmq, without the GIL. One thread uses a driver's end. A stage may send
from one thread and receive in another.

Between nodes the channel is encrypted (zmq's CURVE): the driver makes a key pair, and lets in only stages that bring
its public `server_key`. Ray carries the key to the stages alone, with their addresses.
"""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import zmq

from raypp.errors import DeadlineError, ResourceError, name_process
from raypp.messages import StageReport, pack, unpack
from raypp.zmq_sockets import close_with_owner

_HEADER = struct.Struct("<ii")
_HEARTBEAT = struct.Struct("<q")
_LINGER_MS = 500
_ASK_MS = 20  # how often a wait for room asks whether it is pointless
_ALL_STAGES = -1

logger = logging.getLogger(__name__)


class _Kind(IntEnum):
    PLAN = 0
    STOP = 1
    ALIVE = 2
    RESULT = 3
    HEARTBEAT = 4
    ERROR = 5
    MASKS = 6


@dataclass(frozen=True)
class Stop:
    """The driver tells a stage to end its loop."""


@dataclass(frozen=True)
class Masks:
    """The driver tells the last stage which tokens grammars allow."""

    payload: memoryview  # a packed MaskUpdate


@dataclass(frozen=True)
class StageResult:
    """The last stage's answer to a step."""

    stage_index: int
    payload: memoryview  # a packed StepResult


@dataclass(frozen=True)
class Heartbeat:
    """A stage is alive, and has finished this step."""

    stage_index: int
    step_id: int  # the last finished step, or NO_STEP
    report: StageReport | None = None  # when there is something to report


@dataclass(frozen=True)
class StageError:
    """A stage gave up."""

    stage_index: int
    description: dict[str, Any]  # whatever the stage had to say about it, JSON


StageMessage = StageResult | Heartbeat | StageError


class DriverChannel:
    """The driver's end.

    Args:
        stage_addresses: One per process of a stage, to bind; `tcp://host:*` takes a free port.
        result_address: To bind, likewise.
        num_members: Processes of each stage, which follow each other.
        send_timeout_s: How long a stage's queue may stay full. The queue holds more than all steps in flight, and a
            thread of the stage empties it while a step takes long, so a full one means a stage that is gone or frozen.
        encrypted: Let in only stages that bring `server_key`. Set it wherever others can reach an address.
        context: A zmq context to share; by default the channel has its own.

    Raises:
        ResourceError: an address cannot be bound.
    """

    def __init__(
        self,
        stage_addresses: Sequence[str],
        result_address: str,
        *,
        num_members: int = 1,
        send_timeout_s: float = 2.0,
        encrypted: bool = False,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        keys: tuple[bytes | None, bytes | None] = zmq.curve_keypair() if encrypted else (None, None)
        self.server_key, self._secret_key = keys
        """What a stage must bring to be let in; None: the channel is not encrypted."""
        own_context = zmq.Context() if context is None else None
        self._send_timeout_s = send_timeout_s
        self._num_members = num_members
        self._sockets: list[zmq.Socket[bytes]] = []
        self._plan_sockets: list[zmq.Socket[bytes]] = []
        self._close_sockets = close_with_owner(self, self._sockets, own_context)
        zmq_context = context or own_context
        assert zmq_context is not None
        queue_length = _queue_length(len(stage_addresses))
        try:
            for address in stage_addresses:
                self._plan_sockets.append(self._bind(zmq_context, zmq.PUSH, address, queue_length))
            self.socket = self._bind(zmq_context, zmq.PULL, result_address, queue_length)
            """On which the stages' messages arrive, for a poller."""
        except ResourceError:
            self.close()
            raise
        self.stage_addresses = [_address_of(socket) for socket in self._plan_sockets]
        """Where the stages connect: the bound addresses, with their ports."""
        self.result_address = _address_of(self.socket)
        """Where the stages send to, likewise."""

    def send_plan(self, plan: bytes, is_over: Callable[[], bool] = lambda: False) -> None:
        """Send a packed plan to every stage.

        Args:
            plan: It.
            is_over: Asked while a stage's queue is full: whether it need not be waited for any longer.

        Raises:
            DeadlineError: a stage does not take its messages; the others got theirs.
        """
        frame = _HEADER.pack(_Kind.PLAN, _ALL_STAGES) + plan
        # First all stages that have room, so that a slow one does not hold up the others.
        full = [index for index, socket in enumerate(self._plan_sockets) if not _offer(socket, frame)]
        if not full:
            return
        ends = time.monotonic() + self._send_timeout_s
        for index in full:
            if not _offer_until(self._plan_sockets[index], frame, ends, is_over):
                raise DeadlineError(
                    f"{name_process(index, self._num_members)[0]} does not take its plans",
                    got=f"a full queue for {self._send_timeout_s} s",
                    hint="the stage is gone or frozen, or its connection is lost",
                )

    def send_masks(self, masks: bytes) -> None:
        """Send a packed MaskUpdate to the last stage's first member. A full queue drops it: later ones replace it."""
        _offer(self._plan_sockets[-self._num_members], _HEADER.pack(_Kind.MASKS, _ALL_STAGES) + masks)

    def send_stop(self) -> None:
        """Tell every stage to stop. Does not wait: a stage whose queue is full has to be killed anyway."""
        for index, socket in enumerate(self._plan_sockets):
            if not _offer(socket, _HEADER.pack(_Kind.STOP, _ALL_STAGES)):
                name = name_process(index, self._num_members)[0]
                logger.info("%s could not be told to stop", name)  # most often it is what has died

    def send_heartbeat(self) -> None:
        """Tell every stage that the driver is alive, unless its queue is full."""
        for socket in self._plan_sockets:
            _offer(socket, _HEADER.pack(_Kind.ALIVE, _ALL_STAGES))

    def receive(self, timeout_s: float) -> list[StageMessage]:
        """Return all messages that are there; wait up to `timeout_s` for the first one."""
        messages = []
        frame = _take(self.socket, timeout_s)
        while frame is not None:
            messages.append(_decode_stage_message(frame))
            frame = _take(self.socket, 0.0)
        return messages

    def close(self) -> None:
        """Close the sockets; messages that were sent get half a second to leave."""
        addresses = [_address_of(socket) for socket in self._sockets if not socket.closed]
        self._close_sockets()
        for address in addresses:
            if address.startswith("ipc:///"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)  # zmq leaves it behind

    def _bind(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, queue_length: int
    ) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(queue_length)
        socket.linger = _LINGER_MS
        if self._secret_key is not None:
            socket.curve_server = True
            socket.curve_secretkey = self._secret_key
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ResourceError(
                "an address of the step channel cannot be bound",
                got=f"{address}: {error}",
                hint=f"ipc paths have at most {zmq.IPC_PATH_MAX_LEN} characters, in a directory that exists",
            ) from error
        return socket


class StageChannel:
    """A stage's end.

    Args:
        process_index: Which process of the stages this is.
        plan_address: Its entry of `DriverChannel.stage_addresses`.
        result_address: `DriverChannel.result_address`.
        num_stages: Processes of all stages; sizes the queues.
        num_members: Of each stage.
        server_key: `DriverChannel.server_key`.
        send_timeout_s: How long the driver may leave a result untaken.
    """

    def __init__(
        self,
        process_index: int,
        plan_address: str,
        result_address: str,
        *,
        num_stages: int = 64,
        num_members: int = 1,
        server_key: bytes | None = None,
        send_timeout_s: float = 60.0,
    ) -> None:
        self._process_index = process_index
        self._name = name_process(process_index, num_members)[0]
        self._send_timeout_s = send_timeout_s
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = context.socket(zmq.PULL)
        self._results = context.socket(zmq.PUSH)
        self._connections: dict[str, zmq.Socket[bytes]] = {}  # by address, what is readable once there is one
        sockets = [self._plans, self._results]
        self._close_sockets = close_with_owner(self, sockets, context)
        for socket, address in ((self._plans, plan_address), (self._results, result_address)):
            self._connections[address] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            sockets.append(self._connections[address])
            socket.set_hwm(_queue_length(num_stages))
            socket.linger = _LINGER_MS
            if server_key is not None:
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                socket.curve_serverkey = server_key
            socket.connect(address)
        self._last_heard_s = time.monotonic()

    def await_driver(self, timeout_s: float) -> None:
        """Wait until this end is connected: zmq does that in a thread of its own, and needs an ipc address's file.

        Args:
            timeout_s: How long the driver may take to let it in.

        Raises:
            DeadlineError: it does not.
        """
        ends = time.monotonic() + timeout_s
        for address, connection in self._connections.items():
            if not connection.poll(int(max(ends - time.monotonic(), 0.0) * 1000)):
                raise DeadlineError(
                    f"{self._name} cannot connect to the driver",
                    got=f"no connection to {address} within {timeout_s:.1f} s",
                    hint="the driver is gone or frozen, or its address cannot be reached from here",
                )
        for socket in (self._plans, self._results):
            socket.disable_monitor()

    @property
    def silence_s(self) -> float:
        """Seconds since the driver was last heard of, as of the last `receive`."""
        return time.monotonic() - self._last_heard_s

    def receive(self, timeout_s: float) -> memoryview | Masks | Stop | None:
        """Return the next packed plan, masks, or Stop; None when `timeout_s` pass without one."""
        ends = time.monotonic() + timeout_s
        frame = _take(self._plans, timeout_s)
        while frame is not None:
            self._last_heard_s = time.monotonic()
            kind, _ = _HEADER.unpack_from(frame)
            if kind == _Kind.PLAN:
                return memoryview(frame)[_HEADER.size :]
            if kind == _Kind.MASKS:
                return Masks(memoryview(frame)[_HEADER.size :])
            if kind == _Kind.STOP:
                return Stop()
            assert kind == _Kind.ALIVE, f"a message of kind {kind} came to a stage"
            frame = _take(self._plans, max(ends - time.monotonic(), 0.0))
        return None

    def send_result(self, result: bytes) -> None:
        """Send a packed result to the driver.

        Raises:
            DeadlineError: the driver does not take it.
        """
        self._send(_Kind.RESULT, result)

    def send_error(self, description: Mapping[str, Any]) -> None:
        """Tell the driver why this stage gives up. `description` must be JSON.

        Raises:
            DeadlineError: the driver does not take it.
        """
        self._send(_Kind.ERROR, json.dumps(description).encode())

    def send_heartbeat(self, step_id: int, report: StageReport | None = None) -> bool:
        """Tell the driver the last finished step; return whether the queue had room."""
        header = _HEADER.pack(_Kind.HEARTBEAT, self._process_index) + _HEARTBEAT.pack(step_id)
        return _offer(self._results, header if report is None else header + pack(report))

    def close(self, *, delivers: bool = True) -> None:
        """Close the sockets.

        Args:
            delivers: Whether messages that were sent get half a second to leave: where the driver is gone, or wants to
                hear nothing more, that is time lost.
        """
        if not delivers:
            for socket in (self._plans, self._results):
                if not socket.closed:
                    socket.linger = 0
        self._close_sockets()

    def _send(self, kind: _Kind, payload: bytes) -> None:
        frame = _HEADER.pack(kind, self._process_index) + payload
        if not _offer_until(self._results, frame, time.monotonic() + self._send_timeout_s):
            raise DeadlineError(
                f"the driver does not take the messages of {self._name}",
                got=f"a full queue for {self._send_timeout_s} s",
                hint="the driver is gone or frozen",
            )


def _queue_length(num_stages: int) -> int:
    # At most 4 * num_stages steps are in flight; and a margin for heartbeats.
    return 4 * num_stages + 16


def _address_of(socket: zmq.Socket[bytes]) -> str:
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def _offer(socket: zmq.Socket[bytes], frame: bytes) -> bool:
    """Send if there is room; return whether there was."""
    for _ in range(2):
        with suppress(zmq.Again):
            socket.send(frame, zmq.DONTWAIT)
            return True
        # zmq counts only now and then what the reader took, and may call an empty queue full; a poll makes it count.
        if not socket.poll(0, zmq.POLLOUT):
            break
    return False


def _offer_until(
    socket: zmq.Socket[bytes], frame: bytes, ends: float, is_over: Callable[[], bool] = lambda: False
) -> bool:
    """Send as soon as there is room; return whether there was, before `ends` on the monotonic clock, or it is over."""
    while not _offer(socket, frame):
        remaining_ms = int((ends - time.monotonic()) * 1000)
        if remaining_ms <= 0 or is_over():
            return False
        socket.poll(min(remaining_ms, _ASK_MS), zmq.POLLOUT)
    return True


def _take(socket: zmq.Socket[bytes], timeout_s: float) -> bytes | None:
    """Return the next frame; None when `timeout_s` pass without one."""
    with suppress(zmq.Again):
        return socket.recv(zmq.DONTWAIT)
    if timeout_s > 0 and socket.poll(max(int(timeout_s * 1000), 1)):
        return socket.recv(zmq.DONTWAIT)
    return None


def _decode_stage_message(frame: bytes) -> StageMessage:
    kind, stage_index = _HEADER.unpack_from(frame)
    payload = memoryview(frame)[_HEADER.size :]
    match kind:
        case _Kind.RESULT:
            return StageResult(stage_index, payload)
        case _Kind.HEARTBEAT:
            [step_id] = _HEARTBEAT.unpack_from(payload)
            report = payload[_HEARTBEAT.size :]
            return Heartbeat(stage_index, step_id, unpack(StageReport, report) if len(report) else None)
        case _Kind.ERROR:
            return StageError(stage_index, json.loads(bytes(payload)))
    raise AssertionError(f"a message of kind {kind} came to the driver")
