"""Fetching what a stranger names: only public addresses, in time, of a bounded size; never a second look-up."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import SplitResult

import pytest

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError
from raypp.pictures.fetch import Fetcher

PUBLIC = "93.184.215.14"


class _Site(BaseHTTPRequestHandler):
    """Answers by path."""

    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        if self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(200):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
            return
        self.send_response(200 if self.path == "/a.png?x=1" else 404)
        self.end_headers()
        self.wfile.write(self.headers["Host"].encode() + b" " + bytes(1000))

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

    def resolve(host: str, _: int) -> list[str]:
        if asked is not None:
            asked.append(host)
        return {"inside.example": ["172.16.0.7"], "half.example": [PUBLIC, "127.0.0.1"]}.get(host, [PUBLIC])

    def connect(url: SplitResult, ip: str, timeout_s: float) -> http.client.HTTPConnection:
        assert ip == PUBLIC
        return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)

    section = ImagesSection.model_validate({"allow_image_urls": True, **limits})
    return Fetcher(section, resolve, connect)


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
            _fetcher(port, image_url_timeout_s=0.3).fetch("http://a.example/slow")
    with pytest.raises(RequestError, match="cannot be fetched"):
        _fetcher(port).fetch("http://a.example/a.png?x=1")  # nobody listens there any more
    with pytest.raises(RequestError, match="user"):
        _fetcher(port).fetch("http://me:secret@a.example/a.png")
