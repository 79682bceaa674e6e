"""Requests have the same texts and log-probabilities, bit for bit, whatever runs beside them and wherever.

Alone, in one batch, in any order and as they arrive; on one stage and two; with n-grams, with cached prefixes, and
after a stage was killed in the middle. Weights have a model's shape and are random.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from raypp import LLM, AsyncLLM, SamplingParams
from raypp.actors.engine_actors import launch_engine
from raypp.config.engine_config import EngineConfig

SHAPES = Path(__file__).parents[2] / "benchmarks" / "models"
MODELS = os.environ.get("INVARIANT_MODELS", "qwen3-0.6b").split(",")
NUM_REQUESTS, NUM_TOKENS, NUM_ALONE = 64, int(os.environ.get("INVARIANT_TOKENS", "300")), 16
WAIT_S = 300.0
SETTINGS: dict[str, Any] = {
    "batch_invariant": True,
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "max_model_len": 2048,
    "gpu_memory_utilization": 0.85,
}
TWO = {"num_stages": 2} if torch.cuda.device_count() > 1 else {"num_stages": 2, "stage_num_gpus": 0.5}
FAULTS = {"step_timeout_s": 20.0, "heartbeat_s": 0.2, "close_timeout_s": 4.0, "max_engine_restarts": 3}
NGRAMS = {"speculative": {"method": "ngram", "min_n": 1, "num_speculative_tokens": 3}}

Answer = tuple[tuple[int, ...], tuple[float, ...]]


def made_requests(vocab_size: int = 50_000) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of 1 to 1,200 tokens, and how they go on: greedy, as Qwen3 samples, and without truncation."""
    rng, kinds = random.Random(7), ({"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {})
    shared = [rng.randrange(vocab_size) for _ in range(200)]
    requests = []
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(vocab_size) for _ in range(int(1000 ** rng.random()))]
        scored = {"prompt_logprobs": 3} if index % 8 == 1 else {}
        params = {
            **scored,
            "max_tokens": NUM_TOKENS,
            "seed": index,
            "logprobs": 0,
            "ignore_eos": True,
            **kinds[index % 3],
        }
        requests.append(((shared if index % 4 == 0 else []) + own, SamplingParams(**params)))
    return requests


REQUESTS = made_requests()


def answers_of(outputs: Sequence[Any]) -> list[Answer]:
    """Return tokens and their log-probabilities."""
    answers = []
    for output in outputs:
        tokens = tuple(output.outputs[0].token_ids)
        by_token = output.outputs[0].logprobs
        logprobs = [entry[token].logprob for entry, token in zip(by_token, tokens, strict=True)]
        of_prompt = [each.logprob for entry in output.prompt_logprobs or [] for each in (entry or {}).values()]
        answers.append((tokens, (*logprobs, *of_prompt)))
    return answers


def generate(llm: LLM, indices: Sequence[int]) -> list[Answer]:
    prompts = [{"prompt_token_ids": REQUESTS[index][0]} for index in indices]
    return answers_of(llm.generate(prompts, [REQUESTS[index][1] for index in indices]))


def assert_same(got: Sequence[Answer], expected: Sequence[Answer], how: str) -> None:
    """Compare; the message counts what differs."""
    texts = sum(a[0] != b[0] for a, b in zip(got, expected, strict=True))
    logprobs = sum(a[1] != b[1] for a, b in zip(got, expected, strict=True))
    assert (texts, logprobs) == (0, 0), f"{how}: {texts} texts and {logprobs} rows of log-probabilities differ"
    print(f"\n{how}: {len(got)} texts of {len(got[0][0])} tokens are the same bit for bit", flush=True)


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest) -> tuple[str, list[Answer]]:
    """The model's directory, and what one stage says to all requests at once."""
    path = str(SHAPES / request.param)
    with LLM(path, num_stages=1, enable_prefix_caching=False, **SETTINGS) as llm:
        together = generate(llm, range(NUM_REQUESTS))
        alone = [generate(llm, [index])[0] for index in range(NUM_ALONE)]
        assert_same(alone, together[:NUM_ALONE], "alone")
        order = random.Random(1).sample(range(NUM_REQUESTS), NUM_REQUESTS)
        assert_same(generate(llm, order), [together[index] for index in order], "in another order")
    return path, together


def test_as_they_arrive_with_prefixes(reference: tuple[str, list[Answer]]) -> None:
    path, expected = reference

    async def ask(llm: AsyncLLM, index: int, delay_s: float) -> Any:
        await asyncio.sleep(delay_s)
        prompt, params = REQUESTS[index]
        async for output in llm.generate({"prompt_token_ids": prompt}, params):
            last = output
        return last

    async def run() -> list[list[Answer]]:
        rng = random.Random(2)
        async with await AsyncLLM.create(path, num_stages=1, **SETTINGS) as llm:
            rounds = []
            for _ in range(2):
                asked = [ask(llm, index, rng.uniform(0, 3)) for index in range(NUM_REQUESTS)]
                rounds.append(answers_of(await asyncio.gather(*asked)))
            assert (await llm.stats())["num_prefix_hit_tokens"] > 0
            return rounds

    for number, got in enumerate(asyncio.run(run())):
        assert_same(got, expected, f"as they arrive, round {1 + number}")


def test_on_two_stages_and_after_a_death(reference: tuple[str, list[Answer]]) -> None:
    path, expected = reference
    handles: list[Any] = []

    def launch(config: EngineConfig, **options: Any) -> Any:
        handles.append(launch_engine(config, **options))
        return handles[-1]

    with LLM(path, launch=launch, **TWO, **SETTINGS, **FAULTS) as llm:
        assert_same(generate(llm, range(NUM_REQUESTS)), expected, "two stages")
        before = llm.stats()["num_generated_tokens"]
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(generate, llm, range(NUM_REQUESTS))
            ends = time.monotonic() + WAIT_S
            while llm.stats()["num_generated_tokens"] < before + NUM_REQUESTS * NUM_TOKENS // 2:
                assert time.monotonic() < ends
                time.sleep(0.01)
            os.kill(llm.processes()["stages"][1], signal.SIGKILL)
            assert_same(pending.result(WAIT_S), expected, "a stage was killed in the middle")
        assert len(handles[0].recoveries()) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="members need a GPU each")
def test_with_members(reference: tuple[str, list[Answer]]) -> None:
    path, _ = reference
    members = {"tensor_parallel_size": 2, "num_stages": torch.cuda.device_count() // 2}
    with LLM(path, enable_prefix_caching=False, **members, **SETTINGS) as llm:
        expected = generate(llm, range(NUM_REQUESTS))
        assert_same([generate(llm, [index])[0] for index in range(NUM_ALONE)], expected[:NUM_ALONE], "members, alone")
    fewer = SETTINGS | {"max_num_batched_tokens": 160, "tensor_parallel_size": 2, "num_stages": 1}
    with LLM(path, **fewer, **NGRAMS) as llm:
        assert_same(generate(llm, range(NUM_REQUESTS)), expected, "members, small chunks and n-grams")


def test_with_ngrams(reference: tuple[str, list[Answer]]) -> None:
    path, expected = reference
    with LLM(path, **TWO, **SETTINGS, **NGRAMS) as llm:
        assert_same(generate(llm, range(NUM_REQUESTS)), expected, "two stages and n-grams")
        stats = llm.stats()
        print(f"{stats['num_draft_tokens']} drafts, {stats['num_accepted_tokens']} accepted")
