"""The Serve app on a local Ray, as users deploy it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from ray import serve

from serve_app.app import build
from serve_app.running_serve import RunningServe, end_serve, start_serve


def free_port() -> int:
    """Return a port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Have Serve run, and no application afterwards; yields its address. It goes on until Ray ends."""
    running = RunningServe.of_this_cluster()
    port = free_port() if running is None else running.port
    if running is None:
        start_serve("127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        for name in serve.status().applications:
            serve.delete(name)


def end_serving() -> None:
    """End Serve, where there is one, before its Ray ends."""
    end_serve()


def deploy(arguments: dict[str, Any], *, name: str = "raypp", route_prefix: str = "/") -> None:
    """Deploy the app; returns when it can be used."""
    serve.run(build({"model": "tiny", **arguments}), name=name, route_prefix=route_prefix)


def wait_for(condition: Callable[[], bool], timeout_s: float = 150.0) -> float:
    """Wait until something holds; return how many seconds that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "waited in vain"
        time.sleep(0.02)
    return time.monotonic() - started


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's series over all labels."""
    lines = httpx.get(f"{url}/metrics", timeout=150).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
