"""Which addresses a stranger may have fetched: http and https, spelled in ASCII, on hosts that are public."""

from __future__ import annotations

import contextlib
import ipaddress
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from raypp.errors import RequestError

MAX_ADDRESS_CHARS = 8192
"""Longer than any that browsers and servers agree on."""

_MAX_HOST_CHARS = 253  # of a name in the DNS
_SCHEMES = {"http": 80, "https": 443}
_PATH_CHARS = "%/:@!$&'()*+,;=~-._"
_QUERY_CHARS = _PATH_CHARS + "?"

_CLOSED = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # Azure: the virtual machine's host, with its metadata and keys
            "192.0.0.0/24",  # protocol assignments, which the nearest network serves; Oracle's metadata at 192.0.0.192
            "192.88.99.0/24",  # RFC 7526: relays of 6to4
            "2001::/23",  # protocol assignments, Teredo's among them
            "3fff::/20",  # RFC 9637: documentation
        ),
    )
)
"""What is not public, though `is_global` of some versions of Python says so."""

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # all of IPv6 that hosts of the internet have
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
_ISATAP = (0x00005EFE, 0x02005EFE)  # RFC 5214: before an IPv4 address, in the last 64 bits

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class WebAddress:
    """An address that can be asked for; everything in ASCII."""

    scheme: str
    host: str  # a name, or an IP address without brackets
    port: int
    target: str  # path and query

    @property
    def host_header(self) -> str:
        """The host as HTTP's `Host` has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _SCHEMES[self.scheme] else f"{host}:{self.port}"


def parse_address(url: str) -> WebAddress:
    """Return what an address says. What is not ASCII is encoded: a host by IDNA, path and query by percent signs.

    Raises:
        RequestError: it is no address of a web page, or cannot be encoded.
    """
    if len(url) > MAX_ADDRESS_CHARS:
        raise RequestError(
            "an image's address is too long",
            got=f"{len(url)} characters: {shortened(url)}",
            expected=f"at most {MAX_ADDRESS_CHARS}",
            hint="the image itself goes in as data:image/png;base64,...",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _no_address(url, str(error)) from None
    if parts.scheme not in _SCHEMES or not parts.hostname or port == 0:
        raise _no_address(url)
    if parts.username is not None or not url.isprintable() or " " in url:
        raise RequestError("an image's address with a user or blanks in it", got=shortened(url))
    path, query = quote(parts.path or "/", safe=_PATH_CHARS), quote(parts.query, safe=_QUERY_CHARS)
    return WebAddress(
        scheme=parts.scheme,
        host=_ascii_host(parts.hostname, url),
        port=port or _SCHEMES[parts.scheme],
        target=f"{path}?{query}" if query else path,
    )


def redirected(url: str, location: str) -> str:
    """Return where a redirection leads.

    Args:
        url: The address that answered.
        location: The header's value, as `http.client` reads it: a character per byte.

    Raises:
        RequestError: it leads to no address.
    """
    with contextlib.suppress(UnicodeError):  # what is not UTF-8 is sent on byte by byte
        location = location.encode("latin-1").decode()
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise _no_address(location, str(error)) from None


def is_web_address(source: object) -> bool:
    """Return whether what a user hands in is an address to fetch from, right or wrong."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def is_public(ip: str) -> bool:
    """Return whether the whole internet reaches an IP address. One that leads to an IPv4 address is as public as that.

    Args:
        ip: As `getaddrinfo` writes it, with or without a zone.
    """
    return _is_public(ipaddress.ip_address(ip.partition("%")[0]))


def shortened(url: str) -> str:
    """Return an address for an error message."""
    return repr(url[:120])


def _is_public(address: IPAddress) -> bool:
    if any(address in network for network in _CLOSED):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    if (mapped := address.ipv4_mapped) is not None:
        return _is_public(mapped)
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64:
        return _is_public(low)
    if address not in _GLOBAL_UNICAST or not address.is_global:
        return False
    embedded = [address.sixtofour]
    if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
        embedded.append(low)
    return all(_is_public(inner) for inner in embedded if inner is not None)


def _ascii_host(host: str, url: str) -> str:
    """Return a host as the DNS has it."""
    try:
        if len(host) > _MAX_HOST_CHARS:
            raise UnicodeError(f"a host of {len(host)} characters; at most {_MAX_HOST_CHARS}")
        return host.encode("idna").decode("ascii")
    except UnicodeError as error:
        raise _no_address(url, f"{error.__cause__ or error}") from None


def _no_address(url: str, why: str | None = None) -> RequestError:
    return RequestError(
        "not an image's address",
        got=shortened(url) if why is None else f"{shortened(url)}: {why}",
        expected="data:image/...;base64,..., http:// or https://, a host whose labels have 1 to 63 characters",
    )
