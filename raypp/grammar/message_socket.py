"""Whole messages over a stream socket: a length, then the bytes. Driver, grammar process and nursery talk by it.

A step brings one message each way between the first two. So a message costs one call of the system at either end, no
thread, and nothing that is made anew; whoever waits does so for the socket together with everything else.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque

from raypp.errors import DeadlineError

_LENGTH = struct.Struct("<q")
_BUFFER_BYTES = 1 << 18


class MessageSocket:
    """One end. One thread's, but for `send`, which callers may guard by a lock of theirs."""

    def __init__(self, end: socket.socket) -> None:
        """Take a connected stream socket over."""
        self._socket = end
        end.setblocking(False)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._num_bytes = 0  # of the buffer, that were received
        self._messages: list[bytes] = []
        self._unsent: deque[memoryview] = deque()
        self.num_unsent_bytes = 0
        """Of what was put in and not sent."""

    def fileno(self) -> int:
        """Return the file descriptor; readable when there is something to `receive`, or when the other end is gone."""
        return self._socket.fileno()

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        """Send a message.

        With a timeout, what the other end says is taken in while it takes nothing, so that two full ends never wait for
        each other. The next `receive` returns that; until then, nothing makes the socket readable for it.

        Args:
            message: Whole.
            timeout_s: How long the other end may take nothing; None: for ever.

        Raises:
            OSError: the other end is gone.
            DeadlineError: it takes nothing any more. The socket is of no use then.
        """
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while len(rest):
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._await_room(timeout_s)

    def put(self, message: bytes) -> None:
        """Have a message sent by `flush`. An end that puts messages in does not also `send`."""
        self._unsent.append(memoryview(_LENGTH.pack(len(message)) + message))
        self.num_unsent_bytes += _LENGTH.size + len(message)

    def flush(self) -> None:
        """Send as much of what was put in as the other end takes now. Does not wait.

        Raises:
            OSError: the other end is gone.
        """
        while self._unsent:
            try:
                num_sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            self.num_unsent_bytes -= num_sent
            if num_sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][num_sent:]

    def receive(self) -> list[bytes]:
        """Return the messages that have come whole. Does not wait.

        Raises:
            EOFError: the other end is gone, and everything that it said was returned.
            OSError: likewise, it left in the middle.
        """
        is_open = self._take_in()
        messages, self._messages = self._messages, []
        if not is_open and not messages:
            raise EOFError
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _await_room(self, timeout_s: float | None) -> None:
        """Wait until something can be sent; see `send`. Without a timeout another thread may be receiving."""
        takes_in = timeout_s is not None
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT | (select.POLLIN if takes_in else 0))
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if ends_s is None else ends_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise DeadlineError("the other end takes no messages", got=f"none within {timeout_s:g} s")
            for _, events in poller.poll(None if left_s is None else left_s * 1e3):
                if events & ~select.POLLIN:
                    return  # there is room, or an error for `send` to find
                if not self._take_in():
                    raise BrokenPipeError("the other end is gone")

    def _take_in(self) -> bool:
        """Receive what is there; return whether the other end is."""
        while True:
            view = memoryview(self._buffer)
            try:
                num_new = self._socket.recv_into(view[self._num_bytes :])
            except BlockingIOError:
                return True
            finally:
                view.release()
            if not num_new:
                return False
            self._num_bytes += num_new
            is_full = self._num_bytes == len(self._buffer)
            self._split()
            if not is_full:
                return True

    def _split(self) -> None:
        """Move whole messages out of the buffer; have room in it for the one that is not."""
        start, end = 0, self._num_bytes
        needed = _LENGTH.size
        while end - start >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(self._buffer, start)
            needed = _LENGTH.size + length
            if end - start < needed:
                break
            self._messages.append(bytes(memoryview(self._buffer)[start + _LENGTH.size : start + needed]))
            start, needed = start + needed, _LENGTH.size
        if start:
            self._buffer[: end - start] = self._buffer[start:end]
        self._num_bytes = end - start
        if needed > len(self._buffer):
            self._buffer.extend(bytes(needed - len(self._buffer)))
