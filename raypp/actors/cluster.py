"""The Ray that the engine runs on: one that is there already, or a local one that it starts and stops."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

import ray

from raypp.errors import ResourceError

_REACH_TIMEOUT_S = 10.0
_SETTINGS_FRAME, _FRAME_HEADER_BYTES = 4, 9
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0])
_LOCAL_OBJECT_STORE_BYTES = 80 << 20  # nothing large travels through it; Ray refuses much less


class Cluster:
    """A connection of this process to Ray, held by one user of it.

    Ray has one connection per process, so there is one count per process of those who use the one that was made here;
    the last of them ends it. That stops a Ray that was started for it, and only leaves a cluster that was there. A
    connection that somebody else made is never ended.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _own_session: ClassVar[str | None] = None  # which Ray the connection that was made here leads to
    _num_users: ClassVar[int] = 0

    def __init__(self, session: str | None) -> None:
        self._session = session  # None: somebody else's connection

    @classmethod
    def connect(cls) -> Cluster:
        """Use the Ray of this process, else the cluster of RAY_ADDRESS, else start a local one.

        Raises:
            ResourceError: the cluster cannot be reached, or Ray cannot start.
        """
        with cls._lock:
            if ray.is_initialized():
                if _session() != cls._own_session:
                    return cls(None)
            else:
                _init(os.environ.get("RAY_ADDRESS") or "local")
                cls._own_session, cls._num_users = _session(), 0
            cls._num_users += 1
            return cls(cls._own_session)

    def disconnect(self) -> None:
        """Leave. Doing so twice does nothing."""
        with self._lock:
            session, self._session = self._session, None
            if session is None or session != Cluster._own_session:
                return
            Cluster._num_users -= 1
            if Cluster._num_users == 0:
                Cluster._own_session = None
                if ray.is_initialized() and _session() == session:
                    ray.shutdown()


def _session() -> str:
    """Return what tells this connection to Ray from every other one."""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


def _init(address: str) -> None:
    if "://" in address:
        raise ResourceError(
            "RAY_ADDRESS names a Ray Client server, which raypp cannot use",
            got=address,
            expected="host:port of the cluster's head, from a machine of the cluster",
            hint="run there, or submit a job: ray job submit -- python ...",
        )
    check_reachable(address)
    local: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _LOCAL_OBJECT_STORE_BYTES}
    try:
        with _own_sigterm_handler():
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                **(local if address == "local" else {}),
            )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ResourceError(
            "no connection to Ray", got=f"RAY_ADDRESS={address}: {error}", hint="is the cluster up?"
        ) from error


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
    """Keep the process's answer to SIGTERM, which `ray.init` replaces by an abort.

    A process that had none exits in an orderly way instead, so that engines are closed.
    """
    if threading.current_thread() is not threading.main_thread():
        logger = logging.getLogger("ray._private.worker")
        logger.addFilter(_is_not_about_sigterm)
        try:
            yield
        finally:
            logger.removeFilter(_is_not_about_sigterm)
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, _exit if before in (signal.SIG_DFL, None) else before)


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    """Return False for Ray's warning that it cannot take over SIGTERM: that it does not is what we want."""
    return "SIGTERM handler is not set" not in record.getMessage()


def _exit(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)
