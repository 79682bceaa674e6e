"""A batch job that is killed, again and again, in every way: each line is answered once, as if nothing had happened.

TEST_BATCH_KILLS sets how many kills; 20 is the full campaign.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from batch_jobs import DEADLINE_S, actors_below, num_lines, start_job, texts_by_id, wait_for, write_prompts

from raypp import LLM, SamplingParams

pytestmark = pytest.mark.ray

NUM_LINES = 300
MAX_TOKENS = 24
NUM_KILLS = int(os.environ.get("TEST_BATCH_KILLS", "4"))
KINDS = ("stop", "job", "stage", "driver")
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
            self._process = start_job(self.input, self.output, "--max-in-flight", "16", env=self._env)
        return self._process

    def kill(self, kind: str) -> str:
        """Kill something and return what was seen of it."""
        process = self.running()
        if kind in ("stop", "job"):
            started = time.monotonic()
            process.send_signal(signal.SIGTERM if kind == "stop" else signal.SIGKILL)
            process.communicate(timeout=DEADLINE_S)
            return f"exit code {process.returncode} after {time.monotonic() - started:.2f} s"
        name = "StageActor" if kind == "stage" else "DriverActor"
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


def test_every_line_is_answered_once_whatever_is_killed(campaign: Campaign) -> None:
    rng = random.Random(SEED)
    prompts = [f"def f{i}({rng.choice('abcxyz')}, {rng.randrange(100)}):" for i in range(NUM_LINES)]
    write_prompts(campaign.input, prompts, max_tokens=MAX_TOKENS)
    with LLM("tiny", num_stages=2) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
    expected = {f"line-{i}": output.outputs[0].text for i, output in enumerate(outputs)}

    for number in range(NUM_KILLS):
        kind = KINDS[number % len(KINDS)]
        process = campaign.running()
        before = num_lines(campaign.output)
        is_at_start = rng.random() < 0.25
        if is_at_start:  # somewhere between the first import and the first answers
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.3, 6.0))
        else:
            wanted = min(before + rng.randint(1, 2 * NUM_LINES // (NUM_KILLS + 1)), NUM_LINES - 1)
            wait_for(lambda wanted=wanted: num_lines(campaign.output) >= wanted, f"{wanted} lines")
        at = num_lines(campaign.output)
        seen = campaign.kill(kind)
        print(f"kill {number + 1}: {kind} at {at} lines{' (starting)' if is_at_start else ''}: {seen}")

    said = campaign.finish()
    print(f"{campaign.num_starts} starts of the job; the last one said:\n{said}")
    assert texts_by_id(campaign.output) == expected
    assert "nothing to do: all 300 lines" in campaign.finish()


def test_a_stopped_job_ends_in_time_with_what_it_has(campaign: Campaign) -> None:
    write_prompts(campaign.input, ["def main("] * 50, max_tokens=200, ignore_eos=True)
    process = campaign.running()
    wait_for(lambda: num_lines(campaign.output) > 0, "a line")
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE_S)
    seconds = time.monotonic() - started
    print(f"\nended {seconds:.2f} s after SIGTERM")
    assert process.returncode == 143, errors
    assert seconds < 30  # 2.5 s and what a loaded machine adds
    assert "SIGTERM: stopping" in errors
    assert 0 < len(texts_by_id(campaign.output)) < 50
