"""A process that stands still while nothing can be heard of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from raypp.actors.processes import ActorProcess, LocalProcess, StoppedProcesses

WAIT_S = 20.0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def found_within(stopped: StoppedProcesses, process: ActorProcess, seconds: float) -> float | None:
    """Return for how long it had been stopped when that was said; None if it was not."""
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        if (found := stopped.first_of([process])) is not None:
            assert found[0] == process
            return found[1]
        time.sleep(0.01)
    return None


def test_one_that_is_stopped_for_long_is_found(child: subprocess.Popen[bytes]) -> None:
    process = ActorProcess("here", LocalProcess.of_pid(child.pid))
    stopped = StoppedProcesses("here", 0.3)
    assert stopped.first_of([process]) is None
    child.send_signal(signal.SIGSTOP)
    seconds = found_within(stopped, process, WAIT_S)
    assert seconds is not None
    assert seconds > 0.3


def test_one_that_goes_on_in_time_begins_anew(child: subprocess.Popen[bytes]) -> None:
    process = ActorProcess("here", LocalProcess.of_pid(child.pid))
    stopped = StoppedProcesses("here", 1000.0)
    child.send_signal(signal.SIGSTOP)
    assert found_within(stopped, process, 0.1) is None
    child.send_signal(signal.SIGCONT)
    ends_s = time.monotonic() + WAIT_S
    while stopped._since_s and time.monotonic() < ends_s:
        stopped.first_of([process])
    assert not stopped._since_s


def test_of_other_machines_nothing_is_known(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    process = ActorProcess("there", LocalProcess.of_pid(child.pid))
    assert found_within(StoppedProcesses("here", 0.0), process, 0.1) is None
