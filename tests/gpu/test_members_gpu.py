"""A stage of two members on two GPUs: sums in 16 bits against one GPU, and members that die or freeze.

Against transformers in float32: `test_engine_gpu.py`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from answer_comparison import num_parted_at_ties
from hf_models import make_checkpoint, sizes_for_members
from sampling_reference import Case

from raypp import LLM, SamplingParams
from raypp.actors.engine_actors import launch_engine
from raypp.config.engine_config import EngineConfig

WAIT_S = 150.0
TIE = 0.1  # of the deviation of scores
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "num_kv_blocks": 2000,
    "skip_tokenizer_init": True,
}
MEMBERS = {"num_stages": 1, "tensor_parallel_size": 2}
FAULTS = {"step_timeout_s": 5.0, "heartbeat_s": 0.2, "close_timeout_s": 4.0, "max_engine_restarts": 3}


def _cases(num_tokens: int, count: int = 12) -> list[Case]:
    rng = random.Random(1)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return [Case([rng.randrange(128) for _ in range(rng.randint(1, 100))], params) for _ in range(count)]


def _generate(llm: LLM, num_tokens: int, **params: Any) -> list[list[int]]:
    cases = _cases(num_tokens)
    asked = replace(cases[0].params, **params)
    outputs = llm.generate([{"prompt_token_ids": case.prompt} for case in cases], asked)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    sizes = sizes_for_members("qwen3", 2, 1)
    return str(make_checkpoint("qwen3", 1, tmp_path_factory.mktemp("model"), min_layers=4, **sizes))


def test_two_members_say_what_one_gpu_says_but_for_rounding(model):
    with LLM(model, num_stages=1, **SETTINGS) as llm:
        expected = _generate(llm, 24)
    with LLM(model, **MEMBERS, **SETTINGS) as llm:
        found = _generate(llm, 24)
        assert all(stage["num_unrecorded"]["rows"] == 0 for stage in llm.stats()["stages"])
    cases = [(case, case) for case in _cases(24)]
    num_parted_at_ties(Path(model), cases, list(zip(expected, found, strict=True)), TIE)


def test_draws_of_one_token_are_greedy(model):
    with LLM(model, **MEMBERS, **SETTINGS) as llm:
        expected = _generate(llm, 24)
        for truncation in ({"top_k": 1}, {"top_p": 1e-6}, {"top_k": 20, "top_p": 1e-6, "min_p": 0.5}, {"min_p": 1.0}):
            found = _generate(llm, 24, temperature=1.0, seed=7, **truncation)
            cases = [(case, case) for case in _cases(24)]
            num_parted_at_ties(Path(model), cases, list(zip(expected, found, strict=True)), TIE)
        drawn = _generate(llm, 24, temperature=0.9, seed=7, top_k=20, top_p=0.95)
        assert [len(text) for text in drawn] == [24] * len(expected)
        assert drawn != expected
        assert all(stage["num_unrecorded"]["rows"] == 0 for stage in llm.stats()["stages"])


def test_members_start_from_empty_caches(model, tmp_path, monkeypatch):
    # Each compiles at its own speed meanwhile: a graph that runs waits for the other member.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with LLM(model, **MEMBERS, **(SETTINGS | {"max_num_seqs": 128})) as llm:
        assert [len(text) for text in _generate(llm, 8)] == [8] * 12


def test_requests_outlive_a_member_that_dies_and_one_that_freezes(model):
    handles: list[Any] = []

    def launch(config: EngineConfig, **options: Any) -> Any:
        handles.append(launch_engine(config, **options))
        return handles[-1]

    with LLM(model, launch=launch, **MEMBERS, **SETTINGS, **FAULTS) as llm:
        _generate(llm, 8)
        for rank, (number, words) in {1: (signal.SIGKILL, "died"), 0: (signal.SIGSTOP, "is frozen")}.items():
            old, before = llm.processes()["stages"], llm.stats()["num_generated_tokens"]
            with ThreadPoolExecutor(1) as pool:
                pending = pool.submit(_generate, llm, 400)
                ends = time.monotonic() + WAIT_S
                while llm.stats()["num_generated_tokens"] < before + 200:
                    assert time.monotonic() < ends
                    time.sleep(0.005)
                hit_s = time.monotonic()
                os.kill(old[rank], number)
                assert [len(text) for text in pending.result(WAIT_S)] == [400] * 12
            recovery = handles[0].recoveries()[-1]
            print(f"\n{recovery}, {time.monotonic() - hit_s:.1f} s to the end of all texts")
            assert f"member {rank} of stage 0 {words}" in recovery.died
            assert recovery.last_start.num_kept_stages == 1, "the other member keeps its weights"
