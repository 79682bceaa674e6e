"""Batch jobs on real actors: killed again and again, in every way; long inputs; Ray Data.

TEST_BATCH_KILLS sets how many kills (20 is the full campaign), TEST_BATCH_LINES how long the long input is (100000).
These take longer than a test may: pytest -o faulthandler_timeout=0.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
import ray
from batch_jobs import (
    DEADLINE_S,
    actors_below,
    lines_that_failed,
    num_lines,
    start_job,
    texts_by_id,
    wait_for,
    write_prompts,
)

from raypp import LLM, SamplingParams
from raypp.testing import launch_in_threads

pytestmark = pytest.mark.ray

BAD_LINES = ["no JSON", '{"custom_id": "line-0", "prompt": "again"}', '{"custom_id": "refused", "prompt": 7}']
NUM_LONG_LINES = int(os.environ.get("TEST_BATCH_LINES", "600"))
MAX_MEMORY_MB = 500
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_data_parquet.py"
NUM_KILLS = int(os.environ.get("TEST_BATCH_KILLS", "2"))
IS_SHORT = NUM_KILLS <= 4
NUM_LINES = 160 if IS_SHORT else 300
MAX_TOKENS = 8 if IS_SHORT else 2 * NUM_KILLS  # so that a long campaign does not outlive its job
KINDS = ("job", "stage", "stop", "driver")
SEED = 20261121


@pytest.fixture(scope="module")
def job_env(local_ray) -> dict[str, str]:
    """Lets a job's process join the module's Ray."""
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


class Campaign:
    """A job that is started whenever it does not run, and killed as told."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.num_starts = 0
        self._env = env
        self._process: subprocess.Popen[str] | None = None

    def running(self) -> subprocess.Popen[str]:
        """Return the job's process, a new one if the last has ended."""
        if self._process is None or self._process.poll() is not None:
            self.num_starts += 1
            self._process = start_job(self.input, self.output, "--max-in-flight", "8", env=self._env)
        return self._process

    def kill(self, kind: str) -> str:
        """Kill something and return what was seen of it."""
        process = self.running()
        if kind in ("stop", "job"):
            started = time.monotonic()
            process.send_signal(signal.SIGTERM if kind == "stop" else signal.SIGKILL)
            process.communicate(timeout=DEADLINE_S)
            return f"exit code {process.returncode} after {time.monotonic() - started:.2f} s"
        name = "StageActor1" if kind == "stage" else "DriverActor"  # the title says which stage
        victim = wait_for(lambda: actors_below(os.getpid(), name), f"a {name}")[-1]
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        return f"pid {victim}"

    def finish(self) -> str:
        """Let it run to its end; return what it said."""
        process = self.running()
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
        return errors

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def campaign(tmp_path: Path, job_env: dict[str, str]) -> Iterator[Campaign]:
    campaign = Campaign(tmp_path, job_env)
    yield campaign
    campaign.close()


@pytest.mark.full
def test_every_line_is_answered_once_whatever_is_killed(campaign: Campaign) -> None:
    rng = random.Random(SEED)
    prompts = [f"def f{i}({rng.choice('abcxyz')}, {rng.randrange(100)}):" for i in range(NUM_LINES)]
    write_prompts(campaign.input, prompts, max_tokens=MAX_TOKENS)
    with campaign.input.open("a") as file:
        file.writelines(line + "\n" for line in BAD_LINES)
    with LLM("tiny", num_stages=2, launch=launch_in_threads) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
    expected = {f"line-{i}": output.outputs[0].text for i, output in enumerate(outputs)}

    for number in range(NUM_KILLS):
        kind = KINDS[number % len(KINDS)]
        campaign.running()
        before = num_lines(campaign.output)
        is_at_start = rng.random() < 0.25
        if is_at_start:  # somewhere between the first import and the first answers
            ends = time.monotonic() + rng.uniform(0.3, 6.0)
            while time.monotonic() < ends and num_lines(campaign.output) == before:
                time.sleep(0.02)
        else:  # the lines that are left are shared out to the kills that are left
            wanted = before + rng.randint(1, max(1, (NUM_LINES - before) // (NUM_KILLS - number + 1)))
            wait_for(lambda wanted=wanted: num_lines(campaign.output) >= wanted, f"{wanted} lines")
        at = num_lines(campaign.output)
        assert at < NUM_LINES, "nothing is left to be killed"
        seen = campaign.kill(kind)
        if kind == "stop" and not is_at_start:
            assert "exit code 143" in seen, seen
        print(f"kill {number + 1}: {kind} at {at} lines{' (starting)' if is_at_start else ''}: {seen}")

    said = campaign.finish()
    print(f"{campaign.num_starts} starts of the job; the last one said:\n{said}")
    assert texts_by_id(campaign.output) == expected
    assert lines_that_failed(campaign.output) == [NUM_LINES + i for i in (1, 2, 3)]
    assert f"nothing to do: {NUM_LINES + 3} lines, {NUM_LINES} completed, 3 failed" in campaign.finish()


@pytest.mark.full
def test_a_long_input_streams_through(job_env: dict[str, str], tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.jsonl", (f"def f{i}(" for i in range(NUM_LONG_LINES)), max_tokens=1)
    often = ("--progress-interval", "0.1")  # 600 lines take less than a second
    process = start_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", *often, env=job_env)
    _, said = process.communicate(timeout=DEADLINE_S + NUM_LONG_LINES / 50)
    assert process.returncode == 0, said
    print("\n" + "\n".join(said.splitlines()[-6:]))
    assert num_lines(tmp_path / "out.jsonl") == NUM_LONG_LINES
    memory = re.search(r"peak memory ([\d,]+) MB", said)
    assert memory is not None
    assert int(memory[1].replace(",", "")) < MAX_MEMORY_MB
    assert re.search(r"lines/s, [\d,]+ tokens/s, 0 failed, .* left", said), "no progress was reported"


@pytest.mark.full
def test_ray_data_from_parquet_to_parquet(job_env: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **job_env}, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("->") == 3
    rows = pyarrow.parquet.read_table(tmp_path / "completions").to_pylist()
    assert sorted(row["id"] for row in rows) == list(range(100))
    assert all(row["completion_num_tokens"] <= 8 and row["completion"] is not None for row in rows)
    assert all(row["completion_error"] is None for row in rows)
