"""Requests of exact lengths: random token ids in, end-of-sequence ignored, the same for the same seed."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, NamedTuple

from raypp import LLM, SamplingParams
from raypp.tracing import now_ns
from raypp.types import TokensPrompt

_SHAPES = Path(__file__).parent / "models"


def model_settings(name: str) -> dict[str, Any]:
    """Return a model's name or path and how to load it: a shape, which has no weights, gets random ones.

    Args:
        name: Of a folder of `benchmarks/models`, or whatever `LLM` takes.
    """
    shape = _SHAPES / name  # a full path stays what it is
    if (shape / "config.json").exists() and not any(shape.glob("*.safetensors")):
        return {"model": str(shape), "load_format": "dummy"}
    return {"model": name}


def random_prompts(count: int, length: int, vocab_size: int, rng: random.Random) -> list[TokensPrompt]:
    """Return `count` prompts of `length` random token ids, which no prefix cache has seen."""
    return [{"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(length)]} for _ in range(count)]


_QWEN3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}  # what its generation_config.json says
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "qwen3": _QWEN3,
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {**_QWEN3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "biases": {**_QWEN3, "logit_bias": {token_id: 1.0 for token_id in range(1000, 1300)}},
    "logprobs": {**_QWEN3, "logprobs": 5},
}
"""How users sample. `mix` is a quarter each of qwen3, penalties, biases and logprobs."""
_MIX = ("qwen3", "penalties", "biases", "logprobs")


def exactly(num_tokens: int, sampling: str = "greedy") -> SamplingParams:
    """Return what makes a request yield that many tokens, whatever they are."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0, **SAMPLING[sampling])


def params_for(num_requests: int, num_tokens: int, sampling: str) -> list[SamplingParams]:
    """Return the parameters of so many requests; `sampling` is a name of `SAMPLING`, or mix."""
    names = _MIX if sampling == "mix" else (sampling,)
    kinds = [exactly(num_tokens, name) for name in names]
    return [kinds[index % len(kinds)] for index in range(num_requests)]


class Took(NamedTuple):
    """How long requests took that were sent at once, seconds from then."""

    all_s: float
    """Until the last one had its last token."""
    steady_ns: tuple[int, int]
    """From when all had their first token until one had its last, by the clock of traces."""
    tokens_per_step: float
    """Of a request, after its first one, in the mean."""


def time_for(llm: LLM, prompts: list[TokensPrompt], num_tokens: int, sampling: str = "greedy") -> Took:
    """Return how long requests take, all sent at once, for that many tokens each."""
    params = params_for(len(prompts), num_tokens, sampling)
    begun, epoch_ns = time.perf_counter(), time.time_ns() - now_ns()
    outputs = llm.generate(prompts, params)
    all_s = time.perf_counter() - begun
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    metrics = [output.metrics for output in outputs]
    last_first = max(each.first_token_time_s or 0.0 for each in metrics)
    first_last = min(each.finish_time_s or 0.0 for each in metrics)
    steady_ns = round(last_first * 1e9) - epoch_ns, round(first_last * 1e9) - epoch_ns
    num_steps = sum(num_tokens - 1 - each.num_accepted_tokens for each in metrics)
    return Took(all_s, steady_ns, len(prompts) * (num_tokens - 1) / max(1, num_steps))


def seconds_for(llm: LLM, prompts: list[TokensPrompt], num_tokens: int, sampling: str = "greedy") -> float:
    """Return how long requests take together, all sent at once, for that many tokens each."""
    return time_for(llm, prompts, num_tokens, sampling).all_s
