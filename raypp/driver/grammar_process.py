"""The driver's end of the grammar process: started when the first grammar comes, and again when it dies."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from raypp.errors import DeadlineError
from raypp.grammar.message_socket import MessageSocket
from raypp.grammar.messages import GrammarOrder, GrammarReply, Ready, decode, encode

_SEND_TIMEOUT_S = 5
_START_TIMEOUT_S = 300  # seconds of imports, more where disk or machine are slow; who dies is noticed at once
_BUFFER_BYTES = 4 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GrammarSettings:
    """What the grammar process is told."""

    model_path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    compile_timeout_s: float


@dataclass(frozen=True)
class GrammarProcessDied:
    """Everything that it knew is lost."""


class GrammarBackend(Protocol):
    """Whoever follows grammars."""

    def send(self, order: GrammarOrder) -> None:
        """Have something done. Does not wait for it."""

    def receive(self) -> list[GrammarReply | GrammarProcessDied]:
        """Return what has been said since the last call."""

    def fileno(self) -> int | None:
        """Return what a poller finds readable when there is something to receive, the same all the time; or None."""

    def restart(self) -> None:
        """Forget everything; nothing that was said before will be received."""

    def close(self) -> None:
        """End it."""


class GrammarProcess:
    """A `GrammarBackend` in a process of its own. One thread's."""

    def __init__(self, settings: GrammarSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: MessageSocket | None = None
        self._readable = select.epoll()  # holds the socket of whatever process there is
        self._early_orders: list[bytes] | None = None  # while the process does not read yet
        self._starts_until_s = 0.0

    @property
    def process_id(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def fileno(self) -> int | None:
        """Return the file descriptor to wait for."""
        return self._readable.fileno()

    def send(self, order: GrammarOrder) -> None:
        """Send an order; start the process if there is none. What comes before the process reads waits here."""
        if self._socket is None:
            self._start()
        message = encode(order)
        if self._early_orders is not None:
            self._early_orders.append(message)
        else:
            self._transmit(message)

    def receive(self) -> list[GrammarReply | GrammarProcessDied]:
        """Return what has come."""
        messages = self._receive()
        if Ready() in messages:
            messages.remove(Ready())
            early, self._early_orders = self._early_orders or [], None
            for message in early:
                if not self._transmit(message):
                    break
            messages += self._receive()
        elif self._early_orders is not None and time.monotonic() > self._starts_until_s:
            self._kill("the grammar process does not start")
        return messages

    def restart(self) -> None:
        """End the process; the next order starts another one."""
        self._end_process()

    def close(self) -> None:
        """End the process, for good."""
        self._end_process()
        self._readable.close()

    def _receive(self) -> list[Any]:
        if self._socket is None:
            return []
        try:
            return [decode(message) for message in self._socket.receive()]
        except (EOFError, OSError):
            self._end_process()
            return [GrammarProcessDied()]

    def _transmit(self, message: bytes) -> bool:
        """Send a message; return whether the process is still of use."""
        assert self._socket is not None
        try:
            self._socket.send(message, _SEND_TIMEOUT_S)
        except (OSError, DeadlineError) as error:  # it died, which `receive` tells, or takes nothing any more
            self._kill(f"the grammar process takes no orders: {error}")
            return False
        return True

    def _kill(self, why: str) -> None:
        """End a process that is of no use; `receive` finds it dead."""
        logger.warning(why)
        if self._process is not None:
            self._process.kill()

    def _end_process(self) -> None:
        if self._process is None or self._socket is None:
            return
        self._process.kill()
        self._process.wait()
        self._readable.unregister(self._socket)
        self._socket.close()
        self._process = self._socket = self._early_orders = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        file_descriptor = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "raypp.grammar.process", str(file_descriptor), json.dumps(asdict(self._settings))],
            pass_fds=[file_descriptor],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._early_orders, self._starts_until_s = [], time.monotonic() + _START_TIMEOUT_S
        self._socket = MessageSocket(ours)
        self._readable.register(self._socket, select.EPOLLIN)
