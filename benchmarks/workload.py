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


def exactly(num_tokens: int) -> SamplingParams:
    """Return what makes a greedy request yield that many tokens, whatever they are."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


class Took(NamedTuple):
    """How long requests took that were sent at once, seconds from then."""

    all_s: float
    """Until the last one had its last token."""
    steady_ns: tuple[int, int]
    """From when all had their first token until one had its last, by the clock of traces."""
    tokens_per_step: float
    """Of a request, after its first one, in the mean."""


def time_for(llm: LLM, prompts: list[TokensPrompt], num_tokens: int) -> Took:
    """Return how long requests take, all sent at once, for that many tokens each."""
    begun, epoch_ns = time.perf_counter(), time.time_ns() - now_ns()
    outputs = llm.generate(prompts, exactly(num_tokens))
    all_s = time.perf_counter() - begun
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    metrics = [output.metrics for output in outputs]
    last_first = max(each.first_token_time_s or 0.0 for each in metrics)
    first_last = min(each.finish_time_s or 0.0 for each in metrics)
    steady_ns = round(last_first * 1e9) - epoch_ns, round(first_last * 1e9) - epoch_ns
    num_steps = sum(num_tokens - 1 - each.num_accepted_tokens for each in metrics)
    return Took(all_s, steady_ns, len(prompts) * (num_tokens - 1) / max(1, num_steps))


def seconds_for(llm: LLM, prompts: list[TokensPrompt], num_tokens: int) -> float:
    """Return how long requests take together, all sent at once, for that many tokens each."""
    return time_for(llm, prompts, num_tokens).all_s
