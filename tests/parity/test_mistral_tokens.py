"""Mistral's own form of a checkpoint: tokens equal those of transformers' form of the same model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import ExactComparison
from hf_models import make_checkpoint, sizes_for_members
from mistral_form import joined, one_by_one, write_mistral_form
from quantized_tensors import LINEAR, OF_LATENTS, quantize_checkpoint
from safetensors.torch import load_file, save_file

from raypp.config.engine_config import EngineConfig
from raypp.models.weights import CheckpointWeights, WeightReader, read_kv_scales
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.sampling_params import SamplingParams
from raypp.testing.local_engine import LocalEngine

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.0,  # as `apply_scale` false says it
    "llama_4_scaling_beta": 0.3,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OF_FORM: dict[str, dict[str, Any]] = {
    "mistral4": {"attention_bias": False, "rope_interleave": True},
    "ministral3": {},
    "mistral": {},
}
"""What the form cannot say otherwise."""
CELLS = {
    "large": ("mistral4", 2, ROPE, 1, 1),
    "large-stages": ("mistral4", 5, ROPE, 1, 2),
    "large-members": ("mistral4", 4, ROPE, 2, 1),
    "large-plain-queries-stages-members": ("mistral4", 0, ROPE, 2, 2),
    "ministral": ("ministral3", 0, ROPE, 1, 2),
    "ministral-members": ("ministral3", 1, ROPE, 2, 1),
    "small": ("mistral", 2, PLAIN_ROPE, 1, 1),
    "small-members": ("mistral", 0, PLAIN_ROPE, 2, 2),
}
"""Family and seed, rope, members and stages."""
IN_CI = ("large-stages", "large-plain-queries-stages-members", "ministral-members", "small")
COMMON = {
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "min_prefill_chunk_tokens": 8,
    "max_model_len": 128,
    "max_num_seqs": 6,
    "num_kv_blocks": 200,
    "stage_num_threads": 1,
    "dtype": "float32",
}


def compare(path: Path, reference: Path, **settings: Any) -> None:
    """Check that what one directory generates is what transformers generates from another."""
    plan = plan_engine(EngineConfig.from_flat(str(path), **COMMON, **settings), Hardware(1))
    engine, vocab_size, rng = LocalEngine(plan), plan.model.vocab_size, random.Random(0)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in lengths]
        return engine.generate(prompts, params)

    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 70))] for _ in range(4)]
    comparison = ExactComparison()
    comparison.compare(reference, prompts, 16, generate)
    comparison.assert_rare()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.full) for name in CELLS]
)
def test_tokens_equal_those_of_transformers_form(name: str, tmp_path: Path) -> None:
    """In one file, in several that an index names, and in several without one."""
    family, seed, rope, count, num_stages = CELLS[name]
    sizes = OF_FORM[family] | (sizes_for_members(family, count, seed) if count > 1 else {})
    source = make_checkpoint(family, seed, tmp_path / "source", rope_parameters=dict(rope), **sizes)
    own = write_mistral_form(source, tmp_path / "own", 1 + seed % 3, has_index=seed != 1)
    compare(own, source, tensor_parallel_size=count, num_stages=num_stages)


KV = {"k": 0.5, "v": 2.0}
FORMS = {
    "fp8": ("mistral4", 2, "fp8 static", 1, 2),
    "fp8-members": ("mistral4", 0, "fp8 static", 2, 1),
    "nvfp4": ("mistral4", 8, "nvfp4", 1, 2),
    "fp8-blocks-members": ("mistral4", 2, "compressed fp8 blocks", 2, 1),
    "ministral-fp8": ("ministral3", 0, "fp8 static", 2, 1),
    "ministral-fp8-channels": ("ministral3", 2, "compressed fp8 channel", 1, 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "members" not in name else pytest.mark.full) for name in FORMS]
)
def test_tokens_of_few_bits_equal_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    family, seed, form, count, num_stages = FORMS[name]
    sizes = OF_FORM[family] | (sizes_for_members(family, count, seed) if count > 1 else {})
    source = make_checkpoint(family, seed, tmp_path / "source", min_layers=3, rope_parameters=dict(ROPE), **sizes)
    in_one = source / "model.safetensors"
    save_file(dict(one_by_one(load_file(in_one))), in_one, metadata={"format": "pt"})
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain", (*LINEAR, *OF_LATENTS))
    in_one = tmp_path / "plain" / "model.safetensors"
    save_file(joined(load_file(in_one)), in_one, metadata={"format": "pt"})
    own = write_mistral_form(tmp_path / "small", tmp_path / "own")
    compare(own, tmp_path / "plain", tensor_parallel_size=count, num_stages=num_stages)


def test_patterns_of_mistrals_own_names(tmp_path: Path) -> None:
    """Published files say in names of either form what stays in 16 bits: tensors say it, too."""
    source = make_checkpoint("ministral3", 0, tmp_path / "source", rope_parameters=dict(ROPE))
    quantize_checkpoint("nvfp4", source, tmp_path / "small", tmp_path / "plain", LINEAR, ("self_attn.*",))
    own = write_mistral_form(tmp_path / "small", tmp_path / "own")
    params = json.loads((own / "params.json").read_text())
    params["quantization"]["ignore"] = ["re:.*attention.*", "output"]
    (own / "params.json").write_text(json.dumps(params))
    compare(own, tmp_path / "plain", num_stages=2)


def test_scales_of_a_kv_cache(tmp_path: Path) -> None:
    """Mistral's own names of what keys and values are divided by."""
    source = make_checkpoint("ministral3", 0, tmp_path / "source", rope_parameters=dict(ROPE))
    own = write_mistral_form(source, tmp_path / "own")
    tensors = load_file(own / "consolidated.safetensors")
    scales = {f"layers.0.attention.{part}_fake_quantizer.qscale_act": torch.tensor(scale) for part, scale in KV.items()}
    save_file(tensors | scales, own / "consolidated.safetensors")
    weights = WeightReader(CheckpointWeights(own), torch.float32, torch.device("cpu"), "model.layers.0.self_attn.")
    assert read_kv_scales(weights) == (KV["k"], KV["v"])
