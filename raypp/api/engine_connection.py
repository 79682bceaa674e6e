"""A client's connection to an engine that may die and be started again: a socket for each of its lives.

    connected --a part died--> waiting --it runs again--> connected
        |                         |
        +------ it died for good, or the client closes ------> ended

A client hears of a death in up to three ways: from the driver, from the engine's handle, and by silence. What it
finds out itself it reports to the handle, which alone decides whether the engine is started again.

The driver's last message says what was in a step, and the handle may be quicker. So while a client waits, the old
socket is still read: to that message, or until the engine runs again. A connection is to one engine: the old one is
closed before a new one is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Protocol

import zmq

from raypp.api.launch import EngineHandle
from raypp.client_messages import (
    ClientMessage,
    CloseClient,
    DriverMessage,
    EngineDead,
    OpenClient,
    decode_driver_message,
    encode_client_message,
)
from raypp.config.sections import FaultsSection
from raypp.errors import EngineDeadError, RayppError
from raypp.zmq_sockets import close_with_owner

_LINGER_MS = 200
"""How long closing may take to get the last message out, when the driver does not take it."""


class EngineClient:
    """A DEALER socket that is read when the event loop says so.

    zmq's own asyncio socket makes futures and tasks for every message; this one costs a callback per wake-up. The
    socket's file descriptor is edge-triggered and any use of the socket may swallow the edge: so every read goes on
    until nothing is left, and every send is followed by one.
    """

    def __init__(self, address: str, on_message: Callable[[DriverMessage], None]) -> None:
        """Connect. Must be called in the event loop that it shall live on.

        Args:
            address: zmq address of the driver's ROUTER socket.
            on_message: Called in the loop with everything that the driver sends.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = context.socket(zmq.DEALER)
        self._close_socket = close_with_owner(self, [self._socket], context)
        self._socket.set_hwm(0)  # neither end may drop a message, and a send must not block the loop
        self._socket.linger = _LINGER_MS
        self._socket.connect(address)
        self._fd: int = self._socket.FD
        self._is_open = True
        self._was_heard = False
        self._loop.add_reader(self._fd, self._read)
        self.send(OpenClient())

    def send(self, message: ClientMessage) -> None:
        """Send a message; does not wait."""
        frames = encode_client_message(message)
        self._socket.send_multipart(frames, copy=all(isinstance(frame, bytes) for frame in frames))
        if not self._loop.is_closed():
            self._loop.call_soon(self._read)

    def was_heard(self) -> bool:
        """Take in what has come; return whether anything has, since the last call."""
        self._read()
        was_heard, self._was_heard = self._was_heard, False
        return was_heard

    def close(self, *, delivers: bool = True) -> None:
        """Disconnect. In the event loop, or when that has ended.

        Args:
            delivers: Whether what was sent last gets a moment to arrive; without a driver that is of no use.
        """
        if self._is_open:
            self._is_open = False
            if not delivers:
                self._socket.linger = 0
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            self._close_socket()

    def _read(self) -> None:
        while self._is_open:  # the message that was just handled may have closed it
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._was_heard = True
            self._on_message(decode_driver_message(frames))


class ConnectionUser(Protocol):
    """What is called with what the connection brings, in its event loop."""

    def on_message(self, message: DriverMessage) -> None:
        """Take in what the driver sends, but for the message that it dies; some may follow `on_lost`."""

    def on_lost(self, error: RayppError | None) -> None:
        """Take in that the engine died; nothing can be sent. It may come back, or `on_dead` follows.

        Args:
            error: What it died of; None: it is replaced on purpose, or that is not known.
        """

    def on_back(self, in_flight: Collection[int] | None, *, is_explained: bool) -> None:
        """Take in that the engine runs again, knowing nothing of what it was asked for before.

        Args:
            in_flight: The handles that were in a step when the last one died; None if that is not known.
            is_explained: Whether it is known that it died of no request.
        """

    def on_dead(self, error: RayppError) -> None:
        """Take in that the engine died for good."""


class EngineConnection:
    """Sends and receives while the engine lives. An `EngineWatcher`, and otherwise for one event loop."""

    def __init__(self, handle: EngineHandle, faults: FaultsSection, user: ConnectionUser) -> None:
        """Connect. Must be called in the event loop that it shall live on.

        Args:
            handle: Of the engine.
            faults: How long what may take.
            user: Its methods are called with all that comes.
        """
        self._loop = asyncio.get_running_loop()
        self._handle = handle
        self._faults = faults
        self._user = user
        self._has_ended = False
        self._address = ""
        self._client: EngineClient | None = None
        self._is_lost = False  # whether it is only read from now on
        self._in_flight: Collection[int] | None = None
        self._num_silent_turns = 0
        self._watchdog: asyncio.TimerHandle | None = None
        handle.watch(self)
        self._connect(handle.client_address)

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        return self._client is not None and not self._is_lost

    def send(self, message: ClientMessage) -> None:
        """Send a message; does not wait. Only while it is open."""
        assert self._client is not None, "the engine is not there"
        assert not self._is_lost, "the engine is not there"
        self._client.send(message)

    def close(self) -> None:
        """Leave."""
        self._has_ended = True
        if self._client is not None and not self._is_lost:
            self._client.send(CloseClient())
        self._disconnect(delivers=not self._is_lost)  # a dead driver takes nothing

    def engine_lost(self, error: RayppError | None) -> None:
        """Take in, in any thread, that a part of the engine died, or None did, and that it is being started again."""
        self._call(lambda: self._hear_of_loss(error))

    def engine_back(self, client_address: str, *, is_explained: bool) -> None:
        """Take in, in any thread, that the engine runs again, at this address."""
        self._call(lambda: self._return_to(client_address, is_explained=is_explained))

    def engine_dead(self, error: RayppError) -> None:
        """Take in, in any thread, that the engine died for good."""
        self._call(lambda: self._end(error))

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it all that could use this
            self._loop.call_soon_threadsafe(function)

    def _connect(self, address: str) -> None:
        self._address = address
        self._client, self._is_lost = EngineClient(address, self._on_message), False
        self._num_silent_turns = 0
        self._watchdog = self._loop.call_later(self._faults.heartbeat_s, self._check_silence)

    def _disconnect(self, *, delivers: bool = False) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        client, self._client = self._client, None
        if client is not None:
            client.close(delivers=delivers)

    def _on_message(self, message: DriverMessage) -> None:
        if isinstance(message, EngineDead):
            self._in_flight = message.in_flight
            self._disconnect()
            self._lose(message.error)
            self._handle.report_death(message.error, self._address)
        else:
            self._user.on_message(message)

    def _hear_of_loss(self, error: RayppError | None) -> None:
        if self._client is not None:
            self._client.was_heard()  # what came before the end
            self._lose(error)

    def _lose(self, error: RayppError | None) -> None:
        """Send nothing any more, and tell of the loss, once."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        if not self._is_lost:
            self._is_lost = True
            if not self._has_ended:
                self._user.on_lost(error)

    def _return_to(self, address: str, *, is_explained: bool) -> None:
        if self._has_ended or (self.is_open and address == self._address):
            return  # it was connected to when it was back already
        self._hear_of_loss(None)
        self._disconnect()
        in_flight, self._in_flight = self._in_flight, None
        self._connect(address)
        self._user.on_back(in_flight, is_explained=is_explained)

    def _end(self, error: RayppError) -> None:
        if self._client is not None:
            self._client.was_heard()  # what came before the end
        if not self._has_ended:
            self._has_ended = True
            self._disconnect()
            self._user.on_dead(error)

    def _check_silence(self) -> None:
        """Give up on a driver that is there and says nothing: it is stopped, or hangs.

        Silence is counted in turns of this loop: while the loop itself stood still, nothing could be heard.
        """
        if self._client is None:
            return
        was_heard = self._client.was_heard()
        if not self.is_open:
            return  # what was heard was its end, or had the user close this
        faults = self._faults
        self._num_silent_turns = 0 if was_heard else self._num_silent_turns + 1
        silent_s = self._num_silent_turns * faults.heartbeat_s
        if silent_s > faults.silence_timeout_s:
            error = EngineDeadError(
                "the driver is frozen: nothing has been heard of it",
                got=f"no message for {silent_s:.1f} s",
                expected=f"a heartbeat within {faults.silence_timeout_s:g} s",
                hint="its process is stopped or starved",
                silent_s=silent_s,
            )
            self._lose(error)
            self._handle.report_death(error, self._address)
        else:
            self._watchdog = self._loop.call_later(faults.heartbeat_s, self._check_silence)
