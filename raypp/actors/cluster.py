"""Connects to the Ray cluster that the engine runs on, or starts a local one and stops it again.

Ray 2.60.0 lacks settings for some of what a local one needs on a busy machine; `quick_start` and `gcs_waits_can_end`
patch its private modules while it starts.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from unittest.mock import patch

import ray
from ray._private import node, parameter, ray_constants, services
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.exceptions import RpcError
from ray.experimental import internal_kv

from raypp.actors.placement import alive_nodes
from raypp.actors.processes import LocalProcess
from raypp.actors.ray_thread import RayThread
from raypp.config.env import is_log_line
from raypp.errors import EngineDeadError, ResourceError

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
    r"^A worker died or was killed while .*Worker PID: (\d+) Worker exit type: (\w+) Worker exit detail: ([^.]*\.).*",
    re.DOTALL,
)
_USUAL_WARNINGS = ("authentication is enabled", "SIGTERM handler is not set")
_GIVE_UP_S = 40.0  # for Ray to give up a start: it waits half a minute for a server that died
_PORTS = range(20_000, 32_768)
"""Below those that Linux gives to connections; above those that Ray gives to workers."""
_OF_THE_DASHBOARD = "dashboard_agent_listen_port"
_AGENT_PORTS = ("metrics_agent_port", "runtime_env_agent_port", _OF_THE_DASHBOARD)
_PORT, _GET = "wait_for_persisted_port", "_internal_kv_get"
_POLL_S = 0.05
_ANSWER_S = 1
_PORT_S, _GET_S = 30.0, 30.0  # of one that is alive; Ray's own, and half of what it gives itself
_LIBRARY = "ray._raylet"
_LOOK_TIMEOUT_S = 1.0


class Cluster:
    """A connection of this process to Ray, held by one user of it.

    Ray has one connection per process, so the users of the one that was made here are counted per process, and the last
    of them ends it. That stops a Ray that was started for it, and only leaves a cluster that was there. A
    connection that was made elsewhere is never ended.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _own: ClassVar[RayThread | None] = None  # the connection that was made here
    _num_users: ClassVar[int] = 0

    def __init__(self, connection: RayThread | None) -> None:
        self._connection = connection  # None: made elsewhere

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

    def death(self) -> EngineDeadError | None:
        """Return the error of the Ray that was started here, if it has died."""
        return None if self._connection is None else self._connection.death()

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
    tokens.addFilter(_is_not_usual)
    local: dict[str, Any] = {}
    try:
        with ExitStack() as patience:
            if address == "local":
                patience.enter_context(gcs_waits_can_end(is_wanted))
                local = {
                    "include_dashboard": False,
                    "object_store_memory": _LOCAL_OBJECT_STORE_BYTES,
                    "_metrics_export_port": patience.enter_context(quick_start(shows_logs=shows_logs)),
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


def _is_server(child: LocalProcess) -> bool:
    """Return whether a child of this process belongs to Ray."""
    return str(Path(ray.__file__).parent) in child.command()


def _print_errors_to_stderr() -> None:
    """Keep Ray's errors ("A worker died ...") out of stdout, which is the user's: Ray has no setting for it."""
    worker = ray._private.worker
    original = worker.print_to_stdstream
    if getattr(original, "func", None) is not _to_stderr:
        worker.print_to_stdstream = partial(_to_stderr, original)


def _to_stderr(print_data: Callable[..., None], data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    # Of Ray's page about a dead worker: which one died, and how.
    lines = [_DEAD_WORKER.sub(r"A worker died or was killed: pid \1, \2: \3", line) for line in data["lines"]]
    print_data({**data, "lines": lines, "is_err": True}, *args, **kwargs)


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

    Ray's head speaks gRPC, which is HTTP/2: the answer to a greeting is a SETTINGS frame (RFC 9113, 3.4).

    Args:
        address: Of `host:port`; others are left to Ray.
        timeout_s: For the connection, and for the answer.

    Raises:
        ResourceError: nothing listens there, or something else than Ray.
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
    logger.addFilter(_is_not_usual)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_usual)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _exit if before in (signal.SIG_DFL, None) else before)


def _is_not_usual(record: logging.LogRecord) -> bool:
    """Return False for Ray's warnings that a cluster asks for a token, and that it does not take over SIGTERM."""
    return not any(words in record.getMessage() for words in _USUAL_WARNINGS)


def _exit(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)


@contextmanager
def quick_start(*, shows_logs: bool) -> Iterator[int]:
    """Have Ray start with given ports for its agents while this is entered; yields one more, for `ray.init`.

    It starts without the process that adds machines, and without the one that reads logs where these are not shown. A
    raylet starts its agents and waits 15 s, without a setting, for the ports that they choose; then it ends. Agents
    are Python programs, whose imports take longer on a busy machine. A port that is given is not waited for, but
    `ray.init` takes one of four, and of the others one reaches its agent and not the raylet.
    """
    *given, of_metrics = _free_ports(len(_AGENT_PORTS) + 1)
    settings: dict[str, Any] = {
        **dict(zip(_AGENT_PORTS, given, strict=True)),
        "no_monitor": True,
        "include_log_monitor": shows_logs,
    }
    start_process: Callable[..., Any] = services.start_ray_process

    def start(command: list[str], process_type: str, *args: Any, **options: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = [*command, f"--{_OF_THE_DASHBOARD}={settings[_OF_THE_DASHBOARD]}"]
        return start_process(command, process_type, *args, **options)

    with (
        patch.object(parameter, "RayParams", partial(parameter.RayParams, **settings)),
        patch.object(services, "start_ray_process", start),
    ):
        yield of_metrics


def _free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens at the moment."""
    with ExitStack() as probes:
        found: list[int] = []
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            probe = probes.enter_context(socket.socket())
            with suppress(OSError):  # taken
                probe.bind(("", port))
                found.append(port)
                if len(found) == count:
                    return found
    raise OSError(f"no {count} free ports from {_PORTS.start} to {_PORTS.stop - 1}")


class _UnwantedError(BaseException):
    """Ends Ray's start. No Exception: after one Ray says that there is no dashboard, and goes on."""


@contextmanager
def gcs_waits_can_end(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Have Ray's start wait for its gcs_server in Python while this is entered. Not for several at once.

    Ray waits in its library: for the port up to 30 s while it holds the interpreter, so that a server's death is
    noticed only then and the user's threads stand still; for what the gcs_server knows without a limit, and after 60 s
    without one it ends the whole process.

    Args:
        is_wanted: Whether the start is still wanted; once it is not, it ends with a BaseException.
    """
    look: Callable[..., int] | None = getattr(node, _PORT, None)

    def repeat(attempt: Callable[[], Any], not_yet: type[Exception], timeout_s: float) -> Any:
        ends_s = time.monotonic() + timeout_s
        while True:
            if not is_wanted():
                raise _UnwantedError("this start of Ray is no longer wanted")
            try:
                return attempt()
            except not_yet:
                if time.monotonic() >= ends_s:
                    raise
            time.sleep(_POLL_S)

    def wait_for_port(*place: Any, timeout_ms: float = _PORT_S * 1000, **others: Any) -> Any:
        assert look is not None  # else Ray does not call this
        return repeat(lambda: look(*place, timeout_ms=0, **others), RuntimeError, timeout_ms / 1000)  # no file yet

    def get(key: str | bytes, *, namespace: str | bytes | None = None) -> Any:
        store: Any = internal_kv  # its client may change meanwhile
        names = [name.encode() if isinstance(name, str) else name for name in (key, namespace)]
        return repeat(lambda: store.global_gcs_client.internal_kv_get(*names, timeout=_ANSWER_S), RpcError, _GET_S)

    with ExitStack() as patches:
        for module, name, function in ((node, _PORT, wait_for_port), (internal_kv, _GET, get)):
            if hasattr(module, name):  # not every version of Ray has each
                patches.enter_context(patch.object(module, name, function))
        yield


def leave_ray_alone() -> None:
    """Have this process, a forked child, end without using its copy of the Ray connection.

    Ray's threads are the parent's: its exit hook, its objects and its library would wait for them, or crash. The exit
    code stays as it would be.
    """
    atexit.unregister(ray.shutdown)
    worker = ray._private.worker
    for holder in (worker.global_worker, worker._global_node, ray._private.state.state, internal_kv):
        for held in getattr(holder, "__dict__", {}).values():
            if type(held).__module__.startswith(_LIBRARY):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # never freed
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # not everywhere, but where Ray's library is
        libc.on_exit(libc._exit, None)  # once Python has ended, and before the library's own destructors


def named_cluster() -> tuple[int, dict[str, float], dict[str, float]]:
    """Connect to the cluster that RAY_ADDRESS names, look, and leave.

    Returns:
        The number of its nodes; its resources by name; those that are free.

    Raises:
        ResourceError: it cannot be reached.
    """
    assert os.environ.get("RAY_ADDRESS"), "without it a Ray would be started"
    cluster = Cluster.connect()
    try:
        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return len(alive_nodes()), total, free
    finally:
        cluster.disconnect()


def local_cluster() -> str | None:
    """Return the address of the cluster that `ray start` started on this machine, if it still answers."""
    try:
        address = (ray_folder() / "ray" / "ray_current_cluster").read_text().strip()
        check_reachable(address, _LOOK_TIMEOUT_S)
    except (OSError, ResourceError):
        return None
    return address or None
