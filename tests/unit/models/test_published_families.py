"""Families as their published config.json says them: sizes, windows, ropes, routers; what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raypp.errors import ConfigError, ModelLoadError
from raypp.models import config as config_module
from raypp.models.config import ModelConfig, load_model_config
from raypp.models.layer import inverse_frequencies
from raypp.models.member_sizes import of_one_member
from raypp.models.quantization import Quantization
from raypp.models.sizes import kv_bytes_per_token, layer_sizes, parameter_counts
from raypp.models.weights import DummyWeights
from raypp.ops.cuda.expert_products import has_kernel
from raypp.ops.cuda.kernel_launch import Device

SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "mm_tokens_per_image": 256,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
GEMMA4_31B: dict[str, Any] = {  # as published; the sizes of its tower are about those
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "eos_token_id": 1,
    "text_config": {
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "num_attention_heads": 32,
        "num_experts": None,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262144,
    },
    "vision_config": {
        "head_dim": 72,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "gemma4_vision",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "standardize": True,
    },
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
GEMMA4_TEXT = {**GEMMA4_31B["text_config"], "architectures": ["Gemma4ForCausalLM"]}
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "sliding_window": 4096,
}
GLM45_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM_FLASH: dict[str, Any] = json.loads((SHAPES / "glm-4.7-flash" / "config.json").read_text())
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def read(path: Path, values: dict[str, Any], **changes: Any) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(values | changes))
    return load_model_config(path)


def test_gpt_oss() -> None:
    config = load_model_config(SHAPES / "gpt-oss-20b")
    assert config.measured is None
    assert [layer.window for layer in config.attending[:4]] == [128, None, 128, None]
    assert all(
        layer.has_sinks and layer.rope is not None and layer.rope.rope_type == "yarn" for layer in config.attending
    )
    total, active = parameter_counts(config)
    assert total == pytest.approx(20.9e9, rel=0.01)
    assert active == pytest.approx(3.6e9, rel=0.02)


def test_gemma3_beside_a_tower(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_4B)
    windowed, whole = config.attending[0], config.attending[5]
    assert (windowed.window, whole.window, config.attending[33].window) == (1024, None, 1024)
    assert (windowed.num_heads, windowed.num_kv_heads, windowed.head_dim, windowed.scale) == (8, 4, 256, 1 / 16)
    assert windowed.rope is not None
    assert whole.rope is not None
    assert (windowed.rope.theta, windowed.rope.rope_type) == (1e4, "default")
    assert (whole.rope.theta, whole.rope.rope_type, whole.rope.factor) == (1e6, "linear", 8.0)
    assert config.tie_word_embeddings
    assert config.embedding_scale == 2560**0.5
    total, _ = parameter_counts(config)
    assert total == pytest.approx(3.88e9, rel=0.01)
    tower = config.vision
    assert tower is not None
    assert (tower.grid_side, tower.patches_per_token, tower.tokens_per_max_image, tower.head_dim) == (64, 16, 256, 72)
    assert (tower.image_token_id, tower.vision_start_token_id, tower.vision_end_token_id) == (262144, 255999, 256000)
    scaled = load_model_config(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert scaled.attending[0].rope == windowed.rope
    assert scaled.attending[5].rope is not None
    assert scaled.attending[5].rope.factor == 2.0


def test_gemma4(tmp_path: Path) -> None:
    """As published, and as transformers 5.17 writes the text part: the same, and as many parameters as it counts."""
    config, shape = read(tmp_path, GEMMA4_31B), load_model_config(SHAPES / "gemma-4-31b")
    assert config.weight_prefix == "model.language_model."
    ours = {"architecture": config.architecture, "weight_prefix": config.weight_prefix, "vision": config.vision}
    assert replace(shape, **ours) == config
    tower = config.vision
    assert tower is not None
    assert (tower.kind, tower.sees_ahead, tower.is_standardized, tower.marks_in_prompts) == (
        "gemma4",
        True,
        True,
        "image",
    )
    assert (tower.tokens_per_max_image, tower.side_factor, tower.head_dim, tower.patch_dim) == (280, 48, 72, 768)
    assert (tower.vision_start_token_id, *tower.placeholder_ids, tower.vision_end_token_id) == (255999, 258880, 258882)
    assert [layer.sees_ahead for layer in config.attending[:6]] == [True] * 5 + [False]
    assert read(tmp_path, GEMMA4_31B, vision_config=None).vision is None
    for name, value, expected in (
        ("head_dim", 64, "a multiple of 8: hidden_size=1152 / 16 heads"),
        ("num_key_value_heads", 8, "16, one per query head"),
        ("hidden_activation", "relu", "gelu_pytorch_tanh"),
        ("attention_bias", True, "false"),
    ):
        with pytest.raises(ModelLoadError, match=expected):
            read(tmp_path, GEMMA4_31B, vision_config={**GEMMA4_31B["vision_config"], name: value})
    for said, expected in (({"resample": 2}, "3, bicubic"), ({"do_normalize": True}, "false: the tower itself")):
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": said}))
        with pytest.raises(ModelLoadError, match=expected):
            read(tmp_path, GEMMA4_31B)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"max_soft_tokens": 1120}}))
    larger = read(tmp_path, GEMMA4_31B).vision
    assert larger is not None
    assert larger.tokens_per_max_image == 1120
    assert parameter_counts(config) == (30_697_345_340, 30_697_345_340)
    windowed, whole = config.attending[0], config.attending[5]
    assert [layer.window for layer in config.attending[:6]] == [1024] * 5 + [None]
    assert (windowed.num_kv_heads, windowed.head_dim, windowed.values_are_keys) == (16, 256, False)
    assert (whole.num_kv_heads, whole.head_dim, whole.v_dim, whole.values_are_keys) == (4, 512, 512, True)
    assert {layer.scale for layer in config.attending} == {1.0}
    assert whole.rope is not None
    assert (whole.rotation[0], whole.rope.theta, windowed.rotation[1].theta) == (512, 1e6, 1e4)
    frequencies = inverse_frequencies(*whole.rotation)
    assert torch.equal(frequencies[64:], torch.zeros(192))
    torch.testing.assert_close(frequencies[:64], 1e6 ** (-torch.arange(64) / 256))
    assert kv_bytes_per_token(config, 2)[4:6] == [2 * 2 * 16 * 256, 2 * 2 * 4 * 512]
    scaled = load_model_config(tmp_path, rope_scaling={"rope_type": "proportional", "factor": 2.0})
    assert scaled.attending[0].rope == windowed.rope
    assert torch.equal(inverse_frequencies(*scaled.attending[5].rotation), frequencies / 2)


def test_gemma4_with_experts() -> None:
    config = load_model_config(SHAPES / "gemma-4-26b-a4b")
    total, active = parameter_counts(config)
    assert total == 25_233_141_790
    assert active == pytest.approx(3.8e9, rel=0.01)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.num_chosen, config.experts.intermediate_size) == (128, 8, 704)
    part = of_one_member(config, 4)
    assert (part.attending[0].num_kv_heads, part.attending[5].num_kv_heads, part.attending[5].num_sharing) == (2, 1, 2)
    assert part.intermediate_size == 528
    with pytest.raises(ConfigError, match="tensor_parallel_size=3, 8 KV heads"):
        of_one_member(config, 3)


def test_which_layers_compute_gemma4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small ones, with embeddings of each layer and KV of other layers, are transformers' affair."""
    monkeypatch.setattr(config_module, "asked", lambda *_, **__: {"error": {"message": "asked", "got": "transformers"}})
    text = GEMMA4_31B["text_config"]
    for name, value in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 18)):
        (tmp_path / "config.json").write_text(json.dumps({**GEMMA4_31B, "text_config": {**text, name: value}}))
        with pytest.raises(ModelLoadError, match="by transformers' modules: asked"):
            load_model_config(tmp_path)
        with pytest.raises(ModelLoadError, match=f"{name}(.|\n)*{value}(.|\n)*0 for raypp's own layers"):
            load_model_config(tmp_path, impl="raypp")


def test_glm45_air(tmp_path: Path) -> None:
    config = read(tmp_path, GLM45_AIR)
    assert config.attending[0].rotation[0] == 64
    assert (config.qkv_bias, config.attention_output_bias, config.qk_norm) == (True, False, False)
    assert config.experts is not None
    assert config.experts.dense_layers == {0}
    assert config.experts.shared_size == 1408
    assert not config.experts.has_shared_gate
    total, active = parameter_counts(config)
    assert total == pytest.approx(106.9e9, rel=0.01)
    assert active == pytest.approx(12.7e9, rel=0.05)


@pytest.mark.parametrize(
    ("name", "total", "active", "expanded"),
    [
        ("deepseek-v3", 671.0e9, 36.6e9, 128 * (192 + 128)),
        ("kimi-k2", 1026.4e9, 31.7e9, 64 * (192 + 128)),
        ("kimi-k2-int4", 1026.4e9, 31.7e9, 64 * (192 + 128)),
        ("glm-4.7-flash", 29.9e9, 3.6e9, 20 * (256 + 256)),
    ],
)
def test_latents(name: str, total: float, active: float, expanded: int) -> None:
    """Parameters as the model cards have them, and 1,152 bytes a token and layer in place of 20,480 and more."""
    config = load_model_config(SHAPES / name)
    assert parameter_counts(config) == (pytest.approx(total, rel=0.002), pytest.approx(active, rel=0.01))
    assert kv_bytes_per_token(config, 2) == [2 * 576] * config.num_layers
    assert expanded * 2 / 1152 > 17
    layer = config.attending[0]
    assert layer.rope is not None
    sharpness = 1.0 if layer.rope.rope_type == "default" else 0.1 * math.log(layer.rope.factor) + 1
    assert layer.scale == pytest.approx(layer.head_dim**-0.5 * sharpness**2)
    part = of_one_member(config, 4)
    assert kv_bytes_per_token(part, 2) == kv_bytes_per_token(config, 2)
    assert part.attending[0].num_heads == layer.num_heads // 4


def test_mistral_small_4(tmp_path: Path) -> None:
    config = load_model_config(SHAPES / "mistral-small-4")
    assert parameter_counts(config) == (pytest.approx(119e9, rel=0.002), pytest.approx(6.1e9, rel=0.01))
    assert kv_bytes_per_token(config, 2) == [2 * 320] * 36
    assert (config.vision, config.quantization is None) == (None, False)
    layer, experts = config.attending[0], config.experts
    assert layer.rope is not None
    assert (layer.rope.query_growth, layer.rope.original_max_position_embeddings) == (0.1, 8192)
    assert layer.scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2)
    assert experts is not None
    assert (experts.has_sigmoid, experts.normalizes, experts.num_ranking, experts.num_groups) == (False, True, 2, 1)
    values = json.loads((SHAPES / "mistral-small-4" / "config.json").read_text())["text_config"]
    alone = {**values, "architectures": ["Mistral4ForCausalLM"]}
    groups = read(tmp_path, alone, n_group=4, topk_group=2).experts
    assert groups is not None
    assert (groups.num_groups, groups.num_chosen_groups, groups.num_ranking) == (4, 2, 2)
    del alone["rope_parameters"]  # what is unsaid
    unsaid = read(tmp_path, alone).attending[0].rope
    assert unsaid == replace(layer.rope, share=1.0)
    steady = read(tmp_path, alone, rope_scaling={"type": "yarn", "factor": 4.0}).attending[0].rope
    assert steady is not None
    assert steady.query_growth == 0.0
    for wrong in ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "llama_4_scaling_beta": -1}):
        with pytest.raises(ModelLoadError, match="llama_4_scaling_beta"):
            read(tmp_path, alone, rope_parameters={"llama_4_scaling_beta": 0.1} | wrong)
    read(tmp_path, alone)
    longer = load_model_config(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 2.0}).attending[0].rope
    assert longer is not None
    assert (longer.factor, longer.query_growth, longer.original_max_position_embeddings) == (2.0, 0.1, 8192)


@pytest.mark.parametrize("name", ["kimi-k2", "kimi-k2-int4"])
def test_names_of_kimi(name: str, tmp_path: Path) -> None:
    """Its config.json may name DeepSeek-V3 or itself; Kimi-K2.5 has it beside a tower."""
    values = json.loads((SHAPES / name / "config.json").read_text())
    known = read(tmp_path, values)
    own = read(tmp_path, values, architectures=["KimiK2ForCausalLM"])
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": values}
    beside = read(tmp_path, {**whole, "vision_config": {"hidden_size": 1152}, "tie_word_embeddings": False})
    assert own == beside == replace(known, architecture="KimiK2ForCausalLM")
    assert known.quantization is not None
    covers = known.quantization.covers
    assert covers("model.layers.1.mlp.experts.0.gate_proj")
    others = ("self_attn.kv_b_proj", "mlp.shared_experts.up_proj", "mlp.gate_proj")
    assert {covers(f"model.layers.1.{module}") for module in others} == {not name.endswith("int4")}


def test_latents_without_a_query_rank(tmp_path: Path) -> None:
    values = json.loads((SHAPES / "deepseek-v3" / "config.json").read_text())
    values |= {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "scoring_func": "softmax"}
    values |= {"topk_method": "group_limited_greedy", "norm_topk_prob": False}
    config = read(tmp_path, values)
    assert config.attending[0].latent is not None
    assert config.attending[0].latent.query_rank is None
    assert config.experts is not None
    assert (config.experts.num_groups, config.experts.num_ranking, config.experts.normalizes) == (8, 1, False)
    assert read(tmp_path, values, topk_method="greedy").experts.num_groups == 1  # type: ignore[union-attr]


def test_minimax_m2(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAX_M2)
    assert config.attending[0].rotation[0] == 64
    assert config.has_wide_qk_norm
    total, active = parameter_counts(config)
    assert total == pytest.approx(228.7e9, rel=0.01)
    assert active == pytest.approx(10e9, rel=0.05)


@pytest.mark.parametrize(
    ("values", "changes", "words"),
    [
        (GLM45_AIR, {"n_group": 3}, ["n_group", "3", "128"]),
        (GLM45_AIR, {"n_group": 32}, ["num_experts_per_tok", "8", "4 experts"]),
        (GLM45_AIR, {"scoring_func": "softmax"}, ["scoring_func", "sigmoid"]),
        (GLM_FLASH, {"qk_rope_head_dim": 63}, ["qk_rope_head_dim", "63", "even"]),
        (GLM_FLASH, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (GLM_FLASH, {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "47 of dense, sparse"]),
        (GLM45_AIR, {"first_k_dense_replace": -1}, ["first_k_dense_replace", "-1", "at least 0"]),
        (GEMMA3_4B, {"hidden_activation": "relu"}, ["hidden_activation", "relu", "gelu_pytorch_tanh"]),
        (GEMMA3_4B, {"mm_tokens_per_image": 100}, ["mm_tokens_per_image", "100", "divides 64 patches"]),
        (GEMMA3_4B, {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (GEMMA4_TEXT, {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "all"]),
        (GEMMA4_TEXT, {"layer_types": ["sliding_attention"] * 60}, ["layer_types", "full_attention"]),
        (GEMMA4_TEXT, {"num_global_key_value_heads": 5}, ["num_global_key_value_heads", "5", "num_attention_heads=32"]),
        (GEMMA4_TEXT, {"global_head_dim": 511}, ["global_head_dim", "511", "even"]),
        (GEMMA4_TEXT, {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 9}, ["top_k_experts", "9", "8"]),
    ],
)
def test_what_is_refused(values: dict[str, Any], changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, values, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_members(tmp_path: Path) -> None:
    part = of_one_member(load_model_config(SHAPES / "gpt-oss-20b"), 4)
    assert part.experts is not None
    assert part.experts.intermediate_size == 720
    part = of_one_member(read(tmp_path, MINIMAX_M2), 16)
    assert (part.attending[0].num_heads, part.attending[0].num_sharing) == (3, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size=5, 8 KV heads"):
        of_one_member(read(tmp_path, GLM45_AIR), 5)


@pytest.mark.parametrize(
    ("name", "wholes"),
    [
        ("deepseek-v3", {}),
        ("kimi-k2-int4", {}),
        ("qwen3-30b-a3b", {}),
        ("qwen3-30b-a3b-fp8", {4: 32, 8: 16, 16: 8}),  # 192 and fewer inputs in blocks of 128
        ("qwen3-30b-a3b-awq", {16: 8}),
        ("qwen3-235b-a22b-fp8", {8: 16, 16: 8}),
        ("gpt-oss-20b-mxfp4", {4: 8, 8: 4, 16: 2}),  # 720 and fewer in groups of 32
    ],
)
def test_members_have_whole_experts_where_parts_lose_their_form(name: str, wholes: dict[int, int]) -> None:
    model = load_model_config(SHAPES / name)
    for count in (2, 4, 8, 16):
        part, asked = of_one_member(model, count).experts, of_one_member(model, count, whole_experts=True).experts
        assert model.experts is not None
        assert part is not None
        assert asked is not None
        assert asked.num_held == model.experts.num_experts // count
        assert asked.intermediate_size == model.experts.intermediate_size
        sizes = (part.num_held, part.intermediate_size)
        whole = (model.experts.num_experts, model.experts.intermediate_size // count)
        assert sizes == ((wholes[count], model.experts.intermediate_size) if count in wholes else whole)


def test_what_is_unsaid_or_null(tmp_path: Path) -> None:
    unsaid = {name: value for name, value in MINIMAX_M2.items() if not name.endswith("dtype")}
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert read(tmp_path, unsaid | {"quantization_config": blocks}).dtype == "bfloat16"
    assert read(tmp_path, unsaid).dtype == "float32"
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = read(tmp_path, GEMMA2)
    assert (config.logit_cap, config.attending[0].soft_cap) == (30.0, 50.0)
    config = read(tmp_path, GEMMA2 | caps)
    assert (config.logit_cap, config.attending[0].soft_cap) == (None, None)


_FP8 = Quantization(format="fp8", block=(128, 128), is_for_gpus=True)
_ORDERED = Quantization(format="gptq", block=(1, 128), has_order=True, is_for_gpus=True)


@pytest.mark.parametrize(
    ("form", "size", "keeps"),
    [
        (Quantization(format="mxfp4", block=(1, 32), is_for_gpus=True), 1440, True),
        (Quantization(format="mxfp4", block=(1, 32), is_for_gpus=True), 720, False),  # groups of 16
        (_FP8, 384, True),
        (_FP8, 192, False),
        (Quantization(format="fp8", block=(1, 0), is_for_gpus=True), 352, True),
        (Quantization(format="fp8", block=(1, 0), is_for_gpus=True), 176, False),
    ],
)
def test_which_parts_of_experts_keep_their_form(form: Quantization, size: int, keeps: bool) -> None:
    assert form.is_kept(size, is_part=True, is_of_experts=True) == keeps
    assert form.is_kept(size, is_part=True, is_of_experts=False)


@pytest.mark.parametrize(
    ("form", "num_inputs", "keeps"),
    [
        (_ORDERED, 768, False),  # kernels of experts read inputs as they come
        (replace(_ORDERED, is_for_gpus=False), 768, True),  # as it is stored
        (replace(_ORDERED, has_order=False), 768, True),
        (_FP8, 192, True),
        (replace(_FP8, block=(1, 64)), 192, False),
        (replace(_FP8, block=(1, 0)), 176, False),
    ],
)
def test_which_whole_experts_keep_their_form(form: Quantization, num_inputs: int, keeps: bool) -> None:
    """As `raypp.ops.cuda.expert_products.has_kernel` says of the weight."""
    assert form.is_kept(num_inputs, is_part=False, is_of_experts=True) == keeps
    assert form.is_kept(num_inputs, is_part=False, is_of_experts=False)
    if form.is_for_gpus:
        weight = DummyWeights(0).quantized("w", (2, 128, num_inputs), form)
        assert has_kernel(weight, torch.bfloat16, Device.of(torch.device("cpu"))) == keeps


def test_experts_whose_inputs_have_an_order_are_counted_in_16_bits() -> None:
    model = load_model_config(SHAPES / "qwen3-30b-a3b")
    plain, ordered = (layer_sizes(replace(model, quantization=form), 2)[0].reads for form in (None, _ORDERED))
    assert ordered.experts == plain.experts
    assert ordered.always < 0.4 * plain.always
