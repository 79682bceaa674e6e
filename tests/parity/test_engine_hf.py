"""The whole engine against transformers: stages, chunks, cached prefixes, mixed lengths, preemption, each really there.

Seeded configurations run on the stages of one process; the real actors are tested in `tests/ray/test_parity_ray.py`.
Settings do not depend on the family, whose layers are compared in test_models_hf.py: CI has one;
with TEST_SIZES=all there are all, with more settings each.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from exactness import ExactComparison
from hf_models import FAMILIES, make_checkpoint
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

SEEDS = sized(range(4, 8), range(16))  # in CI every number of stages with too few blocks, of which two keep prefixes
IN_CI = ("qwen3",)
NUM_NEW_TOKENS = 32


def _settings(seed: int) -> dict:
    """Return an engine configuration; over the seeds all corners are met."""
    rng = random.Random(seed)
    block_size = (4, 8, 16)[seed % 3]
    quad = seed // 4
    tight = quad % 2 == 1  # too few blocks for all requests at once: preemption
    return {
        "num_stages": 1 + seed % 4,
        "block_size": block_size,
        "max_num_batched_tokens": rng.choice([16, 24, 40]),
        "min_prefill_chunk_tokens": rng.choice([3, 8]),
        "enable_prefix_caching": (quad // 2 + seed) % 2 == 0,
        "max_model_len": 160,
        "max_num_seqs": rng.choice([6, 8, 12]),
        "num_kv_blocks": 1 + (320 if tight else 2400) // block_size,
        "stage_num_threads": 1,
    }


def _prompts(rng: random.Random, vocab_size: int) -> list[list[int]]:
    """Return prompts of mixed lengths; three of them share a long prefix."""
    shared = [rng.randrange(vocab_size) for _ in range(48)]
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 70))] for _ in range(4)]
    return prompts + [shared + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))] for _ in range(3)]


@pytest.mark.parametrize(
    "family", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_greedy_tokens_equal_transformers(family, tmp_path_factory):
    comparison, met = ExactComparison(), Counter()
    for seed in SEEDS:
        settings = _settings(seed)
        path = tmp_path_factory.mktemp(f"{family}-{seed}")
        make_checkpoint(family, seed, path, min_layers=max(2, settings["num_stages"]))
        plan = plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware(1))
        engine = LocalEngine(plan)
        met[f"{settings['num_stages']} stages"] += 1

        def generate(prompts, lengths, engine=engine):
            params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
            return engine.generate(prompts, params)

        prompts = _prompts(random.Random(seed), plan.model.vocab_size)
        # Twice: the second round finds the first one's prefixes, prompts and outputs, in the cache.
        for _ in range(2 if settings["enable_prefix_caching"] else 1):
            comparison.compare(path, prompts, NUM_NEW_TOKENS, generate)
        engine.scheduler.check_integrity()
        stats = engine.stats()
        met["chunked"] += stats.num_prefill_chunks > stats.num_prefills
        met["cached"] += stats.num_prefix_hit_tokens > 0
        met["uncached"] += not settings["enable_prefix_caching"]
        met["preempted"] += stats.num_preemptions > 0
        met["preempted and cached"] += stats.num_preemptions > 0 and stats.num_prefix_hit_tokens > 0
        met[f"preempted, {settings['num_stages']} stages"] += stats.num_preemptions > 0
        met[f"cached, {settings['num_stages']} stages"] += stats.num_prefix_hit_tokens > 0
    print(f"\n{family}: {dict(met)}")
    comparison.assert_rare()
    for what in ("chunked", "cached", "uncached", "preempted", "preempted and cached"):
        assert met[what] >= 2, f"{what} was met only {met[what]} times"
    for num_stages in (1, 2, 3, 4):
        assert met[f"preempted, {num_stages} stages"] >= 1
        assert met[f"cached, {num_stages} stages"] >= 1 or len(SEEDS) < 16
