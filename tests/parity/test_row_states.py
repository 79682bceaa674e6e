"""Gated delta nets against transformers: stages, chunks, preemption, n-grams; states of rows, computed again or not."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from exactness import ExactComparison
from hf_models import STATE_FAMILIES, make_checkpoint
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

SEEDS = sized(range(2), range(24))
NUM_NEW_TOKENS = sized(32, 48)
IN_CI = (("qwen3_5", ""), ("qwen3_5_moe", "ngram"))
RATES = (0.0, 0.3, 0.7, 1.0)
"""At which drafts are accepted, whatever the model says, over the seeds; None would be what it says."""


def _plan(path, seed: int, **more: object) -> EnginePlan:
    """Return an engine's plan; over the seeds all corners are met."""
    rng = random.Random(seed)
    block_size, is_tight = (4, 8, 16)[seed % 3], seed % 2 == 1
    settings = {
        "num_stages": 1 + seed % 4,
        "block_size": block_size,
        "max_num_batched_tokens": rng.choice([8, 16, 24, 64]),
        "min_prefill_chunk_tokens": rng.choice([1, 3, 8]),
        "max_model_len": 160,
        "max_num_seqs": rng.choice([6, 8]),
        "num_kv_blocks": 1 + (320 if is_tight else 2400) // block_size,
        "stage_num_threads": 1,
    }
    return plan_engine(EngineConfig.from_flat(str(path), **(settings | more)), Hardware(1))


def _prompts(rng: random.Random, vocab_size: int) -> list[list[int]]:
    """Return prompts of mixed lengths, of which one repeats itself."""
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 90))] for _ in range(7)]
    return [*prompts, [rng.randrange(vocab_size) for _ in range(7)] * 8]


@pytest.mark.parametrize(
    ("family", "drafts"),
    [
        pytest.param(name, kind, id=f"{name}-{kind}", marks=[] if (name, kind) in IN_CI else pytest.mark.full)
        for name in STATE_FAMILIES
        for kind in ("", "ngram")
    ],
)
def test_greedy_tokens_equal_transformers(family, drafts, tmp_path):
    comparison, met = ExactComparison(), Counter()
    for seed in SEEDS:
        path = make_checkpoint(family, seed, tmp_path / str(seed), min_layers=4)
        speculative = {"method": "ngram", "num_speculative_tokens": (1, 3, 7)[seed % 3]} if drafts else {}
        plan = _plan(path, seed, **speculative)
        engine = LocalEngine(plan)

        def generate(prompts, lengths, engine=engine):
            params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
            return engine.generate(prompts, params)

        prompts = _prompts(random.Random(seed), plan.model.vocab_size)
        comparison.compare(path, prompts, NUM_NEW_TOKENS, generate)
        engine.scheduler.check_integrity()
        stats = engine.stats()
        met["chunked"] += stats.num_prefill_chunks > stats.num_prefills
        met["preempted"] += stats.num_preemptions > 0
        met["drafts accepted"] += stats.num_accepted_tokens > 0
        met["drafts refused"] += stats.num_accepted_tokens < stats.num_draft_tokens
    print(f"\n{family} {drafts}: {dict(met)}")
    comparison.assert_rare()
    for what in ("chunked", "preempted", *(("drafts accepted", "drafts refused") if drafts else ())):
        assert met[what], f"{what} was never met"
