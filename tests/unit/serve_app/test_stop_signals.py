"""SIGINT and SIGTERM to a server that starts, that serves, and that is slow to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import threading
from serve_app.run import StopSignals

with StopSignals() as stop:
    stop.is_connected, stop.has_started = {connected}, {started}
    print("ready", flush=True)
    while stop.received is None:
        stop.wait()
    print("told", flush=True)
    if {hangs}:
        threading.Event().wait()
"""


def stopped(number: signal.Signals, *, times: int = 1, **state: bool) -> tuple[int, str, float]:
    """Send a signal, again when the first was taken; return the exit code, what was said, and seconds."""
    program = [sys.executable, "-c", PROGRAM.format(**{"connected": True, "started": False, "hangs": False, **state})]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        begun = time.monotonic()
        for _ in range(times):
            process.send_signal(number)
            said += process.stdout.readline()
        return process.wait(60), said, time.monotonic() - begun


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_without_a_cluster_there_is_nothing_to_take_down(number: signal.Signals, code: int) -> None:
    assert stopped(number, connected=False, hangs=True)[:2] == (code, "ready\n")


def test_what_starts_and_hangs_is_ended_within_the_three_seconds_of_a_stopped_job() -> None:
    code, said, seconds = stopped(signal.SIGTERM, hangs=True)
    assert (code, said) == (143, "ready\ntold\n")
    assert 2 < seconds < 30  # 2.5; the upper bound is a loaded machine's


def test_what_serves_is_taken_down_in_its_own_time_unless_told_twice() -> None:
    assert stopped(signal.SIGTERM, started=True)[:2] == (0, "ready\ntold\n")
    assert stopped(signal.SIGINT, times=2, started=True, hangs=True)[:2] == (130, "ready\ntold\n")
