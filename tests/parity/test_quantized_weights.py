"""Checkpoints with weights of few bits generate what transformers generates from the values that they stand for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from exactness import ExactComparison
from hf_models import hf_greedy, load_reference, make_checkpoint
from quantized_tensors import CONFIGS, LINEAR, quantize_checkpoint, quantize_experts
from safetensors.torch import load_file, save_file
from shrunken_models import make_shrunken
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.testing.try_decoder import prompts, try_cut
from raypp.types import SamplingParams

FAMILY_SEEDS = (("qwen3", 14), ("llama", 9), ("qwen2", 12))  # all of one file; tied and not, with and without biases
EXPERT_SEEDS = (("qwen3_moe", 11), ("mixtral", 11), ("qwen3_moe", 3))  # five experts; the last has a dense layer
EXPERT_FORMS = ("fp8 blocks", "gptq v2 zeros order", "compressed int4 order", "awq", "compressed fp8 channel")


def greedy_tokens(
    path: Path, prompts: list[list[int]], num_members: int = 1, impl: str = "transformers", **settings: object
) -> list[list[int]]:
    """Return what two stages of so many members generate."""
    sizes = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 6, "max_model_len": 128}
    more = {"num_kv_blocks": 200, "num_stages": 2, "stage_num_threads": 1, "tensor_parallel_size": num_members}
    plan = plan_engine(EngineConfig.from_flat(str(path), **sizes, **more, **settings, model_impl=impl), Hardware(1))
    return LocalEngine(plan).generate(prompts, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))


def compare_texts(
    source: Path, quantized: Path, dequantized: Path, linear: tuple[str, ...] = ("_proj",), **settings: object
) -> None:
    """Check that what one directory generates is what transformers generates from another."""
    fixed = {"block_size": 4, "max_num_batched_tokens": 24, "min_prefill_chunk_tokens": 8, "max_model_len": 128}
    more = {"max_num_seqs": 6, "num_kv_blocks": 200, "stage_num_threads": 1}
    plan = plan_engine(EngineConfig.from_flat(str(quantized), **fixed, **more, **settings), Hardware(1))
    assert plan.model.quantization is not None
    engine = LocalEngine(plan)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in lengths]
        return engine.generate(prompts, params)

    rng, vocab_size = random.Random(0), plan.model.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 40))] for _ in range(4)]
    comparison = ExactComparison()
    comparison.compare(dequantized, prompts, 16, generate)
    comparison.assert_rare()
    # The comparison is worth something: rounding changes every linear layer, and the text is no single token.
    plain, original = (load_reference(path).state_dict() for path in (dequantized, source))
    changed = {name for name, tensor in plain.items() if not torch.equal(tensor, original[name])}
    assert changed == {name for name in plain if any(part in name for part in linear) and not name.endswith(".bias")}
    assert len(set(hf_greedy(dequantized, prompts[0], 16)[0])) > 3


@pytest.mark.parametrize(("index", "form"), enumerate(CONFIGS))
def test_greedy_tokens_equal_those_of_the_dequantized_model(tmp_path, index, form):
    family, seed = FAMILY_SEEDS[index // 3 % 3]
    source = make_checkpoint(family, seed, tmp_path / "source", min_layers=3)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain")
    compare_texts(source, tmp_path / "small", tmp_path / "plain", num_stages=1 + index % 3)


@pytest.mark.parametrize(("index", "form"), enumerate(EXPERT_FORMS))
def test_greedy_tokens_of_models_with_experts(tmp_path, index, form):
    family, seed = EXPERT_SEEDS[index % len(EXPERT_SEEDS)]
    source = make_checkpoint(family, seed, tmp_path / "source", min_layers=3)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain")
    compare_texts(source, tmp_path / "small", tmp_path / "plain", num_stages=1 + index % 3)


IN_CI = ("fp8 blocks", "compressed int4 order")
OF_MEMBERS = {"raypp": ("awq",), "transformers": ("awq", "fp8 blocks", "compressed int4 of 32")}


@pytest.mark.parametrize(
    ("index", "form", "impl"),
    [
        pytest.param(index, form, impl, id=f"{form}-{impl}", marks=() if form in in_ci else pytest.mark.full)
        for impl, in_ci in OF_MEMBERS.items()
        for index, form in enumerate(CONFIGS)
    ],
)
def test_greedy_tokens_on_stages_of_members(tmp_path, index, form, impl):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 120}
    source = make_checkpoint("qwen3", (8, 12, 14)[index % 3], tmp_path / "source", **sizes)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain")
    more = {"tensor_parallel_size": (2, 4)[index % 2], "num_stages": 1 + index // 2 % 2, "model_impl": impl}
    compare_texts(source, tmp_path / "small", tmp_path / "plain", **more)


@pytest.mark.parametrize(
    ("index", "form"),
    [
        pytest.param(index, form, id=form, marks=() if form in ("awq", "mxfp4") else pytest.mark.full)
        for index, form in enumerate(CONFIGS)
    ],
)
def test_greedy_tokens_on_stages_of_members_with_whole_experts(tmp_path, index, form):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []}
    source = make_checkpoint("qwen3_moe", 12, tmp_path / "source", **sizes, **experts)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain")
    more = {"tensor_parallel_size": (2, 4)[index % 2], "num_stages": 1 + index // 2 % 2}
    compare_texts(source, tmp_path / "small", tmp_path / "plain", enable_expert_parallel=True, **more)


@pytest.mark.parametrize(
    ("index", "form"),
    [pytest.param(*each, marks=[] if each[0] == 2 else pytest.mark.full) for each in enumerate(EXPERT_FORMS)],
)
def test_greedy_tokens_of_members_with_experts_of_transformers(tmp_path, index, form):
    """Of stages of several members: each reads its part of each expert."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 24}
    source = make_checkpoint("qwen3_moe", (11, 3)[index % 2], tmp_path / "source", **sizes, intermediate_size=40)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain")
    more = {"tensor_parallel_size": (2, 4)[index % 2], "num_stages": 1 + index // 2 % 2}
    compare_texts(source, tmp_path / "small", tmp_path / "plain", **more, model_impl="transformers")


OF_STATES = ("in_proj_qkv", "in_proj_z", "out_proj")
STATE_FORMS = ("compressed int4", "fp8 blocks", "awq", "compressed fp8 channel", "auto-round gptq")


@pytest.mark.parametrize(
    ("index", "form"),
    [pytest.param(*each, marks=[] if not each[0] else pytest.mark.full) for each in enumerate(STATE_FORMS)],
)
def test_greedy_tokens_of_models_with_states(tmp_path, index, form):
    """Two numbers per head stay in 16 bits, as published checkpoints have it."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "hidden_size": 64, "intermediate_size": 64}
    dims = {"linear_key_head_dim": 16, "linear_value_head_dim": 8, "head_dim": 16}
    source = make_checkpoint("qwen3_5", (0, 2, 6, 8, 12)[index], tmp_path / "source", min_layers=4, **sizes, **dims)
    linear, left = LINEAR + OF_STATES, ("in_proj_b", "in_proj_a")
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain", linear, left)
    compare_texts(source, tmp_path / "small", tmp_path / "plain", linear, num_stages=1 + index % 3)


@pytest.mark.parametrize("form", [pytest.param("awq", marks=pytest.mark.full), "fp8 blocks"])
def test_greedy_tokens_of_joined_projections(tmp_path, form):
    """Qwen3-Next stores them by key head: outputs are sorted with their scales."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "hidden_size": 64, "intermediate_size": 64}
    dims = {"linear_key_head_dim": 24, "linear_value_head_dim": 12, "head_dim": 16, "moe_intermediate_size": 24}
    source = make_checkpoint("qwen3_next", 0, tmp_path / "source", min_layers=4, **sizes, **dims)
    linear, left = (*LINEAR, "in_proj_qkvz", "out_proj"), ("in_proj_ba", "mlp.gate", "shared_expert_gate")
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain", linear, left)
    compare_texts(source, tmp_path / "small", tmp_path / "plain", linear, num_stages=2)


@pytest.mark.parametrize(
    ("index", "form"),
    [
        pytest.param(index, form, id=form, marks=() if form in IN_CI else pytest.mark.full)
        for index, form in enumerate(CONFIGS)
    ],
)
def test_greedy_tokens_of_transformers_modules(tmp_path, index, form):
    family, seed = (*FAMILY_SEEDS, EXPERT_SEEDS[0])[index % 4]
    source = make_checkpoint(family, seed, tmp_path / "source", min_layers=3)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain")
    more = {"model_impl": "transformers", "num_stages": 1 + index % 3}
    compare_texts(source, tmp_path / "small", tmp_path / "plain", **more)


def test_greedy_tokens_of_gpt_oss_in_mxfp4(tmp_path):
    plain = make_shrunken("gpt_oss", tmp_path / "plain")
    quantize_experts(plain, tmp_path / "small")
    assert try_cut(tmp_path / "small", [4]) == {"whole": None, "cut": None, "members": None}  # what a first start tries
    texts = [greedy_tokens(path, prompts()) for path in (tmp_path / "small", plain)]
    cells = [(1, "raypp"), (2, "raypp"), (2, "transformers"), *sized((), ((4, "transformers"),))]
    texts += [greedy_tokens(tmp_path / "small", prompts(), *cell) for cell in cells]
    texts.append(greedy_tokens(tmp_path / "small", prompts(), 2, "raypp", enable_expert_parallel=True))
    assert texts == [texts[0]] * len(texts)
    assert len(set(texts[0][0])) > 3


@pytest.mark.parametrize("impl", ["raypp", "transformers"])
def test_greedy_tokens_of_weights_rounded_at_load(tmp_path, impl):
    source = make_checkpoint("qwen3", 14, tmp_path / "source", min_layers=3)
    plain = load_file(source / "model.safetensors")
    for name, tensor in plain.items():
        if name.split(".")[-2] in LINEAR and name.endswith(".weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 448
            plain[name] = (tensor / scale).to(torch.float8_e4m3fn).float() * scale
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "plain" / "config.json").write_text((source / "config.json").read_text())
    compare_texts(source, source, tmp_path / "plain", num_stages=2, quantization="fp8", model_impl=impl)


@pytest.mark.parametrize("impl", ["raypp", "transformers"])
@pytest.mark.parametrize("form", ["fp8 blocks", "gptq v2 zeros order"])
def test_dummy_weights_in_a_form(tmp_path, form, impl):
    source = make_checkpoint("qwen3", 14, tmp_path / "source", min_layers=3)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain")
    texts = []
    for num_stages in (1, 3):
        settings = {"load_format": "dummy", "num_kv_blocks": 50, "stage_num_threads": 1, "model_impl": impl}
        config = EngineConfig.from_flat(str(tmp_path / "small"), num_stages=num_stages, **settings)
        engine = LocalEngine(plan_engine(config, Hardware(1)))
        texts.append(engine.generate([[5, 6, 7]], [SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)]))
    assert texts[0] == texts[1]
