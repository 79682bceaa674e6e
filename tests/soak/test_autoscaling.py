"""Engines come with the load and go with it, and no answer is cut off by that."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import ray
from ray import serve

from serve_app.app import build
from serve_app.running_serve import end_serve, start_serve

pytestmark = pytest.mark.part("chaos")

WAIT_S = 150.0
NUM_ROWS = 4


@pytest.fixture
def url() -> Iterator[str]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        start_serve("127.0.0.1", port)
        settings = {"max_replicas": 2, "upscale_delay_s": 0.5, "downscale_delay_s": 1.0, "drain_timeout_s": 60.0}
        serve.run(build({"model": "tiny", "num_stages": 1, "max_num_seqs": NUM_ROWS, **settings}), name="raypp")
        yield f"http://127.0.0.1:{port}"
    finally:
        end_serve()
        ray.shutdown()


class Load:
    """Clients that stream one answer after the other until told to stop."""

    def __init__(self, url: str, num_clients: int) -> None:
        self.is_over = False
        self.last_lines: list[str] = []
        self._url = url
        self._threads = [threading.Thread(target=self._run) for _ in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.is_over = True
        for thread in self._threads:
            thread.join(WAIT_S)

    def _run(self) -> None:
        body = {"prompt": "def main(", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        while not self.is_over:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=WAIT_S) as answer:
                self.last_lines.append([line for line in answer.iter_lines() if line][-1])


def seconds_until(num_engines: int, url: str) -> float:
    """Wait until there are as many engines; return how long that took."""
    started = time.monotonic()
    while True:
        text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
        if sum(map(float, re.findall(r"^raypp_engine_up\{.*\} (\S+)$", text, re.MULTILINE))) == num_engines:
            return time.monotonic() - started
        assert time.monotonic() - started < WAIT_S, text
        time.sleep(0.5)


def test_engines_follow_the_load(url: str, note: Callable[[str], None]) -> None:
    loads = [Load(url, 2), Load(url, 3 * NUM_ROWS - 2)]
    try:
        added_s = seconds_until(2, url)
        loads[1].end()  # what is left is work for one engine, and may be at either
        taken_s = seconds_until(1, url)
    finally:
        for load in loads:
            load.end()
    last_lines = [line for load in loads for line in load.last_lines]
    note(
        f"autoscaling: a second engine after {added_s:.0f} s of load, one again {taken_s:.0f} s after its end; "
        f"{len(last_lines)} streams, all whole"
    )
    assert set(last_lines) == {"data: [DONE]"}
