"""An address where no Ray is, is noticed before Ray tries for minutes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from raypp.actors.cluster import check_reachable
from raypp.errors import ResourceError


@pytest.fixture
def listen() -> Iterator[Callable[[bytes], str]]:
    """Start a server that answers every connection with the same bytes; return its address."""
    servers = []

    def start(answer: bytes) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve() -> None:
            connection, _ = server.accept()
            connection.sendall(answer)
            with suppress(ConnectionResetError):  # by one that has heard enough
                connection.recv(1024)
            if answer:
                connection.close()
            else:
                servers.append(connection)  # silent, and open

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


def test_nobody() -> None:
    with pytest.raises(ResourceError, match="refused"):
        check_reachable("127.0.0.1:9")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"hello"])
def test_somebody_else(listen: Callable[[bytes], str], answer: bytes) -> None:
    with pytest.raises(ResourceError, match="cannot be reached") as caught:
        check_reachable(listen(answer), timeout_s=0.5)
    assert caught.value.hint is not None


def test_what_greets_like_grpc(listen: Callable[[bytes], str]) -> None:
    check_reachable(listen(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])))


def test_other_forms_are_left_to_ray() -> None:
    check_reachable("auto")
    check_reachable("local")
