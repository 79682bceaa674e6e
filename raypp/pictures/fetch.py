"""Fetching an image from an address that a stranger names, without letting that stranger look around.

A name is resolved once, every address that it has must be a public one, and the connection goes to the address that was
checked: not to what a second look-up says. The same for each redirection. Time and size are bounded as a whole.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError
from raypp.pictures.timed_http import TimedLookups, connect, get
from raypp.pictures.web_address import WebAddress, is_public, parse_address, redirected, shortened

_MAX_REDIRECTIONS = 3
_REDIRECTIONS = (301, 302, 303, 307, 308)
_READ_BYTES = 1 << 16

Connect = Callable[[WebAddress, str, float], http.client.HTTPConnection]
"""From an address, the IP address to connect to, and a deadline (of `time.monotonic()`) to a connection."""


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
            url = answer.url
        raise RequestError("an image's address is redirected too often", got=shortened(url))

    def _get(self, address: WebAddress, url: str, deadline_s: float) -> bytes | _Redirection:
        ip = self._public_ip(address, url, deadline_s)
        connection = self.connect(address, ip, deadline_s)
        try:
            response = get(connection, address, deadline_s)
            with response:
                if response.status in _REDIRECTIONS and (location := response.headers.get("Location")):
                    return _Redirection(redirected(url, location))
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


@dataclass(frozen=True)
class _Redirection:
    url: str
