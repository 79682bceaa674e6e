"""Connects to the Ray cluster that the engine runs on, or starts a local one and stops it again."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import ray
from ray._private.ray_logging import global_worker_stdstream_dispatcher

from raypp.actors.agent_ports import given_agent_ports
from raypp.actors.forked import leave_ray_alone
from raypp.actors.gcs_waits import gcs_waits_can_end
from raypp.actors.local_process import Child
from raypp.actors.ray_thread import RayThread
from raypp.config.log import is_log_line
from raypp.errors import ResourceError

_REACH_TIMEOUT_S = 10.0
_SETTINGS_FRAME, _FRAME_HEADER_BYTES = 4, 9
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0])
_LOCAL_OBJECT_STORE_BYTES = 80 << 20  # nothing large travels through it; Ray refuses much less
_LEAST_DISK_BYTES = 16 << 20  # of a local Ray's files when it starts: logs, state
_SYSTEM_CONFIG = {"agent_register_timeout_ms": 600_000, "worker_register_timeout_seconds": 600, "worker_niceness": 0}
"""Of a local Ray: how long its processes may take to start (the engine has its own limit, and notices processes that
die), and that actors run at the priority of other processes. Ray's default, 15, gives one a thirtieth of the processor
time of a process beside it."""
_STOP_S = 10.0  # for Ray to end in order
_RAY_PRINTS = "ray_print_logs"
_DEAD_WORKER = re.compile(
    r"^A worker died or was killed while .*Worker PID: (\d+) Worker exit type: (\w+) Worker exit detail: ([^.]*\.)",
    re.DOTALL,
)
_GIVE_UP_S = 40.0  # for Ray to give up a start: it waits half a minute for a server that died


class Cluster:
    """A connection of this process to Ray, held by one user of it.

    Ray has one connection per process, so there is one count per process of those who use the one that was made here;
    the last of them ends it. That stops a Ray that was started for it, and only leaves a cluster that was there. A
    connection that somebody else made is never ended.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _own: ClassVar[RayThread | None] = None  # the connection that was made here
    _num_users: ClassVar[int] = 0

    def __init__(self, connection: RayThread | None) -> None:
        self._connection = connection  # None: somebody else's

    @classmethod
    def connect(cls, *, shows_logs: bool = False) -> Cluster:
        """Use the Ray of this process, else the cluster of RAY_ADDRESS, else start a local one.

        Args:
            shows_logs: Whether what raypp logs in Ray's processes appears on this one's stderr, where the connection is
                made here.

        Raises:
            ResourceError: the cluster cannot be reached, or Ray cannot start.
        """
        with cls._lock:
            if cls._own is not None and not cls._own.is_useful() and not cls._end_own(_GIVE_UP_S):
                raise ResourceError(
                    "an earlier connection to Ray does not end",
                    got=f"no end within {_GIVE_UP_S:g} s",
                    hint="its cluster stands still, or cannot be reached; go on in another process",
                )
            if ray.is_initialized():
                if cls._own is None or _session() != cls._own.name:
                    return cls(None)
            else:
                cls._own, cls._num_users = _prepare(os.environ.get("RAY_ADDRESS") or "local", shows_logs), 0
                with _own_sigterm_handler():
                    cls._own.start()
            cls._num_users += 1
            return cls(cls._own)

    def is_useful(self) -> bool:
        """Return whether Ray can be asked, as far as is known here."""
        return ray.is_initialized() and (self._connection is None or self._connection.is_useful())

    def check(self) -> None:
        """Look after the Ray that was started here, if it was.

        Raises:
            EngineDeadError: it has died.
        """
        if self._connection is not None:
            self._connection.check()

    def disconnect(self) -> None:
        """Leave. Doing so twice does nothing."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is None or connection is not Cluster._own:
                return
            Cluster._num_users -= 1
            if Cluster._num_users == 0:
                self._end_own(_STOP_S)

    @classmethod
    def _end_own(cls, timeout_s: float) -> bool:
        """End the connection that was made here; return whether it has ended."""
        assert cls._own is not None
        if not cls._own.stop(timeout_s):
            atexit.unregister(ray.shutdown)  # it would wait for ever, too
            return False
        cls._own = None
        return True

    @classmethod
    def _after_fork(cls) -> None:
        """Leave Ray alone in a forked child: the threads that Ray's exit hook waits for are its parent's."""
        if cls._own is not None:
            leave_ray_alone()
            cls._own, cls._num_users, cls._lock = None, 0, threading.Lock()


os.register_at_fork(after_in_child=Cluster._after_fork)


def _session() -> str:
    """Return what tells this connection to Ray from every other one."""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


def _prepare(address: str, shows_logs: bool) -> RayThread:
    """Return the connection to be made.

    Raises:
        ResourceError: it cannot be made.
    """
    if "://" in address:
        raise ResourceError(
            "RAY_ADDRESS names a Ray Client server, which raypp cannot use",
            got=address,
            expected="host:port of the cluster's head, from a machine of the cluster",
            hint="run there, or submit a job: ray job submit -- python ...",
        )
    check_reachable(address)
    if address == "local":
        check_disk(ray_folder())
    return RayThread(partial(_connect, address, shows_logs), _disconnect, _is_server)


def _connect(address: str, shows_logs: bool, is_wanted: Callable[[], bool]) -> str:
    tokens = logging.getLogger("ray._private.authentication.authentication_token_setup")
    tokens.addFilter(_is_not_about_tokens)
    local: dict[str, Any] = {}
    try:
        with ExitStack() as patience:
            if address == "local":
                patience.enter_context(gcs_waits_can_end(is_wanted))
                local = {
                    "include_dashboard": False,
                    "object_store_memory": _LOCAL_OBJECT_STORE_BYTES,
                    "_metrics_export_port": patience.enter_context(given_agent_ports()),
                    "_system_config": _SYSTEM_CONFIG,
                }
            ray.init(address=address, log_to_driver=shows_logs, configure_logging=False, **local)
    except Exception as error:  # of whatever class: Ray raises plain ones, too
        hint = "is the cluster up?"
        if address == "local":
            check_disk(ray_folder())
            hint = (
                f"see {ray_folder()}/ray/session_latest/logs; a very busy machine, or one without memory, starts none"
            )
        raise ResourceError("no connection to Ray", got=f"RAY_ADDRESS={address}: {error}", hint=hint) from error
    _print_errors_to_stderr()
    if shows_logs:
        _print_log_lines_alone()
    return _session()


def _disconnect(session: str) -> None:
    if ray.is_initialized() and _session() == session:
        ray.shutdown()


def _is_server(child: Child) -> bool:
    """Return whether a child of this process belongs to Ray."""
    return str(Path(ray.__file__).parent) in child.command()


def _print_errors_to_stderr() -> None:
    """Keep Ray's errors ("A worker died ...") out of stdout, which is the user's: Ray has no setting for it."""
    worker = ray._private.worker
    original = worker.print_to_stdstream
    if getattr(original, "func", None) is not _to_stderr:
        worker.print_to_stdstream = partial(_to_stderr, original)


def _to_stderr(print_data: Callable[..., None], data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    lines = [_in_short(line) for line in data["lines"]]
    print_data({**data, "lines": lines, "is_err": True}, *args, **kwargs)


def _in_short(line: str) -> str:
    """Return a line of Ray's; of its page about a dead worker, which one died and how."""
    found = _DEAD_WORKER.search(line)
    return line if found is None else f"A worker died or was killed: pid {found[1]}, {found[2]}: {found[3]}"


def _print_log_lines_alone() -> None:
    """Print raypp's log lines of Ray's processes, and nothing else that these write: Ray has no setting for it."""
    global_worker_stdstream_dispatcher.remove_handler(_RAY_PRINTS)
    global_worker_stdstream_dispatcher.add_handler(_RAY_PRINTS, _print_log_lines)


def hide_log_lines() -> None:
    """Print no more of what raypp logs in Ray's processes."""
    with suppress(KeyError):  # nothing was printed
        global_worker_stdstream_dispatcher.remove_handler(_RAY_PRINTS)


def _print_log_lines(data: dict[str, Any]) -> None:
    for line in data["lines"]:
        if is_log_line(line):
            print(line, file=sys.stderr, flush=True)


def ray_folder() -> Path:
    """Return where a local Ray keeps its sockets, logs and state."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def check_disk(folder: Path) -> None:
    """Look whether a disk has room for a Ray: without any, Ray tries for half a minute and does not say why not.

    Args:
        folder: Where Ray will keep its files; it may not be there yet.

    Raises:
        ResourceError: the disk is full.
    """
    folder = next(existing for existing in (folder, *folder.absolute().parents) if existing.exists())
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < _LEAST_DISK_BYTES:
        raise ResourceError(
            "the disk with Ray's files is full",
            got=f"{free_bytes:,} bytes free in {folder}",
            expected=f"at least {_LEAST_DISK_BYTES:,}",
            hint="make room, or name another folder with RAY_TMPDIR",
        )


def check_reachable(address: str, timeout_s: float = _REACH_TIMEOUT_S) -> None:
    """Look whether a Ray listens at a cluster's address: Ray itself would try for minutes.

    Ray's head speaks gRPC, which is HTTP/2: whoever does answers a greeting with a SETTINGS frame (RFC 9113, 3.4).

    Args:
        address: Of `host:port`; others are left to Ray.
        timeout_s: For the connection, and for the answer.

    Raises:
        ResourceError: nobody is there, or somebody else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return  # it would want to see a certificate first
            connection.sendall(_HTTP2_GREETING)
            answer = connection.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
        if len(answer) < _FRAME_HEADER_BYTES or answer[3] != _SETTINGS_FRAME:
            raise OSError("what listens there is no Ray")
    except OSError as error:
        raise ResourceError(
            "the Ray cluster of RAY_ADDRESS cannot be reached",
            got=f"{address}: {error}",
            expected="host:port of a running cluster",
            hint="start it, correct RAY_ADDRESS, or unset it to use a local Ray",
        ) from error


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keep the process's answer to SIGTERM, which Ray takes over.

    A process that had none exits in an orderly way instead, so that engines are closed.
    """
    before = signal.getsignal(signal.SIGTERM)
    logger = logging.getLogger("ray._private.worker")
    logger.addFilter(_is_not_about_sigterm)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_about_sigterm)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _exit if before in (signal.SIG_DFL, None) else before)


def _is_not_about_tokens(record: logging.LogRecord) -> bool:
    """Return False for Ray's warning that a cluster asks for a token: that is how it should be."""
    return "authentication is enabled" not in record.getMessage()


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    """Return False for Ray's warning that it cannot take over SIGTERM: that it does not is what we want."""
    return "SIGTERM handler is not set" not in record.getMessage()


def _exit(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)
