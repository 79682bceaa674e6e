"""A server on a machine whose cores have other work: it starts, however long that takes, and ends in order.

BUSY_STARTS is the number of starts, one after the other: 10 is the full size.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from raypp.actors.processes import LocalProcess, await_end, with_descendants

pytestmark = pytest.mark.part("chaos")

NUM_BUSY_PER_CORE = 15
NUM_STARTS = int(os.environ.get("BUSY_STARTS", "1"))
START_S = 1800.0
WAIT_S = 300.0


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Have processes that never wait run beside the test: 30 on two cores."""
    count = NUM_BUSY_PER_CORE * len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
        assert all(process.poll() is None for process in busy), "the machine was not busy"
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait(WAIT_S)


@pytest.mark.parametrize("start", range(NUM_STARTS))
def test_a_server_starts_beside_busy_processes(busy_machine: None, note: Callable[[str], None], start: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "raypp", "serve", "tiny", "--num-stages", "2", "--port", str(port)]
    command += ["--start-timeout-s", f"{START_S:g}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        started: list[LocalProcess] = []
        watchdog = threading.Timer(START_S, server.kill)
        watchdog.start()
        try:
            assert server.stderr is not None
            said: list[str] = []
            for line in server.stderr:
                said.append(line)
                if "serving on" in line:
                    break
            else:
                pytest.fail("no start:\n" + "".join(said))
            started = with_descendants([LocalProcess.of_pid(server.pid)])
            note(
                f"`raypp serve` beside {NUM_BUSY_PER_CORE} busy processes per core: {time.monotonic() - begun_s:.0f} s"
            )
            body = {"prompt": "def main(", "max_tokens": 3}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=WAIT_S)
            assert answer.status_code == 200, answer.text
            server.send_signal(signal.SIGINT)
            assert server.wait(WAIT_S) == 0
        finally:
            watchdog.cancel()
            server.kill()
    assert await_end(started, WAIT_S) == []
