"""A process ends with those that it works for, also where nobody collects zombies."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import textwrap

import pytest

from raypp.actors import processes
from raypp.actors.processes import ActorProcess, LocalProcess, end_with, live_with

WAIT_S = 20.0


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_zombie_has_ended(sleeper):
    process = LocalProcess.of_pid(sleeper.pid)
    assert process.is_alive()
    assert LocalProcess(process.pid, process.start_time + 1) != process
    assert not LocalProcess(process.pid, process.start_time + 1).is_alive(), "another one with its number"
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_alive()
    assert not LocalProcess.of_pid(sleeper.pid).is_alive()
    process.kill()  # does nothing


def test_the_end_of_any_owner_ends_the_process(sleeper):
    ended: queue.Queue[int] = queue.Queue()
    owners = [LocalProcess.of_this_process(), LocalProcess.of_pid(sleeper.pid)]
    end_with(owners, ended.put, poll_s=0.01)
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.1)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert ended.get(timeout=WAIT_S) == 1


def test_who_cannot_be_seen_is_not_waited_for():
    ended: queue.Queue[int] = queue.Queue()
    end_with([LocalProcess(os.getpid(), 1)], ended.put, poll_s=0.01)  # in another container, by its number
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.1)


@pytest.mark.parametrize(("node_id", "num_owners"), [("here", 2), ("elsewhere", 1)])
def test_an_actor_lives_with_its_owner_if_that_is_on_its_node_and_with_its_raylet(monkeypatch, node_id, num_owners):
    watched: list[LocalProcess] = []
    here = ActorProcess("here", LocalProcess.of_this_process())
    monkeypatch.setattr(ActorProcess, "of_this_process", lambda: here)
    monkeypatch.setattr(processes, "end_with", watched.extend)
    owner = ActorProcess(node_id, LocalProcess(5, 6))
    assert live_with(owner) is here
    assert watched == [LocalProcess.of_pid(os.getppid()), owner.process][:num_owners]


def test_the_process_really_ends(sleeper):
    script = textwrap.dedent(
        """
        import sys, threading
        from raypp.actors.processes import end_with
        from raypp.actors.processes import LocalProcess
        end_with([LocalProcess.of_pid(int(sys.argv[1]))], poll_s=0.01)
        print("watching", flush=True)
        threading.Event().wait()
        """
    )
    command = [sys.executable, "-c", script, str(sleeper.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        sleeper.kill()
        assert process.wait(WAIT_S) == 1
