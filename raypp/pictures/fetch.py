"""Fetching an image from an address that a stranger names, without letting that stranger look around.

A name is resolved once, every address that it has must be a public one, and the connection goes to the address that was
checked: not to what a second look-up says. The same for each redirection. Time and size are bounded as a whole: a
socket's timeout is of one read only, and a look-up of the system has none, so all of them share one deadline.
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError
from raypp.pictures.web_address import WebAddress, is_public, parse_address, redirected, shortened

Resolve = Callable[[str, int], list[str]]
"""From a host and a port to its IP addresses. Blocks."""

_MAX_LOOKUPS = 32
_MAX_REDIRECTIONS = 3
_REDIRECTIONS = (301, 302, 303, 307, 308)
_READ_BYTES = 1 << 16

Connect = Callable[[WebAddress, str, float], http.client.HTTPConnection]
"""From an address, the IP address to connect to, and a deadline (of `time.monotonic()`) to a connection."""


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


@dataclass(frozen=True)
class Fetcher:
    """Fetches files over http and https. May be used from several threads.

    Args:
        limits: What the configuration allows.
        lookups: Finds a host's IP addresses.
        connect: Makes a connection.
    """

    limits: ImagesSection
    lookups: TimedLookups = field(default_factory=TimedLookups)
    connect: Connect = lambda address, ip, deadline_s: connect(address, ip, deadline_s)

    def check(self, url: str) -> WebAddress:
        """Return an address that may be asked for; its host is not looked up yet.

        Raises:
            RequestError: it is none, or none is allowed.
        """
        if not self.limits.allow_image_urls:
            raise RequestError(
                "addresses of images are not allowed",
                got=shortened(url),
                expected="the image itself, as data:image/png;base64,...",
                hint="allow_image_urls=true lets the engine fetch them",
            )
        return parse_address(url)

    def fetch(self, url: str) -> bytes:
        """Return the file at an address. Blocks, no longer than `image_url_timeout_s`.

        Raises:
            RequestError: not allowed, not there, too large, or too slow.
        """
        deadline_s = time.monotonic() + self.limits.image_url_timeout_s
        for _ in range(1 + _MAX_REDIRECTIONS):
            address = self.check(url)
            try:
                answer = self._get(address, url, deadline_s)
            except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: of names that TLS refuses
                raise RequestError(
                    "an image cannot be fetched",
                    got=f"{shortened(url)}: {type(error).__name__}: {error}",
                    expected=f"an answer within image_url_timeout_s = {self.limits.image_url_timeout_s:g} s",
                ) from error
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise RequestError("an image's address is redirected too often", got=shortened(url))

    def _get(self, address: WebAddress, url: str, deadline_s: float) -> bytes | str:
        """Return a file, or the address that it is redirected to."""
        ip = self._public_ip(address, url, deadline_s)
        connection = self.connect(address, ip, deadline_s)
        try:
            response = get(connection, address, deadline_s)
            with response:
                if response.status in _REDIRECTIONS and (location := response.headers.get("Location")):
                    return redirected(url, location)
                if response.status != http.HTTPStatus.OK:
                    raise RequestError("an image cannot be fetched", got=f"{shortened(url)}: status {response.status}")
                return self._body(response, url)
        finally:
            connection.close()

    def _body(self, response: http.client.HTTPResponse, url: str) -> bytes:
        limit, num_bytes, parts = self.limits.max_image_bytes, 0, list[bytes]()
        while max(num_bytes, response.length or 0) <= limit:  # also what it claims to have
            part = response.read1(_READ_BYTES)
            if not part:
                return b"".join(parts)
            num_bytes += len(part)
            parts.append(part)
        raise RequestError(
            "an image file is too large",
            got=f"{shortened(url)}: more than {limit} bytes",
            expected=f"at most max_image_bytes = {limit}",
        )

    def _public_ip(self, address: WebAddress, url: str, deadline_s: float) -> str:
        """Return the IP address to connect to, once all that the host has are known to be public."""
        found = self.lookups.find(address.host, address.port, deadline_s)
        private = [ip for ip in found if not is_public(ip)]
        if private or not found:
            raise RequestError(
                "an image's address is not a public one",
                got=f"{shortened(url)}, which is {', '.join(private) or 'nowhere'}",
                expected="a host that the whole internet reaches",
            )
        return found[0]
