"""A KV cache in 8 bits: the text does not depend on how it is computed, and is near that of a cache in 32 bits.

A token's keys and values are rounded before anybody attends to them, its own step included. So what a row computes is
the same in one chunk and in many, after a preemption and behind a cached prefix, but for the order of summation.
"""

from __future__ import annotations

import json
import random

import pytest
import torch
from eagle_reference import make_head
from hf_models import make_checkpoint
from paged_runner import PagedRunner
from safetensors.torch import load_file, save_file

from raypp.config.engine_config import EngineConfig
from raypp.ops.kv_cache import FP8
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

FIXED = {"kv_cache_dtype": "fp8", "stage_num_threads": 1, "max_model_len": 128, "block_size": 4, "max_num_seqs": 6}
WAYS = {
    "chunks": {"max_num_batched_tokens": 16, "min_prefill_chunk_tokens": 3},
    "two stages, preemption": {"num_stages": 2, "num_kv_blocks": 60},
    "three stages, cached prefixes": {"num_stages": 3, "max_num_batched_tokens": 24, "min_prefill_chunk_tokens": 8},
    "n-grams": {"num_stages": 2, "speculative": {"method": "ngram", "num_speculative_tokens": 3}},
    "a head": {"num_stages": 2},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3", 4, path, min_layers=3)
    return path


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(1)
    shared = [rng.randrange(vocab_size) for _ in range(32)]
    return [
        *([rng.randrange(vocab_size) for _ in range(rng.randint(1, 60))] for _ in range(3)),
        *(shared + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))] for _ in range(3)),
    ]


def generate(path, times=1, one_by_one=False, **settings):
    """Return the texts of the last time, and what happened."""
    plan = plan_engine(EngineConfig.from_flat(str(path), **(FIXED | settings)), Hardware(1))
    assert plan.kv_dtype == "float8_e4m3fn"
    engine = LocalEngine(plan)
    asked, params = prompts(plan.model.vocab_size), SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    for _ in range(times):
        batches = [[prompt] for prompt in asked] if one_by_one else [asked]
        texts = [text for batch in batches for text in engine.generate(batch, [params] * len(batch))]
    engine.scheduler.check_integrity()
    return texts, engine.stats()


def test_latents_are_rounded_before_anybody_attends_to_them(tmp_path):
    """The text is the same in chunks, behind prefixes, after preemption and with drafts."""
    path = make_checkpoint("deepseek_v3", 4, tmp_path, min_layers=3)
    expected, _ = generate(path, one_by_one=True, enable_prefix_caching=False)
    together = WAYS["chunks"] | WAYS["two stages, preemption"] | WAYS["n-grams"]
    texts, stats = generate(path, times=2, **together)
    assert texts == expected
    assert stats.num_prefix_hit_tokens


@pytest.fixture(scope="module")
def expected(checkpoint):
    texts, _ = generate(checkpoint, one_by_one=True, enable_prefix_caching=False)
    return texts


@pytest.mark.parametrize("way", WAYS)
def test_text_does_not_depend_on_the_way(checkpoint, expected, way, tmp_path):
    settings = dict(WAYS[way])
    if way == "a head":
        settings["speculative"] = {"method": "eagle3", "model": str(make_head("eagle3", checkpoint, tmp_path / "head"))}
    texts, stats = generate(checkpoint, times=2 if "cached" in way else 1, **settings)
    assert texts == expected
    assert stats.num_preemptions > 0 or "preemption" not in way
    assert stats.num_prefix_hit_tokens > 0 or "cached" not in way
    assert stats.num_prefill_chunks > stats.num_prefills or "chunks" not in way


def test_scales_and_scheme_of_a_checkpoint(checkpoint, expected, tmp_path):
    """The scheme switches 8 bits on, `model` switches them off; a scale that cuts values off changes the text."""
    config = json.loads((checkpoint / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    texts = {}
    for scale in (1.0, 1e-5):
        path = tmp_path / str(scale)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        tensors = {}
        for file in checkpoint.glob("*.safetensors"):
            tensors |= load_file(file)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}.self_attn."
            tensors |= {prefix + "k_scale": torch.tensor(scale), prefix + "v_scale": torch.tensor([scale])}
        save_file(tensors, path / "model.safetensors")
        texts[scale], _ = generate(path, kv_cache_dtype="auto")
        plan = plan_engine(EngineConfig.from_flat(str(path), kv_cache_dtype="model"), Hardware(1))
        assert plan.kv_dtype == "float32"
    assert texts[1.0] == expected
    assert texts[1e-5] != expected


def test_logits_are_near_those_of_32_bits(checkpoint):
    row = prompts(40)[3]
    logits = []
    for kv_dtype in (torch.float32, FP8):
        runner = PagedRunner(checkpoint, [row], kv_dtype=kv_dtype)
        logits.append(torch.cat([*runner.step(prefill=[(0, len(row) - 4)]), *runner.step([0], query_len=4)]))
    exact, rounded = logits
    error = (exact - rounded).norm() / exact.norm()
    assert 1e-4 < error < 0.15
