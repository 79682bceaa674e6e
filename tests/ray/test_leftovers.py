"""Closing, Ctrl-C, an exception and kill -9 leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from leftovers import (
    is_alive,
    listening_ports,
    meeting_places,
    raypp_processes,
    shared_memory,
    wait_until_gone,
)

# Its ports and shared memory are looked for all over the machine.
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("no_ray")]

USER = textwrap.dedent(
    """
    import json, os, sys, threading
    from raypp import LLM, SamplingParams
    from raypp.testing import FakeStage

    with LLM("tiny", num_stages=2, stage_factory=FakeStage(step_ms=5), skip_tokenizer_init=True) as llm:
        processes = llm.processes()
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=2))
        print(json.dumps([processes["driver"], *processes["stages"]]), flush=True)
        if sys.argv[1] == "close":
            if (child := os.fork()) == 0:
                sys.exit()
            os.waitpid(child, 0)
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=2))
        if sys.argv[1] == "exception":
            raise KeyError("the user's own")
        if sys.argv[1] != "close":
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1000, ignore_eos=True))
    """
)


WAIT_S = 60.0  # for what is expected, on whatever machine


@pytest.fixture
def user(folder):
    """Run the user's program in its own process group; yields a starter."""
    started = []

    def start(ending: str):
        process = subprocess.Popen(
            [sys.executable, "-c", USER, ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        started.append(process)
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return process, json.loads(line)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("ending", "signal_number", "exit_codes"),
    [
        ("close", None, (0,)),  # after a forked child that ends normally
        ("exception", None, (1,)),
        ("wait", signal.SIGINT, (1, -signal.SIGINT)),
        ("wait", signal.SIGTERM, (143,)),
        ("wait", signal.SIGKILL, (-signal.SIGKILL,)),
    ],
)
def test_nothing_is_left(user, folder, ending, signal_number, exit_codes):
    shm, ports, actors = shared_memory(), listening_ports(), raypp_processes()
    process, pids = user(ending)
    assert all(is_alive(pid) for pid in pids) or ending != "wait"
    if signal_number is not None:
        # A terminal's Ctrl-C reaches the whole process group, Ray's workers included.
        (os.killpg if signal_number == signal.SIGINT else os.kill)(process.pid, signal_number)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode in exit_codes, errors
    if ending == "exception":
        assert "KeyError" in errors
    assert not wait_until_gone({*pids, *raypp_processes()} - actors, WAIT_S)
    assert not meeting_places(folder)
    if signal_number != signal.SIGKILL:  # then Ray's own agents end a little later
        # Others on the machine come and go.
        ends = time.monotonic() + WAIT_S
        while not (shared_memory() <= shm and listening_ports() <= ports) and time.monotonic() < ends:
            time.sleep(0.1)
        assert shared_memory() <= shm
        assert listening_ports() <= ports
