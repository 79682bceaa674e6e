"""Fetching a picture from an address that a stranger names, without letting that stranger look around.

A name is resolved once, every address that it has must be a public one, and the connection goes to the address that was
checked: not to what a second look-up says. The same for each redirection. Time and size are bounded as a whole.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError

_MAX_REDIRECTIONS = 3
_REDIRECTIONS = (301, 302, 303, 307, 308)
_READ_BYTES = 1 << 16

Resolve = Callable[[str, int], list[str]]
"""From a host and a port to its IP addresses."""

Connect = Callable[[SplitResult, str, float], http.client.HTTPConnection]
"""From an address, the IP address to connect to, and a timeout in seconds to a connection."""


@dataclass(frozen=True)
class Fetcher:
    """Fetches files over http and https.

    Args:
        limits: What the configuration allows.
        resolve: Finds a host's IP addresses.
        connect: Opens a connection.
    """

    limits: ImagesSection
    resolve: Resolve = lambda host, port: _resolve(host, port)
    connect: Connect = lambda url, ip, timeout_s: _connect(url, ip, timeout_s)

    def fetch(self, url: str) -> bytes:
        """Return the file at an address. Blocks.

        Raises:
            RequestError: not allowed, not there, too large, or too slow.
        """
        if not self.limits.allow_image_urls:
            raise RequestError(
                "addresses of images are not allowed",
                got=_shortened(url),
                expected="the image itself, as data:image/png;base64,...",
                hint="allow_image_urls=true lets the engine fetch them",
            )
        deadline_s = time.monotonic() + self.limits.image_url_timeout_s
        for _ in range(1 + _MAX_REDIRECTIONS):
            try:
                answer = self._get(url, deadline_s)
            except (OSError, http.client.HTTPException) as error:
                raise RequestError(
                    "an image cannot be fetched",
                    got=f"{_shortened(url)}: {type(error).__name__}: {error}",
                    expected=f"an answer within image_url_timeout_s = {self.limits.image_url_timeout_s:g} s",
                ) from error
            if isinstance(answer, bytes):
                return answer
            url = answer.url
        raise RequestError("an image's address is redirected too often", got=_shortened(url))

    def _get(self, url: str, deadline_s: float) -> bytes | _Redirection:
        parts = _parts(url)
        ip = self._public_ip(parts, url)
        connection = self.connect(parts, ip, _left(deadline_s))
        try:
            target = parts.path or "/"
            connection.request("GET", f"{target}?{parts.query}" if parts.query else target, headers=_headers(parts))
            response = connection.getresponse()
            if response.status in _REDIRECTIONS and (location := response.headers.get("Location")):
                return _Redirection(urljoin(url, location))
            if response.status != http.HTTPStatus.OK:
                raise RequestError("an image cannot be fetched", got=f"{_shortened(url)}: status {response.status}")
            return self._body(connection, response, url, deadline_s)
        finally:
            connection.close()

    def _body(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, url: str, deadline_s: float
    ) -> bytes:
        limit, num_bytes = self.limits.max_image_bytes, 0
        parts: list[bytes] = []
        while True:
            left_s = _left(deadline_s)  # also of a host that sends a byte now and then
            if connection.sock is not None:  # else the response has it, with the timeout that it was opened with
                connection.sock.settimeout(left_s)
            part = response.read1(_READ_BYTES)
            num_bytes += len(part)
            if num_bytes > limit:
                raise RequestError(
                    "an image file is too large",
                    got=f"{_shortened(url)}: more than {limit} bytes",
                    expected=f"at most max_image_bytes = {limit}",
                )
            if not part:
                return b"".join(parts)
            parts.append(part)

    def _public_ip(self, parts: SplitResult, url: str) -> str:
        """Return the address to connect to, once all that the host has are known to be public."""
        assert parts.hostname is not None
        found = self.resolve(parts.hostname, parts.port or _default_port(parts))
        private = [ip for ip in found if not _is_public(ip)]
        if private or not found:
            raise RequestError(
                "an image's address is not a public one",
                got=f"{_shortened(url)}, which is {', '.join(private) or 'nowhere'}",
                expected="a host that the whole internet reaches",
            )
        return found[0]


@dataclass(frozen=True)
class _Redirection:
    url: str


class _PinnedHTTPS(http.client.HTTPSConnection):
    """Connects to one IP address, and checks the certificate of the host's name."""

    def __init__(self, host: str, port: int, ip: str, timeout_s: float) -> None:
        self._ip = ip
        self._tls = ssl.create_default_context()
        super().__init__(host, port, timeout=timeout_s, context=self._tls)

    def connect(self) -> None:
        plain = socket.create_connection((self._ip, self.port), self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)


def _resolve(host: str, port: int) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _connect(parts: SplitResult, ip: str, timeout_s: float) -> http.client.HTTPConnection:
    assert parts.hostname is not None
    port = parts.port or _default_port(parts)
    if parts.scheme == "https":
        return _PinnedHTTPS(parts.hostname, port, ip, timeout_s)
    return http.client.HTTPConnection(ip, port, timeout=timeout_s)


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise RequestError(
            "not an image's address", got=_shortened(url), expected="data:image/...;base64,..., http:// or https://"
        )
    if parts.username is not None or not url.isprintable() or " " in url:
        raise RequestError("an image's address with a user or blanks in it", got=_shortened(url))
    return parts


def _headers(parts: SplitResult) -> dict[str, str]:
    return {"Host": parts.netloc, "User-Agent": "raypp", "Accept": "image/*", "Accept-Encoding": "identity"}


def _default_port(parts: SplitResult) -> int:
    return 443 if parts.scheme == "https" else 80


def _is_public(ip: str) -> bool:
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    checked = mapped or address
    return checked.is_global and not checked.is_multicast


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no time is left")
    return left_s


def _shortened(url: str) -> str:
    return repr(url[:120])
