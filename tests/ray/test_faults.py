"""A stage or a driver that dies: every request gets the named error, soon, and a new engine works at once."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from leftovers import is_alive, wait_until_gone

from raypp import LLM, EngineDeadError, SamplingParams, StageDiedError
from raypp.testing import FakeStage

pytestmark = pytest.mark.ray

PROMPT = {"prompt_token_ids": [1]}


@pytest.fixture
def llm(local_ray):
    with LLM("tiny", num_stages=2, stage_factory=FakeStage(step_ms=5), skip_tokenizer_init=True) as llm:
        yield llm


def _run_for_long(llm: LLM):
    return llm.generate([PROMPT], SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True))


def _kill_while_it_runs(llm: LLM, pid: int) -> tuple[Exception, float]:
    """Return what a running request ended with, and how long after the kill."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(_run_for_long, llm)
        ends = time.monotonic() + 30
        while llm.stats()["num_generated_tokens"] < 5:
            assert time.monotonic() < ends
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        error = pending.exception(timeout=30)
    assert error is not None
    return error, time.monotonic() - killed


def test_a_killed_stage_is_named(llm):
    processes = llm.processes()
    error, seconds = _kill_while_it_runs(llm, processes["stages"][1])
    assert isinstance(error, StageDiedError)
    assert error.stage_index == 1
    assert seconds < 2.0
    assert not wait_until_gone(processes["stages"], 5.0)
    llm.close()
    assert not is_alive(processes["driver"])


def test_a_killed_stage_is_noticed_while_the_engine_is_idle(llm):
    stages = llm.processes()["stages"]
    os.kill(stages[0], signal.SIGKILL)
    assert not wait_until_gone(stages, 5.0)
    with pytest.raises(StageDiedError) as caught:
        llm.generate([PROMPT], SamplingParams(max_tokens=2))
    assert caught.value.stage_index == 0


def test_a_killed_driver_ends_everything(llm):
    processes = llm.processes()
    error, seconds = _kill_while_it_runs(llm, processes["driver"])
    assert isinstance(error, EngineDeadError)
    assert seconds < 2.0
    assert not wait_until_gone(processes["stages"], 5.0)
