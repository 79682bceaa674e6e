"""Compiling under guard: every constraint in a process of its own, which is given so much time and so much memory.

    grammar process  <--socket-->  nursery, one thread, xgrammar loaded  --fork-->  one compiler per constraint

A schema can be made to compile for hours, to take all memory, or to overflow a stack. A process can be ended then, and
nobody else notices; a thread could not. The nursery is forked before the grammar process has threads, so that its own
forks are of a quiet process; they cost some milliseconds, since xgrammar and the vocabulary are there already.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import NoReturn

from raypp.client_messages import error_from_dict, error_to_dict
from raypp.errors import RayppError, RequestError
from raypp.grammar.compile import compile_constraint, kind_and_value, refused
from raypp.grammar.message_socket import MessageSocket
from raypp.grammar.vocabulary import Vocabulary

MAX_COMPILERS = 4
_MAX_MEMORY_BYTES = 2 << 30  # that a compiler may take beyond what it begins with
_NICENESS = 10  # who compiles steps aside for who serves
_SUBMIT_TIMEOUT_S = 60.0  # that the nursery may take nothing; it only ever forks, and passes on


@dataclass(frozen=True)
class Outcome:
    """What became of a constraint."""

    source: str
    result: bytes | RayppError  # what `compiled.read_grammar` takes, or why there is none


@dataclass(frozen=True, slots=True)
class _Running:
    source: str
    process_id: int
    ends_s: float


class CompilerNursery:
    """The grammar process's end. One thread's."""

    def __init__(self, vocabulary: Vocabulary, timeout_s: float) -> None:
        """Fork the nursery; nobody may have started a thread.

        Args:
            vocabulary: Of the model.
            timeout_s: What a constraint may take, seconds.
        """
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            _run_nursery(MessageSocket(theirs), vocabulary, timeout_s)
        theirs.close()
        self._socket = MessageSocket(ours)

    def fileno(self) -> int:
        """Return the file descriptor; readable when something was compiled that no `submit` has taken in."""
        return self._socket.fileno()

    def submit(self, source: str) -> None:
        """Compile a constraint. What is done meanwhile is taken in, for `receive`: neither end waits for the other.

        Raises:
            OSError: the nursery is gone.
            DeadlineError: it takes nothing any more.
        """
        self._socket.send(source.encode(), _SUBMIT_TIMEOUT_S)

    def receive(self) -> list[Outcome]:
        """Return what is done. Does not wait.

        Raises:
            EOFError: the nursery is gone.
        """
        return [_outcome(message) for message in self._socket.receive()]


def _outcome(message: bytes) -> Outcome:
    head, _, rest = message.partition(b"\n")
    source, error = json.loads(head)
    return Outcome(source, rest if error is None else error_from_dict(error))


def _run_nursery(orders: MessageSocket, vocabulary: Vocabulary, timeout_s: float) -> NoReturn:
    """Fork a compiler per order, few at a time; end with the grammar process."""
    running: dict[Connection, _Running] = {}
    waiting: deque[str] = deque()
    try:
        while True:
            next_end_s = min((job.ends_s for job in running.values()), default=None)
            timeout = None if next_end_s is None else max(next_end_s - time.monotonic(), 0.0)
            ready = wait([orders.fileno(), *running], timeout)
            if orders.fileno() in ready:
                waiting.extend(order.decode() for order in orders.receive())
            for connection in [c for c in running if c in ready]:
                _collect(orders, connection, running.pop(connection))
            for connection, job in list(running.items()):
                if time.monotonic() >= job.ends_s:
                    os.kill(job.process_id, signal.SIGKILL)
                    os.waitpid(job.process_id, 0)
                    connection.close()
                    del running[connection]
                    _answer(orders, job.source, _too_long(job.source, timeout_s))
            while waiting and len(running) < MAX_COMPILERS:
                source = waiting.popleft()
                connection, job = _fork_compiler(source, vocabulary, timeout_s)
                running[connection] = job
    except (EOFError, OSError):
        for job in running.values():
            os.kill(job.process_id, signal.SIGKILL)
    finally:
        os._exit(0)


def _fork_compiler(source: str, vocabulary: Vocabulary, timeout_s: float) -> tuple[Connection, _Running]:
    ours, theirs = Pipe(duplex=False)
    process_id = os.fork()
    if process_id == 0:
        status = 1
        try:
            _limit(timeout_s)
            theirs.send_bytes(_compile(source, vocabulary))
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    return ours, _Running(source, process_id, time.monotonic() + timeout_s)


def _limit(timeout_s: float) -> None:
    os.nice(_NICENESS)
    with open("/proc/self/statm") as file:
        data_bytes = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + _MAX_MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(timeout_s * MAX_COMPILERS) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # xgrammar's remarks


def _compile(source: str, vocabulary: Vocabulary) -> bytes:
    try:
        return b"+" + compile_constraint(source, vocabulary).written()
    except RequestError as error:
        return b"-" + json.dumps(error_to_dict(error)).encode()
    except MemoryError:
        return b"-" + json.dumps(error_to_dict(_too_large(source))).encode()


def _collect(orders: MessageSocket, connection: Connection, job: _Running) -> None:
    """Tell what a compiler said with its last words, or that it died without any."""
    try:
        words = connection.recv_bytes()
    except (EOFError, OSError):
        words = b""
    connection.close()
    os.waitpid(job.process_id, 0)
    if not words:
        _answer(orders, job.source, _too_large(job.source))
    elif words[:1] == b"-":
        _answer(orders, job.source, error_from_dict(json.loads(words[1:])))
    else:
        _answer(orders, job.source, words[1:])


def _answer(orders: MessageSocket, source: str, result: bytes | RayppError) -> None:
    error = error_to_dict(result) if isinstance(result, RayppError) else None
    head = json.dumps([source, error]).encode()
    orders.send(head + b"\n" + (result if isinstance(result, bytes) else b""))


def _too_long(source: str, timeout_s: float) -> RequestError:
    return refused(
        kind_and_value(source)[0], f"compiling it takes longer than grammar_compile_timeout_s = {timeout_s:g}"
    )


def _too_large(source: str) -> RequestError:
    return refused(kind_and_value(source)[0], f"compiling it crashed, or took more than {_MAX_MEMORY_BYTES >> 20} MiB")
