"""Stages of several members as processes: texts, and what follows when one dies, freezes or does not start."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
from engine_listener import EngineListener
from leftovers import actor_processes, listening_ports, raypp_processes, unused_shared_memory, wait_until_gone
from ray import cloudpickle
from recovery_campaign import Report, picture_engine, run_campaign, text_engine
from sizes import sized

from raypp import LLM, SamplingParams, StageDiedError
from raypp.actors.engine_actors import EngineHandle, launch_engine
from raypp.config.engine_config import EngineConfig
from raypp.errors import RayppError
from raypp.stage.build_stage import StageFactory
from raypp.testing import launch_in_threads
from raypp.testing.fake_stage import FakeModel

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module

WAIT_S = 150.0  # for what is expected; only a hang takes this long
FROZEN_S = 2.0
NUM_MEMBERS = 2
MEMBERS = {"num_stages": 2, "tensor_parallel_size": NUM_MEMBERS, "device": "cpu", "stage_num_threads": 1}
FAULTS = {"step_timeout_s": FROZEN_S, "heartbeat_s": 0.2, "close_timeout_s": 4.0}
PROMPTS = ["def main(", "import os", "class Node:", "for i in"]
KINDS = {"greedy", "seeded", "seeded penalties", "logprobs", "seeded json", "seeded, 2 continuations", "stop strings"}


def _wait_for(condition: Callable[[], object], what: str) -> None:
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends, f"never: {what}"
        time.sleep(0.005)


def _params(max_tokens: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"n": 2, "temperature": 0.7},
        {"temperature": 0.7, "frequency_penalty": 0.5, "logprobs": 1},
        {"stop": ["zzz"], "prompt_logprobs": 1},
        {"temperature": 0.7, "ignore_eos": False, "structured_outputs": {"regex": f"[a-z ]{{{4 * max_tokens}}}"}},
    ]
    return [
        SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "seed": i, "ignore_eos": True} | kind)
        for i, kind in enumerate(kinds)
    ]


def _tokens(llm: LLM, max_tokens: int) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, _params(max_tokens))
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


class _Watched:
    """An engine, and what is heard of it."""

    def __init__(self) -> None:
        self.listener = EngineListener()

    def launch(self, config: EngineConfig, *, stage_factory: StageFactory | None = None) -> EngineHandle:
        self.handle = launch_engine(config, stage_factory=stage_factory)
        self.handle.watch(self.listener)
        return self.handle


@pytest.mark.parametrize("transport", ["gloo", pytest.param("ray_collective", marks=pytest.mark.full)])
def test_texts_stay_and_other_stages_are_kept_when_a_member_dies_or_freezes(transport: str) -> None:
    num_tokens = sized(40, 160)
    with LLM("tiny", launch=launch_in_threads) as llm:
        right = _tokens(llm, num_tokens)
    before, watched = raypp_processes(), _Watched()
    memory_before = unused_shared_memory()
    options = {"transport": transport, "mode": "full_and_piecewise"}  # padded steps, called
    options |= {"max_num_seqs": 8, "max_num_batched_tokens": 32}  # few sizes to warm up
    with LLM("tiny", launch=watched.launch, max_engine_restarts=3, **options, **MEMBERS, **FAULTS) as llm:
        assert len(llm.processes()["stages"]) == 2 * NUM_MEMBERS
        num_ports = {pid: len(listening_ports(pid)) for pid in llm.processes()["stages"]}
        for index, (number, words) in {3: (signal.SIGKILL, "died"), 0: (signal.SIGSTOP, "is frozen")}.items():
            old, listener = llm.processes()["stages"], watched.listener
            num_before = llm.stats()["num_generated_tokens"]
            with ThreadPoolExecutor(1) as pool:
                pending = pool.submit(_tokens, llm, num_tokens)
                _wait_for(lambda n=num_before: llm.stats()["num_generated_tokens"] > n + 20, "tokens")
                hit_s = time.monotonic()
                listener.hears("lost", "back", after=lambda pid=old[index], number=number: os.kill(pid, number))
                assert pending.result(WAIT_S) == right
            recovery, new = watched.handle.recoveries()[-1], llm.processes()["stages"]
            print(f"\n{recovery}, {time.monotonic() - hit_s:.1f} s to the end of all texts")
            assert f"member {index % NUM_MEMBERS} of stage {index // NUM_MEMBERS} {words}" in recovery.died
            assert not wait_until_gone([old[index]], 0.0)
            kept = [place for place in range(len(old)) if old[place] == new[place]]
            assert kept == [place for place in range(len(old)) if place != index], "all others keep their weights"
            assert recovery.last_start.num_kept_stages == len(kept)
            error = listener.errors[-1]
            assert isinstance(error, StageDiedError)
            assert error.stage_index == index // NUM_MEMBERS
        assert _tokens(llm, num_tokens) == right
        survivors = [pid for pid in llm.processes()["stages"] if pid in num_ports]
        if transport == "gloo":  # what Ray's collectives leave behind is not known
            assert [len(listening_ports(pid)) for pid in survivors] == [num_ports[pid] for pid in survivors]
        assert llm.stats()["recoveries"]["num_carried_over"] == 2 * len(PROMPTS)
    assert not wait_until_gone(raypp_processes() - before, 1.0)
    _wait_for(lambda: not unused_shared_memory() - memory_before, "no shared memory left")


@dataclass(frozen=True)
class Misbehaving:
    """A stage factory; one member does not come through."""

    makes_members = True  # which never get to compute

    deed: str
    stage_index: int
    rank: int = 1

    def __call__(self, spec, config):
        if (spec.stage_index, spec.rank) == (self.stage_index, self.rank):
            if self.deed == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("while it loads")
        return FakeModel(0.005, config.vocab_size)


@pytest.mark.parametrize(
    ("deed", "stage_index", "words"),
    [
        ("die", 0, "member 1 of stage 0 died loading the model"),
        pytest.param("die", 1, "member 1 of stage 1 died loading the model", marks=pytest.mark.full),
        pytest.param("raise", 1, "member 1 of stage 1 failed.*while it loads", marks=pytest.mark.full),
    ],
)
def test_a_member_that_cannot_start_is_named(deed: str, stage_index: int, words: str) -> None:
    before = set(actor_processes())
    with pytest.raises(RayppError) as caught:
        LLM(
            "tiny",
            stage_factory=Misbehaving(deed, stage_index),
            skip_tokenizer_init=True,
            close_timeout_s=4.0,
            **MEMBERS | {"num_stages": stage_index + 1},
        )
    assert isinstance(caught.value, StageDiedError)
    assert caught.value.stage_index == stage_index
    assert re.search(words, str(caught.value))
    assert not wait_until_gone(set(actor_processes()) - before, WAIT_S)


@pytest.mark.full  # all kinds of requests; a few are above
def test_requests_outlive_members() -> None:
    setting = text_engine("members", ("stage 3",), **MEMBERS)
    few = tuple(one for one in setting.asked if one.name in KINDS)
    assert len(few) == len(KINDS)
    report: Report = asyncio.run(run_campaign(replace(setting, asked=few), 1, 0))
    print(report)
    assert report.comparison.num_excused <= max(1, report.comparison.num_tokens // 1000)


def test_images_reach_all_members_also_of_an_encoder_that_died() -> None:
    setting = picture_engine("members with pictures", **MEMBERS)
    few = replace(setting, asked=setting.asked[:4], deaths=("encoder",))
    report: Report = asyncio.run(run_campaign(few, 1, 0))
    print(report)
    assert report.comparison.num_excused <= max(1, report.comparison.num_tokens // 1000)
