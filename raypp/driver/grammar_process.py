"""The driver's end of the grammar process: started when the first grammar comes, and again when it dies."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Protocol

from raypp.grammar.messages import GrammarOrder, GrammarReply, decode, encode

_SEND_TIMEOUT_S = 5
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

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, when there is something to receive."""

    def restart(self) -> None:
        """Forget everything; nothing that was said before will be received."""

    def close(self) -> None:
        """End it."""


class GrammarProcess:
    """A `GrammarBackend` in a process of its own. One thread's."""

    def __init__(self, settings: GrammarSettings) -> None:
        self._settings = settings
        self._wake: Callable[[], None] = lambda: None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._replies: SimpleQueue[GrammarReply | GrammarProcessDied] = SimpleQueue()

    @property
    def process_id(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, when there is something to receive."""
        self._wake = wake

    def send(self, order: GrammarOrder) -> None:
        """Send an order; start the process if there is none."""
        if self._connection is None:
            self._connection = self._start()
        try:
            self._connection.send_bytes(encode(order))
        except OSError as error:  # it died, which its reader tells, or takes nothing any more
            logger.warning("the grammar process takes no orders: %s", error)
            if self._process is not None:
                self._process.kill()

    def receive(self) -> list[GrammarReply | GrammarProcessDied]:
        """Return what has come."""
        replies: list[GrammarReply | GrammarProcessDied] = []
        while True:
            try:
                replies.append(self._replies.get_nowait())
            except Empty:
                return replies

    def restart(self) -> None:
        """End the process; the next order starts another one."""
        self.close()
        self._replies = SimpleQueue()

    def close(self) -> None:
        """End the process."""
        if self._process is None or self._connection is None:
            return
        self._process.kill()
        self._process.wait()
        if self._reader is not None:  # nobody may close what another one reads: its number may soon be another file's
            with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)  # a compiler that still runs may hold the other end
            self._reader.join()
        self._connection.close()
        self._process = self._connection = None

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        file_descriptor = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "raypp.grammar.process", str(file_descriptor), json.dumps(asdict(self._settings))],
            pass_fds=[file_descriptor],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        connection = Connection(ours.detach())
        self._reader = threading.Thread(
            target=self._read, args=(connection, self._replies), name="grammar-reader", daemon=True
        )
        self._reader.start()
        return connection

    def _read(self, connection: Connection, replies: SimpleQueue[GrammarReply | GrammarProcessDied]) -> None:
        try:
            while True:
                replies.put(decode(connection.recv_bytes()))
                self._wake()
        except (EOFError, OSError):
            replies.put(GrammarProcessDied())
            self._wake()
