"""Speculation in an engine on a GPU: the text does not depend on it, and rows advance by what they accept."""

from __future__ import annotations

import random

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
EAGLE3 = {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3}


def _engine(device: str, **settings: object) -> LocalEngine:
    settings = {"max_num_seqs": 32, "num_kv_blocks": 3000, "max_model_len": 512} | settings
    config = EngineConfig.from_flat("tiny", device=device, **settings)
    return LocalEngine(plan_engine(config, Hardware(2, 1 << 34, 1, "this one", 16 << 30)))


def _prompts(num_prompts: int) -> list[list[int]]:
    """Return prompts of which half repeat themselves."""
    rng = random.Random(0)
    texts = [[rng.randrange(5, 400) for _ in range(rng.randint(3, 30))] for _ in range(num_prompts)]
    return [text * 4 if index % 2 else text for index, text in enumerate(texts)]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("speculative", [NGRAM, EAGLE3], ids=["ngram", "eagle3"])
def test_text_is_that_of_a_cpu_without_speculation(num_stages, speculative):
    params = [SamplingParams(max_tokens=60, temperature=(0.0, 0.8)[i % 2], seed=i, ignore_eos=True) for i in range(20)]
    expected = _engine("cpu").generate(_prompts(20), params)
    engine = _engine(
        "cuda", dtype="float32", speculative=speculative, num_stages=num_stages, stage_num_gpus=1 / num_stages
    )
    texts = engine.generate(_prompts(20), params)
    equal = sum(text == wanted for text, wanted in zip(texts, expected, strict=True))
    print(f"{equal} of 20 texts equal")
    assert equal >= 19, "one may differ, at a near-tie"
    assert engine.stats().num_accepted_tokens > 100


@pytest.mark.parametrize("mode", ["full_and_piecewise", "none"])
def test_rows_advance_by_what_they_accept(mode):
    """The mean over many rows is that of the rate: 1 + 0.7 + 0.7^2 + 0.7^3 + 0.7^4 = 2.77 tokens a step."""
    engine = _engine("cuda", mode=mode, speculative=NGRAM | {"forced_acceptance_rate": 0.7})
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    assert all(len(text) == 200 for text in engine.generate(_prompts(24), params))
    length = engine.stats().acceptance_length
    print(f"{mode}: {length:.3f} tokens a step")
    assert 2.65 < length < 2.85
