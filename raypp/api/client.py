"""The connection between a client and the driver: messages out, messages in, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from raypp.client_messages import ClientMessage, DriverMessage, OpenClient, decode_driver_message, encode_client_message
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
            delivers: Whether what was sent last gets a moment to arrive; there is no use in it if nobody is there.
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
