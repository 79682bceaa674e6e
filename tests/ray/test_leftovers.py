"""Closing, Ctrl-C, an exception and kill -9 leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from leftovers import (
    is_alive,
    meeting_places,
    processes_with,
    raypp_processes,
    shared_memory,
    unused_shared_memory,
    wait_until_gone,
)
from sizes import sized

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
AT_ONCE = 2  # programs: while one starts its Ray, a core has time for another


@dataclass(frozen=True)
class Ending:
    """How a user's program ends."""

    argument: str
    exit_codes: tuple[int, ...]
    signal_number: int | None = None


ENDINGS = {
    "close": Ending("close", (0,)),  # after a forked child that ends normally
    "exception": Ending("exception", (1,)),
    "Ctrl-C": Ending("wait", (1, -signal.SIGINT), signal.SIGINT),
    "SIGTERM": Ending("wait", (143,), signal.SIGTERM),
}
IN_CI = ("close",)
NAMES = [name if name in IN_CI else pytest.param(name, marks=pytest.mark.full) for name in ENDINGS]
SIGKILL = Ending("wait", (-signal.SIGKILL,), signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    exit_code: int
    errors: str
    engine: list[int]  # its processes
    was_alive: bool  # when the program was told to end
    folder: Path


@dataclass(frozen=True)
class Seen:
    """What is on the machine; others come and go."""

    shared_memory: set[str]
    actors: set[int]

    @classmethod
    def now(cls) -> Seen:
        return cls(shared_memory(), raypp_processes())


def run_to_its_end(ending: Ending, folder: Path) -> Ended:
    """Run the user's program in its own process group."""
    with subprocess.Popen(
        [sys.executable, "-c", USER, ending.argument],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate(timeout=WAIT_S)
            engine = json.loads(line)
            was_alive = all(is_alive(pid) for pid in engine)
            if ending.signal_number is not None:
                # A terminal's Ctrl-C reaches the whole process group, Ray's workers included.
                send = os.killpg if ending.signal_number == signal.SIGINT else os.kill
                send(process.pid, ending.signal_number)
            _, errors = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    return Ended(process.returncode, errors, engine, was_alive, folder)


def check(ending: Ending, ended: Ended, before: Seen) -> None:
    """Check that a program has ended as it should, and its engine with it."""
    assert ended.was_alive or ending.argument != "wait"
    assert ended.exit_code in ending.exit_codes, ended.errors
    if ending.argument == "exception":
        assert "KeyError" in ended.errors
    assert not wait_until_gone({*ended.engine, *raypp_processes()} - before.actors, WAIT_S)
    assert not meeting_places(ended.folder)


@pytest.fixture(scope="module")
def before(no_ray: None) -> Seen:
    """Return what was there before any program ran."""
    return Seen.now()


@pytest.fixture(scope="module")
def ended(before: Seen) -> Iterator[dict[str, Ended]]:
    """Return the programs, which have all ended."""
    with ThreadPoolExecutor(AT_ONCE) as pool, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        running = {}
        for index, name in enumerate(sized(IN_CI, tuple(ENDINGS))):
            own = Path(folder) / str(index)
            own.mkdir()
            running[name] = pool.submit(run_to_its_end, ENDINGS[name], own)
        yield {name: program.result() for name, program in running.items()}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left(name: str, before: Seen, ended: dict[str, Ended]) -> None:
    check(ENDINGS[name], ended[name], before)
    assert not wait_until_gone(processes_with("TMPDIR", str(ended[name].folder)), WAIT_S)  # nor the ports of Ray's
    ends = time.monotonic() + WAIT_S
    while (left := unused_shared_memory() - before.shared_memory) and time.monotonic() < ends:
        time.sleep(0.1)  # what a test beside this one has just let go
    assert not left


@pytest.mark.full
def test_no_process_is_left_by_a_program_that_is_killed(before: Seen, folder: Path) -> None:
    check(SIGKILL, run_to_its_end(SIGKILL, folder), before)  # Ray's own agents end a little later
