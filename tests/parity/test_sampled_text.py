"""Sampled text through the whole engine: it depends on the seed alone, and has the model's distribution."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
import transformers
from hf_models import hf_logits

from raypp.config.engine_config import EngineConfig
from raypp.models.registry import resolve_model_path
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

NUM_DRAWS = int(os.environ.get("SAMPLED_TEXT_DRAWS", "2000"))


def _plan(**settings) -> EnginePlan:
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "stage_num_threads": 1, **settings}
    return plan_engine(EngineConfig.from_flat("tiny", **settings), Hardware(1))


def test_same_seed_same_text_alone_and_in_a_batch_of_32():
    rng = random.Random(0)
    prompts = [[rng.randrange(4000) for _ in range(rng.randint(2, 60))] for _ in range(32)]
    params = [SamplingParams(max_tokens=24, temperature=0.8, seed=1000 + i, ignore_eos=True) for i in range(32)]
    together = LocalEngine(_plan(num_stages=2, min_prefill_chunk_tokens=16, max_num_batched_tokens=128)).generate(
        prompts, params
    )
    for index in range(0, 32, 8):
        alone = LocalEngine(_plan(num_stages=1)).generate([prompts[index]], params[index])
        assert alone == [together[index]]
    assert len({tuple(tokens) for tokens in together}) == 32


def test_another_seed_is_another_text():
    engine = LocalEngine(_plan())
    params = [SamplingParams(max_tokens=24, temperature=0.8, seed=seed, ignore_eos=True) for seed in (1, 1, 2)]
    first, same, other = engine.generate([[5, 6, 7, 8]] * 3, params)
    assert first == same
    assert first != other


@pytest.fixture(scope="module")
def drawn() -> dict[str, np.ndarray]:
    """Draw one token NUM_DRAWS times per setting, each time with another seed, and count."""
    prompt = [5, 6, 7, 8, 9, 10]
    engine = LocalEngine(_plan())
    counts = {}
    for name, settings in (
        ("plain", {"temperature": 0.8}),
        ("truncated", {"temperature": 1.1, "top_k": 50, "top_p": 0.85}),
    ):
        params = [SamplingParams(max_tokens=1, ignore_eos=True, seed=seed, **settings) for seed in range(NUM_DRAWS)]
        tokens = engine.generate([prompt] * NUM_DRAWS, params)
        counts[name] = np.bincount([t[0] for t in tokens], minlength=4032)
    counts["logits"] = hf_logits(resolve_model_path("tiny"), prompt)[-1]
    return counts


def _p_value(counts: np.ndarray, probabilities: torch.Tensor) -> float:
    from scipy import stats  # which takes seconds

    expected = probabilities.double().numpy() * NUM_DRAWS
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    some = wanted > 0
    return float(stats.chisquare(observed[some], wanted[some] * observed[some].sum() / wanted[some].sum()).pvalue)


def test_draws_have_the_models_distribution(drawn):
    p = _p_value(drawn["plain"], (drawn["logits"] / 0.8).softmax(-1))
    print(f"\n{NUM_DRAWS} draws at temperature 0.8: p = {p:.3f}")
    assert p > 1e-4


def test_truncated_draws_have_the_distribution_that_transformers_leaves(drawn):
    scores = (drawn["logits"] / 1.1).unsqueeze(0)
    scores = transformers.TopPLogitsWarper(0.85)(None, transformers.TopKLogitsWarper(50)(None, scores))
    p = _p_value(drawn["truncated"], scores[0].softmax(-1))
    print(f"\n{NUM_DRAWS} draws with top_k and top_p: p = {p:.3f}")
    assert p > 1e-4


def test_a_wrong_temperature_is_noticed(drawn):
    wrong = 0.85 if NUM_DRAWS >= 5000 else 0.95  # what fewer draws tell apart from 0.8
    assert _p_value(drawn["plain"], (drawn["logits"] / wrong).softmax(-1)) < 1e-4
