"""Fetching what a stranger names: only public addresses, in time, of a bounded size; never a second look-up."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError
from raypp.pictures.fetch import Fetcher, TimedLookups, connect
from raypp.pictures.web_address import MAX_ADDRESS_CHARS, WebAddress, is_public, parse_address

PUBLIC = "93.184.215.14"


class _Site(BaseHTTPRequestHandler):
    """Answers by path."""

    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        if self.path in ("/slow-body", "/slow-head", "/slow-status"):
            if self.path == "/slow-body":
                self.send_response(200)
                self.end_headers()
            self._drip(b"X-Word: " if self.path == "/slow-head" else b"")
            return
        self.send_response(200 if self.path == "/a.png?x=1" else 404)
        self.end_headers()
        self.wfile.write(self.headers["Host"].encode() + b" " + bytes(1000))

    def _drip(self, data: bytes) -> None:
        if data:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n" + data)
        for _ in range(200):
            self.wfile.write(b"x")
            time.sleep(0.05)  # it is a slow site: that is what is tested

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that leave early: that is what is tested."""


@contextmanager
def _site() -> Iterator[int]:
    server = _Server(("127.0.0.1", 0), _Site)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _fetcher(port: int, asked: list[str] | None = None, **limits: object) -> Fetcher:
    """Return a fetcher for which the test's site is on the internet."""
    ips = {"inside.example": ["172.16.0.7"], "half.example": [PUBLIC, "127.0.0.1"], "nat.example": ["64:ff9b::a01:203"]}

    def resolve(host: str, _: int) -> list[str]:
        if asked is not None:
            asked.append(host)
        return ips.get(host, [PUBLIC])

    def connect(address: WebAddress, ip: str, deadline_s: float) -> http.client.HTTPConnection:
        assert ip == PUBLIC
        return http.client.HTTPConnection("127.0.0.1", port, timeout=deadline_s - time.monotonic())

    return Fetcher(_limits(**limits), TimedLookups(resolve), connect)


def _limits(**limits: object) -> ImagesSection:
    return ImagesSection.model_validate({"allow_image_urls": True, **limits})


def test_a_file_is_fetched_with_its_query_and_host() -> None:
    asked: list[str] = []
    with _site() as port:
        data = _fetcher(port, asked).fetch("http://pictures.example/a.png?x=1")
    assert data == b"pictures.example " + bytes(1000)
    assert asked == ["pictures.example"]


def test_redirections_are_followed_a_few_times_and_checked_each_time() -> None:
    with _site() as port:
        fetcher = _fetcher(port)
        assert fetcher.fetch("http://a.example/to//a.png?x=1")
        with pytest.raises(RequestError, match="not a public one"):
            fetcher.fetch("http://a.example/to/http://inside.example/a.png?x=1")
        with pytest.raises(RequestError, match="not a public one"):
            fetcher.fetch("http://a.example/to/http://nat.example/a.png?x=1")
        with pytest.raises(RequestError, match="redirected too often"):
            fetcher.fetch("http://a.example/to//to//to//to//to//a.png?x=1")
        with pytest.raises(RequestError, match="not an image's address"):
            fetcher.fetch("http://a.example/to/file:///etc/passwd")


@pytest.mark.parametrize("host", ["inside.example", "half.example"])
def test_no_private_address_is_ever_connected_to(host: str) -> None:
    with pytest.raises(RequestError, match="not a public one"):
        _fetcher(port=9).fetch(f"http://{host}/a.png")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "172.31.2.3", "169.254.169.254", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]"],
)
def test_the_machine_and_its_network_are_private(host: str) -> None:
    with pytest.raises(RequestError, match="not a public one"):
        Fetcher(ImagesSection(allow_image_urls=True)).fetch(f"http://{host}:1/a.png")


def test_size_time_and_status() -> None:
    with _site() as port:
        with pytest.raises(RequestError, match="too large"):
            _fetcher(port, max_image_bytes=900).fetch("http://a.example/a.png?x=1")
        with pytest.raises(RequestError, match="status 404"):
            _fetcher(port).fetch("http://a.example/b.png")
    with pytest.raises(RequestError, match="cannot be fetched"):
        _fetcher(port).fetch("http://a.example/a.png?x=1")  # nobody listens there any more
    with pytest.raises(RequestError, match="user"):
        _fetcher(port).fetch("http://me:secret@a.example/a.png")


@pytest.mark.parametrize("part", ["body", "head", "status"])
def test_a_site_that_sends_a_byte_now_and_then_has_the_deadline_all_the_same(part: str) -> None:
    with _site() as port:
        started_s = time.monotonic()
        with pytest.raises(RequestError, match="cannot be fetched") as caught:
            _fetcher(port, image_url_timeout_s=0.2).fetch(f"http://a.example/slow-{part}")
        took_s = time.monotonic() - started_s
    assert "image_url_timeout_s = 0.2 s" in str(caught.value)
    assert took_s < 5  # all of the bytes take ten seconds


def test_a_slow_look_up_has_the_deadline_and_many_leave_no_more_threads_than_there_may_be() -> None:
    hang = threading.Event()

    def resolve(host: str, _: int) -> list[str]:
        assert hang.wait(60)
        return [PUBLIC]

    fetcher = Fetcher(_limits(image_url_timeout_s=0.05), TimedLookups(resolve, max_lookups=2))
    try:
        for words in ("not found in time", "not found in time", "too many look-ups hang"):
            with pytest.raises(RequestError, match=words):
                fetcher.fetch("http://a.example/a.png")
    finally:
        hang.set()


def test_a_handshake_that_never_ends_has_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        def to_silent(address: WebAddress, ip: str, deadline_s: float) -> http.client.HTTPConnection:
            return connect(WebAddress("https", address.host, port, "/"), "127.0.0.1", deadline_s)

        fetcher = Fetcher(_limits(image_url_timeout_s=0.2), TimedLookups(lambda *_: [PUBLIC]), to_silent)
        with pytest.raises(RequestError, match="cannot be fetched"):
            fetcher.fetch("https://a.example/a.png")


def test_what_is_not_ascii_is_encoded() -> None:
    address = parse_address("HTTP://B\u00fccher.example:8080/\u00e4pfel.png?q=\u00f6%20")
    assert (address.host_header, address.target) == ("xn--bcher-kva.example:8080", "/%C3%A4pfel.png?q=%C3%B6%20")
    assert parse_address("https://[2600::1]/").host_header == "[2600::1]"
    with _site() as port:
        asked: list[str] = []
        fetcher = _fetcher(port, asked)
        with pytest.raises(RequestError, match="status 404"):
            fetcher.fetch("http://b\u00fccher.example/to//\u00e4.png")
        assert asked == ["xn--bcher-kva.example"] * 2


@pytest.mark.parametrize(
    "url",
    [
        f"http://{'a' * 64}.example/a.png",
        "http://" + "\u00fc" * 60 + ".example/a.png",
        f"http://{'a.' * 200}example/a.png",
        "http://a..example/a.png",
        "https://.example/a.png",
        "http://[::1/a.png",
        "http://a.example:99999/a.png",
        "http://a.example:0/a.png",
        "http://\ud800.example/a.png",
        "http://a.example/\ud800.png",
        f"http://a.example/{'a' * MAX_ADDRESS_CHARS}",
        "http://a.example/to/http://[::1/a.png",
        f"http://a.example/to/http://{'a' * 64}.example/a.png",
    ],
)
def test_what_cannot_be_encoded_is_the_requests_fault(url: str) -> None:
    with _site() as port, pytest.raises(RequestError, match="address"):
        _fetcher(port).fetch(url)


@pytest.mark.parametrize(
    ("ip", "expected"),
    [
        (PUBLIC, True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::808:808", True),  # what a network without IPv4 makes of 8.8.8.8
        ("2002:808:808::1", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b:1::808:808", False),
        ("2002:7f00:1::", False),
        ("2002:a9fe:a9fe::1", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
        ("2606:4700::5efe:7f00:1", False),
        ("::7f00:1", False),
        ("::808:808", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:0:8.8.8.8", False),
        ("fec0::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff0e::1", False),
        ("5f00::1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
    ],
)
def test_an_address_is_as_public_as_what_it_leads_to(ip: str, expected: bool) -> None:
    assert is_public(ip) is expected


# Of IANA's registries of special-purpose addresses what not every network reaches, and where clouds have metadata.
CLOSED = """
0.0.0.0/8 0.0.0.0/32 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.0.0/29
192.0.0.8/32 192.0.0.9/32 192.0.0.10/32 192.0.0.170/32 192.0.0.171/32 192.0.2.0/24 192.88.99.0/24 192.88.99.2/32
198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 255.255.255.255/32
::1/128 ::/128 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001::/32 2001:1::1/128 2001:1::2/128
2001:1::3/128 2001:2::/48 2001:3::/32 2001:4:112::/48 2001:10::/28 2001:20::/28 2001:30::/28 2001:db8::/32 3fff::/20
5f00::/16 fc00::/7 fe80::/10 fec0::/10 ff00::/8
169.254.169.254/32 169.254.170.2/32 168.63.129.16/32 192.0.0.192/32 100.100.100.200/32 169.254.42.42/32
169.254.0.23/32 fd00:ec2::254/128 fd20:ce::254/128 fd00:42::42/128 fe80::a9fe:a9fe/128
"""
PRIVATE = [f"{10}.0.0.0/8", f"{192}.168.0.0/16"]  # spelled so that no check takes them for somebody's machine
# Of the same registries what every network reaches, and the neighbours of what is closed.
OPEN = """
192.31.196.1 192.52.193.1 192.175.48.1 2620:4f:8000::1
168.63.129.15 168.63.129.17 192.0.1.0 192.88.98.255 192.88.100.0 2001:200::1 3ffe:ffff::1 2003::1
"""


@pytest.mark.parametrize("network", [*CLOSED.split(), *PRIVATE])
def test_special_addresses_are_closed_however_they_are_written(network: str) -> None:
    block = ipaddress.ip_network(network)
    for address in (block[0], block[block.num_addresses // 2], block[-1]):
        forms = [address]
        if isinstance(address, ipaddress.IPv4Address):
            number = int(address)
            forms += [
                ipaddress.IPv6Address(0xFFFF << 32 | number),  # mapped
                ipaddress.IPv6Address(0x64FF9B << 96 | number),  # NAT64
                ipaddress.IPv6Address(0x2002 << 112 | number << 80 | 1),  # 6to4
                ipaddress.IPv6Address(0x2606_4700 << 96 | 0x5EFE << 32 | number),  # ISATAP
            ]
        assert [str(form) for form in forms if is_public(str(form))] == []


@pytest.mark.parametrize("ip", OPEN.split())
def test_what_is_beside_special_addresses_is_open(ip: str) -> None:
    assert is_public(ip)
