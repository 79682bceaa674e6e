"""Starts the grammar process when the first grammar comes, and again when it dies; talks to it."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Protocol

from raypp.grammar.board import Board, create_board_file
from raypp.grammar.grammar_messages import GrammarOrder, GrammarReply, GrammarSettings, Ready, decode, encode
from raypp.grammar.message_socket import MessageSocket

_START_TIMEOUT_S = 300  # seconds of imports, more where disk or machine are slow; who dies is noticed at once
_BUFFER_BYTES = 4 << 20
_MAX_UNSENT_BYTES = 64 << 20  # what waits for a process that reads nothing; more than all rows have to say in seconds
_END_TIMEOUT_S = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GrammarProcessDied:
    """Everything that it knew is lost."""

    computing: tuple[int, ...] = ()
    """The texts whose masks were being made."""


@dataclass(frozen=True)
class GrammarProcessNotStarted:
    """The process could not be started, and what was sent to it is lost."""

    reason: str


GrammarEvent = GrammarReply | GrammarProcessDied | GrammarProcessNotStarted


class GrammarBackend(Protocol):
    """Whoever follows grammars. Says `Ready` once before what it follows can be late."""

    @property
    def compile_timeout_s(self) -> float:
        """What it lets a constraint take, seconds."""

    def send(self, order: GrammarOrder) -> None:
        """Have something done. Does not wait for it, and raises nothing: `receive` tells what became of it."""

    def receive(self) -> list[GrammarEvent]:
        """Return what has been said since the last call."""

    def computing(self) -> list[tuple[int, float]]:
        """Return the texts whose masks are being made, and for how many seconds each has been so far.

        None of a process that a signal has stopped: that is no text's doing.
        """

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
        self._board: Board | None = None
        self._readable = select.epoll()  # holds the socket of whatever process there is
        self._is_ready = False  # whether the process reads
        self._awaits_room = False  # whether it is to be noticed when it reads on
        self._starts_until_s = 0.0
        self._is_useless = False  # so that `receive` says that it died
        self._not_started: GrammarProcessNotStarted | None = None
        self._ending: list[subprocess.Popen[bytes]] = []  # killed, and perhaps not gone yet

    @property
    def compile_timeout_s(self) -> float:
        """What a constraint may take, seconds."""
        return self._settings.compile_timeout_s

    @property
    def process_id(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def fileno(self) -> int | None:
        """Return the file descriptor to wait for."""
        return self._readable.fileno()

    def send(self, order: GrammarOrder) -> None:
        """Send an order; start the process if there is none. What it does not take yet waits here."""
        if self._socket is None:
            try:
                self._start()
            except OSError as error:
                self._not_started = GrammarProcessNotStarted(str(error))
        if self._socket is None or self._is_useless:
            return
        self._socket.put(encode(order))
        self._flush()
        if self._socket.num_unsent_bytes > _MAX_UNSENT_BYTES:
            self._give_up(f"the grammar process takes no orders; {_MAX_UNSENT_BYTES >> 20} MiB wait for it")

    def receive(self) -> list[GrammarEvent]:
        """Return what has come."""
        if self._not_started is not None:
            events, self._not_started = [self._not_started], None
            return [*events]
        messages = self._receive()
        if Ready() in messages:
            self._is_ready = True
        elif self._socket is not None and not self._is_ready and time.monotonic() > self._starts_until_s:
            self._give_up("the grammar process does not start")
        self._flush()
        return messages

    def computing(self) -> list[tuple[int, float]]:
        """Return what the process has noted, even if it answers nothing; of one that was stopped, nothing."""
        if self._board is None or (self._process is not None and _is_stopped(self._process)):
            return []
        return self._board.read()

    def restart(self) -> None:
        """End the process; the next order starts another one."""
        self._end_process()

    def close(self) -> None:
        """End the process, for good."""
        self._end_process()
        self._readable.close()
        for process in self._ending:
            with suppress(subprocess.TimeoutExpired):  # who is killed and does not go waits for a disk
                process.wait(_END_TIMEOUT_S)

    def _receive(self) -> list[GrammarEvent]:
        if self._socket is None:
            return []
        try:
            if not self._is_useless:
                return [decode(message) for message in self._socket.receive()]
        except (EOFError, OSError):
            pass
        died = GrammarProcessDied(tuple(number for number, _ in self.computing()))
        self._end_process()
        return [died]

    def _flush(self) -> None:
        if self._socket is None or not self._is_ready:
            return
        with suppress(OSError):  # it is gone, as `receive` will find
            self._socket.flush()
        if self._awaits_room != bool(self._socket.num_unsent_bytes):
            self._awaits_room = not self._awaits_room
            events = select.EPOLLIN | (select.EPOLLOUT if self._awaits_room else 0)
            self._readable.modify(self._socket, events)

    def _give_up(self, why: str) -> None:
        """End a process that is of no use; `receive` says that it died."""
        logger.warning(why)
        self._is_useless = True
        if self._process is not None:
            _kill(self._process)

    def _end_process(self) -> None:
        self._ending = [process for process in self._ending if process.poll() is None]
        if self._process is not None:
            _kill(self._process)
            self._ending.append(self._process)
        if self._socket is not None:
            self._readable.unregister(self._socket)
            self._socket.close()
        if self._board is not None:
            self._board.close()
        self._process = self._socket = self._board = None
        self._is_ready = self._is_useless = self._awaits_room = False

    def _start(self) -> None:
        """Start the process.

        Raises:
            OSError: there are no descriptors, no memory or no processes to be had.
        """
        with ExitStack() as opened:
            ours, theirs = socket.socketpair()
            opened.callback(theirs.close)
            on_failure = opened.enter_context(ExitStack())
            on_failure.callback(ours.close)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            board_descriptor = create_board_file()
            opened.callback(os.close, board_descriptor)
            board = Board(board_descriptor)
            on_failure.callback(board.close)
            descriptors = [theirs.fileno(), board_descriptor]
            settings = json.dumps(asdict(self._settings))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "raypp.grammar.process", *map(str, descriptors), settings],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                process_group=0,  # with those that it starts, so that one signal ends all of them
            )
            on_failure.pop_all()
        self._socket, self._board = MessageSocket(ours), board
        self._readable.register(self._socket, select.EPOLLIN)
        self._starts_until_s = time.monotonic() + _START_TIMEOUT_S


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a signal has stopped a child, which has not gone on since."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it started; does not wait for their end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
