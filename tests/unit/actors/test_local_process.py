"""What /proc tells of processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from raypp.actors.processes import LocalProcess

WAIT_S = 20.0


def test_a_stopped_process_is_known() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        known = LocalProcess.of_pid(process.pid)
        assert not known.is_stopped()
        process.send_signal(signal.SIGSTOP)
        ends_s = time.monotonic() + WAIT_S
        while not known.is_stopped() and time.monotonic() < ends_s:
            time.sleep(0.005)
        assert known.is_stopped()
        process.kill()
    assert not known.is_stopped()
