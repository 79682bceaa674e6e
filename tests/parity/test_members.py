"""Stages of several members against transformers: every family, heads and vocabularies that divide and that do not."""

from __future__ import annotations

import random

import pytest
from exactness import ExactComparison
from hf_models import make_checkpoint, sizes_for_members
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

NUM_NEW_TOKENS = 24


def _compare(path, family, count, num_stages, seed, comparison, **others):
    rng = random.Random(seed)
    settings = {
        "num_stages": num_stages,
        "tensor_parallel_size": count,
        "device": "cpu",
        "block_size": 8,
        "max_num_batched_tokens": 24,
        "min_prefill_chunk_tokens": 8,
        "max_model_len": 160,
        "max_num_seqs": 6,
        "num_kv_blocks": 1 + 400 // 8,
        "stage_num_threads": 1,
        **others,
    }
    engine = LocalEngine(plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware.of_this_machine()))
    prompts = [[rng.randrange(199) for _ in range(rng.randint(1, 50))] for _ in range(5)]

    def generate(prompts, max_tokens):
        params = [SamplingParams(max_tokens=each, temperature=0.0, ignore_eos=True) for each in max_tokens]
        return engine.generate(prompts, params)

    comparison.compare(path, prompts, NUM_NEW_TOKENS, generate)


def _full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(("count", "num_stages"), [(2, 1), (2, 2), _full(3, 2), _full(4, 1), _full(4, 3), _full(3, 1)])
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "qwen3_moe",
        "qwen3_5_moe",
        *map(_full, ("llama", "qwen2", "mixtral", "mistral", "ministral", "qwen3_5", "qwen3_next")),
    ],
)
def test_tokens_equal_transformers(family, count, num_stages, tmp_path):
    comparison = ExactComparison()
    for seed in sized((1,), range(4)):
        path = make_checkpoint(
            family, seed, tmp_path / f"{seed}", min_layers=max(2, num_stages), **sizes_for_members(family, count, seed)
        )
        _compare(path, family, count, num_stages, seed, comparison)
    comparison.assert_rare()
