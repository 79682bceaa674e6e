"""HTTP and look-ups under one deadline: no byte, header or name that comes slowly makes a wait longer than it may be.

A socket's timeout is of one read only, and a look-up of the system has none.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

from raypp.pictures.web_address import WebAddress

Resolve = Callable[[str, int], list[str]]
"""From a host and a port to its IP addresses. Blocks."""

_MAX_LOOKUPS = 32


def seconds_left(deadline_s: float) -> float:
    """Return the seconds until a time of `time.monotonic()`.

    Raises:
        TimeoutError: there are none.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no time is left")
    return left_s


def resolve(host: str, port: int) -> list[str]:
    """Return a host's IP addresses, by the system's look-up."""
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class TimedLookups:
    """Looks up hosts, each in a thread that may be left behind: the system's look-up cannot be stopped.

    Args:
        resolve: Looks a host up.
        max_lookups: Threads there may be. When all hang, others wait for one of them, no longer than they may.
    """

    def __init__(self, resolve: Resolve = resolve, max_lookups: int = _MAX_LOOKUPS) -> None:
        self._resolve = resolve
        self._room = threading.BoundedSemaphore(max_lookups)

    def find(self, host: str, port: int, deadline_s: float) -> list[str]:
        """Return a host's IP addresses.

        Raises:
            TimeoutError: not in time.
            OSError: there is no such host.
        """
        if not self._room.acquire(timeout=seconds_left(deadline_s)):
            raise TimeoutError("too many look-ups hang")
        found: Future[list[str]] = Future()

        def look_up() -> None:
            try:
                found.set_result(self._resolve(host, port))
            except BaseException as error:
                found.set_exception(error)
            finally:
                self._room.release()

        try:
            threading.Thread(target=look_up, name=f"look-up of {host}", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            self._room.release()
            raise OSError(str(error)) from error
        try:
            return found.result(seconds_left(deadline_s))
        except TimeoutError:
            raise TimeoutError(f"{host} is not found in time") from None


def connect(address: WebAddress, ip: str, deadline_s: float) -> http.client.HTTPConnection:
    """Return a connection, not open yet, to one IP address; https checks the certificate of the host's name."""
    timeout_s = seconds_left(deadline_s)
    if address.scheme == "https":
        return _PinnedHTTPS(address.host, address.port, ip, timeout_s, deadline_s)
    return http.client.HTTPConnection(ip, address.port, timeout=timeout_s)


def get(connection: http.client.HTTPConnection, address: WebAddress, deadline_s: float) -> http.client.HTTPResponse:
    """Ask for an address and return the response, whose head is read. Everything that is read of it has the deadline.

    Raises:
        OSError, http.client.HTTPException: no answer, not in time, or none of HTTP.
    """
    connection.connect()
    sock = cast(socket.socket, connection.sock)
    sock.settimeout(seconds_left(deadline_s))  # sending has it as a whole
    connection.response_class = cast(Any, partial(_TimedResponse, deadline_s=deadline_s))
    headers = {"User-Agent": "raypp", "Accept": "image/*", "Accept-Encoding": "identity"}
    connection.request("GET", address.target, headers={"Host": address.host_header, **headers})
    return connection.getresponse()


class _TimedReader(io.RawIOBase):
    """Reads a socket until a deadline."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline_s: float) -> None:
        self._raw = raw
        self._sock = sock
        self._deadline_s = deadline_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(seconds_left(self._deadline_s))
        return cast("int | None", cast(Any, self._raw).readinto(buffer))

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, deadline_s: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock, deadline_s))


class _PinnedHTTPS(http.client.HTTPSConnection):
    """Connects to one IP address, and checks the certificate of the host's name."""

    def __init__(self, host: str, port: int, ip: str, timeout_s: float, deadline_s: float) -> None:
        self._ip = ip
        self._deadline_s = deadline_s
        self._tls = ssl.create_default_context()
        super().__init__(host, port, timeout=timeout_s, context=self._tls)

    def connect(self) -> None:
        plain = socket.create_connection((self._ip, self.port), self.timeout)
        try:
            plain.settimeout(seconds_left(self._deadline_s))
            self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise
