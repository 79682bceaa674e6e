"""Checkpoints with weights of few bits generate what transformers generates from the values that they stand for."""

from __future__ import annotations

import random

import pytest
import torch
from exactness import ExactComparison
from hf_models import hf_greedy, load_reference, make_checkpoint
from quantized_tensors import CONFIGS, quantize_checkpoint

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

FAMILY_SEEDS = (("qwen3", 14), ("llama", 9), ("qwen2", 12))  # all of one file; tied and not, with and without biases


@pytest.mark.parametrize(("index", "form"), enumerate(CONFIGS))
def test_greedy_tokens_equal_those_of_the_dequantized_model(tmp_path, index, form):
    num_stages, (family, seed) = 1 + index % 3, FAMILY_SEEDS[index // 3 % 3]
    source = make_checkpoint(family, seed, tmp_path / "source", min_layers=3)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain")
    plan = plan_engine(
        EngineConfig.from_flat(
            str(tmp_path / "small"),
            num_stages=num_stages,
            block_size=4,
            max_num_batched_tokens=24,
            min_prefill_chunk_tokens=8,
            max_model_len=128,
            max_num_seqs=6,
            num_kv_blocks=200,
            stage_num_threads=1,
        ),
        Hardware(1),
    )
    assert plan.model.quantization is not None
    engine = LocalEngine(plan)

    def generate(prompts, lengths):
        params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in lengths]
        return engine.generate(prompts, params)

    rng, vocab_size = random.Random(seed), plan.model.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 40))] for _ in range(4)]
    comparison = ExactComparison()
    comparison.compare(tmp_path / "plain", prompts, 16, generate)
    comparison.assert_rare()
    # The comparison is worth something: rounding changes every linear layer, and the text is no single token.
    plain, original = (load_reference(path).state_dict() for path in (tmp_path / "plain", source))
    changed = [name for name, tensor in plain.items() if not torch.equal(tensor, original[name])]
    assert len(changed) == 7 * plan.model.num_layers
    assert len(set(hf_greedy(tmp_path / "plain", prompts[0], 16)[0])) > 3
