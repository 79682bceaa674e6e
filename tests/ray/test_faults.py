"""Stages and drivers that die, freeze or fail: requests get the named error, soon, and a new engine works at once.

FAULT_KILLS=20 runs the whole campaign of kills; by default there are as many as CI has time for.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import ray
from leftovers import actor_processes, is_alive, meeting_places, wait_until_gone
from ray import cloudpickle

from raypp import LLM, EngineDeadError, SamplingParams, StageDiedError
from raypp.errors import DeadlineError, RayppError
from raypp.testing import FakeStage
from raypp.testing.fake_stage import FakeModel
from raypp.tracing import read_chrome_trace

pytestmark = pytest.mark.ray

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module

NUM_KILLS = int(os.environ.get("FAULT_KILLS", "4"))
PROMPT = {"prompt_token_ids": [1]}
ENDLESS = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
WAIT_S = 150.0  # for what is expected; only a hang takes this long
SOON_S = 2.0


def _open(**settings) -> LLM:
    return LLM("tiny", num_stages=2, stage_factory=FakeStage(step_ms=5), skip_tokenizer_init=True, **settings)


@pytest.fixture
def llm(local_ray):
    with _open() as llm:
        yield llm


def _wait_for(condition, what: str) -> None:
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends, f"never: {what}"
        time.sleep(0.005)


def _signal_while_it_runs(llm: LLM, pid: int, number: int) -> tuple[RayppError, float]:
    """Return what a running request ended with, and how long after the signal."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(llm.generate, [PROMPT], ENDLESS)
        _wait_for(lambda: llm.stats()["num_generated_tokens"] >= 5, "five tokens")
        signalled = time.monotonic()
        os.kill(pid, number)
        error = pending.exception(timeout=WAIT_S)
        seconds = time.monotonic() - signalled
    assert isinstance(error, RayppError)
    return error, seconds


def test_a_killed_stage_is_named(llm):
    processes = llm.processes()
    error, seconds = _signal_while_it_runs(llm, processes["stages"][1], signal.SIGKILL)
    assert isinstance(error, StageDiedError)
    assert error.stage_index == 1
    assert seconds < SOON_S
    assert not wait_until_gone(processes["stages"], 20.0)
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
    error, seconds = _signal_while_it_runs(llm, processes["driver"], signal.SIGKILL)
    assert isinstance(error, EngineDeadError)
    assert seconds < SOON_S
    assert not wait_until_gone(processes["stages"], 20.0)


@pytest.mark.parametrize("victim", ["stage 1", "driver"])
def test_a_stopped_process_is_reported_in_time_and_ended(local_ray, victim):
    timeout_s = 1.5
    with _open(step_timeout_s=timeout_s, heartbeat_s=0.1, close_timeout_s=3.0) as llm:
        processes = llm.processes()
        pid = processes["stages"][1] if victim == "stage 1" else processes["driver"]
        error, seconds = _signal_while_it_runs(llm, pid, signal.SIGSTOP)
    print(f"\n{victim} stopped: {type(error).__name__} after {seconds:.2f} s, step_timeout_s={timeout_s}")
    assert isinstance(error, EngineDeadError)
    assert f"{victim} is frozen" in str(error)
    assert timeout_s * 0.9 <= seconds < timeout_s + SOON_S
    assert not wait_until_gone([processes["driver"], *processes["stages"]], 5.0)


def test_a_stage_that_is_stopped_while_nothing_runs_is_reported_too(local_ray):
    with _open(step_timeout_s=1.0, heartbeat_s=0.1, close_timeout_s=3.0) as llm:
        stages = llm.processes()["stages"]
        os.kill(stages[0], signal.SIGSTOP)
        assert not wait_until_gone(stages[1:], WAIT_S), "the driver ends the stages"
        with pytest.raises(StageDiedError, match="stage 0 is frozen"):
            llm.generate([PROMPT], SamplingParams(max_tokens=2))
    assert not wait_until_gone(stages, 5.0)


@dataclass(frozen=True)
class Misbehaving:
    """A stage factory of which one stage does something else instead of loading or stepping."""

    deed: str
    stage_index: int = 1

    def __call__(self, spec, config):
        if spec.stage_index == self.stage_index:
            if self.deed == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.deed == "raise":
                raise ZeroDivisionError("while it loads")
            if self.deed == "hang":
                threading.Event().wait()
        model = FakeModel(0.005, config.vocab_size)
        if self.deed == "fail later" and spec.stage_index == self.stage_index:
            forward, num_calls = model.forward, iter(range(100))

            def failing(*args):
                if next(num_calls) == 10:
                    raise ZeroDivisionError("in the tenth step")
                return forward(*args)

            model.forward = failing
        return model


@pytest.mark.parametrize(
    ("deed", "kind", "words"),
    [
        ("die", StageDiedError, "stage 1 died loading the model"),
        ("raise", StageDiedError, "stage 1 failed.*ZeroDivisionError: while it loads"),
        ("hang", DeadlineError, "stage 1 took too long (loading|starting)"),
    ],
)
def test_a_stage_that_cannot_start_is_named(local_ray, deed, kind, words):
    before = actor_processes()
    timeout_s = 12.0 if deed == "hang" else WAIT_S
    started = time.monotonic()
    with pytest.raises(kind, match=words):
        LLM(
            "tiny",
            num_stages=2,
            stage_factory=Misbehaving(deed),
            skip_tokenizer_init=True,
            start_timeout_s=timeout_s,
            close_timeout_s=4.0,
        )
    if deed == "hang":
        assert time.monotonic() - started < timeout_s + 8.0, "one deadline for the whole start"
    assert not wait_until_gone(set(actor_processes()) - set(before), 5.0)


def test_a_step_that_fails_is_explained_and_a_trace_is_still_written(local_ray, tmp_path):
    path = tmp_path / "trace.json"
    with (
        LLM(
            "tiny", num_stages=2, stage_factory=Misbehaving("fail later"), skip_tokenizer_init=True, trace=str(path)
        ) as llm,
        pytest.raises(StageDiedError, match=r"stage 1 failed.*in the tenth step") as caught,
    ):
        llm.generate([PROMPT], ENDLESS)
    assert caught.value.stage_index == 1
    lanes = read_chrome_trace(path)
    assert [lane.name for lane in lanes] == ["driver", "stage 0", "stage 1"]
    assert len({event.step_id for event in lanes[2].events}) == 10


# --- the campaign: kill -9 at random moments ---


def _open_tiny() -> LLM:
    return LLM("tiny", num_stages=2, max_num_batched_tokens=256, skip_tokenizer_init=True)


def _quiet_tokens(llm: LLM) -> list[int]:
    [output] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=8, temperature=0.0))
    return output.outputs[0].token_ids


class Killer:
    """Kills one process of an engine at a random moment, start-up and prefill included, and watches what follows."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.moment = rng.choice(["start", "start", "prefill", "decode"])
        self.victim = rng.choice(["DriverActor", "StageActor"])
        self.killed_s = 0.0
        self.quiet_tokens: list[int] | None = None  # what the engine said before it was hit

    def run(self) -> None:
        before = set(actor_processes())
        with ThreadPoolExecutor(4) as pool:
            opening: Future[LLM] = pool.submit(_open_tiny)
            if self.moment == "start":
                _wait_for(lambda: self._victims(before) or opening.done(), f"a process of {self.victim}")
                time.sleep(self._rng.uniform(0.0, 2.5))
                if not opening.done():
                    self._kill(before)
                    self._check(opening)
                    return
            with opening.result(WAIT_S) as llm:
                self.quiet_tokens = _quiet_tokens(llm)
                pending = [pool.submit(self._generate, llm) for _ in range(3)]
                if self.moment == "decode":
                    _wait_for(lambda: llm.stats()["num_generated_tokens"] > 30, "decoding")
                time.sleep(self._rng.uniform(0.0, 0.3))
                self._kill(before)
                for request in pending:
                    self._check(request)

    def _generate(self, llm: LLM):
        prompt_len = 1500 if self.moment == "prefill" else 3
        prompts = [{"prompt_token_ids": [5 + i] * prompt_len} for i in range(3)]
        return llm.generate(prompts, SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True))

    def _victims(self, before: set[int]) -> list[int]:
        return sorted(pid for pid, name in actor_processes().items() if name == self.victim and pid not in before)

    def _kill(self, before: set[int]) -> None:
        victims = self._victims(before)
        self.killed_s = time.monotonic()
        if victims:
            os.kill(self._rng.choice(victims), signal.SIGKILL)

    def _check(self, pending: Future) -> None:
        error = pending.exception(WAIT_S)
        seconds = time.monotonic() - self.killed_s
        print(f"{self.moment:8} {self.victim:12} {type(error).__name__} {seconds:.2f} s")
        assert isinstance(error, EngineDeadError), repr(error)
        assert isinstance(error, StageDiedError) or self.victim == "DriverActor" or self.moment == "start"
        assert seconds < SOON_S


def test_kills_at_random_moments(local_ray):
    places, processes = meeting_places(), set(actor_processes())
    rng = random.Random(os.environ.get("FAULT_SEED", "kill -9"))
    outputs = []
    for _ in range(NUM_KILLS):
        killer = Killer(rng)
        killer.run()
        if killer.quiet_tokens is not None:
            outputs.append(killer.quiet_tokens)
    with _open_tiny() as llm:
        outputs.append(_quiet_tokens(llm))
    assert all(tokens == outputs[0] for tokens in outputs), "every new engine works, at once"
    assert not wait_until_gone(set(actor_processes()) - processes, 5.0)
    _wait_for(lambda: meeting_places() <= places, "no folder left")
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} == {"REMOVED"}
