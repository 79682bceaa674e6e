"""Mistral's own form of a checkpoint: what params.json says, and what the tensors are called."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raypp.errors import ModelLoadError
from raypp.models.checkpoint_names import file_of_tensor, has_own_form, stored_tensors
from raypp.models.config import load_model_config
from raypp.models.draft_head_config import load_draft_head_config
from raypp.models.mistral_format import name_in_transformers
from raypp.models.sizes import kv_bytes_per_token, parameter_counts

YARN = {"factor": 36, "beta": 32, "alpha": 1, "original_max_position_embeddings": 8192, "apply_scale": False}
GROWTH = {"beta": 0.1, "original_max_position_embeddings": 8192}
MOE = {
    "expert_parallel": 1,
    "expert_model_parallel": 1,
    "route_every_n": 1,
    "first_k_dense_replace": 3,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "num_expert_groups": 1,
    "num_expert_groups_per_tok": 1,
    "routed_scale": 1.0,
    "expert_hidden_dim": 4096,
    "num_shared_experts": 1,
}
LARGE_3 = {
    "dim": 7168,
    "n_layers": 61,
    "head_dim": 128,
    "hidden_dim": 16384,
    "n_heads": 128,
    "n_kv_heads": 128,
    "rope_theta": 10000.0,
    "norm_eps": 1e-06,
    "vocab_size": 131072,
    "tied_embeddings": False,
    "max_position_embeddings": 294912,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "yarn": YARN,
    "llama_4_scaling": GROWTH,
    "moe": MOE,
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    "vision_encoder": {"hidden_size": 1664, "image_token_id": 10},
}
SMALL_3 = {
    "dim": 5120,
    "n_layers": 40,
    "head_dim": 128,
    "hidden_dim": 32768,
    "n_heads": 32,
    "n_kv_heads": 8,
    "rope_theta": 1000000000.0,
    "norm_eps": 1e-05,
    "vocab_size": 131072,
    "max_position_embeddings": 131072,
    "multimodal": {"vision_encoder_args": {"hidden_size": 1024}, "whisper_model_args": None},
}
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "NVFP4": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        }
    },
    "ignore": ["model.embed_tokens", "re:vision_encoder.*", "re:.*kv_a_proj_with_mqa$", "output", "layers.3.gate"],
}


def write(path: Path, params: Mapping[str, Any], **changed: Any) -> Path:
    (path / "params.json").write_text(json.dumps({**params, **changed}))
    return path


def test_large_3(tmp_path: Path) -> None:
    """Of its params.json, the positions are as published; its sizes give the published numbers of parameters."""
    config = load_model_config(write(tmp_path, LARGE_3))
    assert parameter_counts(config) == (pytest.approx(673e9, rel=0.002), pytest.approx(39e9, rel=0.05))
    assert kv_bytes_per_token(config, 2) == [2 * 576] * 61
    layer, experts, quantization = config.attending[0], config.experts, config.quantization
    assert layer.rope is not None
    assert (layer.rope.factor, layer.rope.query_growth) == (36.0, 0.1)
    assert (layer.rope.attention_factor, layer.rope.sharpness, layer.scale) == (1.0, 1.0, pytest.approx(192**-0.5))
    assert (layer.has_neighbours, layer.order_of_pairs) == (True, None)
    assert experts is not None
    assert (experts.has_sigmoid, experts.normalizes, experts.shared_size) == (False, True, 4096)
    assert experts.dense_layers == {0, 1, 2}
    assert quantization is not None
    assert (quantization.format, quantization.block) == ("fp8", (1, 0))
    assert (config.max_position_embeddings, config.vision, config.eos_token_ids) == (294912, None, (2,))
    assert config.dtype == "bfloat16"


def test_small_3_and_ministral_3(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, SMALL_3))
    assert parameter_counts(config)[0] == pytest.approx(23.6e9, rel=0.01)
    layer = config.attending[0]
    assert (config.architecture, config.quantization, layer.window) == ("MistralForCausalLM", None, None)
    assert config.tie_word_embeddings is False
    order = layer.order_of_pairs
    assert order is not None
    assert (order[:3], order[63:66], order[128]) == ([0, 2, 4], [126, 1, 3], 128)
    assert order[-1024:] == list(range(5120, 6144))
    assert sorted(order) == list(range(6144))
    growing = {"yarn": {**YARN, "factor": 16}, "llama_4_scaling": GROWTH, "max_position_embeddings": None}
    config = load_model_config(write(tmp_path, SMALL_3, **growing, tied_embeddings=True))
    rope = config.attending[0].rope
    assert rope is not None
    assert (rope.query_growth, rope.attention_factor, config.max_position_embeddings) == (0.1, 1.0, 16 * 8192)
    assert config.tie_word_embeddings is True
    sharp = load_model_config(write(tmp_path, SMALL_3, yarn={**YARN, "apply_scale": True})).attending[0].rope
    assert sharp is not None
    assert (sharp.query_growth, sharp.attention_factor) == (0.0, pytest.approx(1 + 0.1 * math.log(36)))
    assert load_model_config(write(tmp_path, SMALL_3, sliding_window=4096)).attending[0].window == 4096


@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
def test_few_bits_by_compressed_tensors(name: str, tmp_path: Path) -> None:
    """Its names may be transformers' or Mistral's own."""
    others = {"quantization": None, name: {**NVFP4, "quant_method": "Compressed_Tensors"}}
    quantization = load_model_config(write(tmp_path, LARGE_3, **others)).quantization
    assert quantization is not None
    assert quantization.format == "nvfp4"
    covered = {
        "model.layers.0.self_attn.q_a_proj": True,
        "model.layers.0.self_attn.kv_a_proj_with_mqa": False,
        "model.layers.3.mlp.experts.7.up_proj": True,
        "model.layers.3.mlp.gate": False,
        "lm_head": False,
    }
    assert {module: quantization.covers(module) for module in covered} == covered


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"dim": None}, r"params.json: field 'dim' is not usable.*nothing.*positive integer"),
    "unknown": ({"attn_gate": True}, r"field 'attn_gate' is not usable.*True.*one of the fields activation, causal"),
    "activation": ({"activation": "gelu"}, r"field 'activation'.*'gelu'.*'silu', or nothing"),
    "window": ({"sliding_window": 4096}, r"field 'sliding_window'.*layers with latents see all tokens"),
    "experts": ({"moe": None}, r"field 'moe'.*nothing.*an object"),
    "routing": ({"moe": {**MOE, "route_every_n": 2}}, r"field 'moe.route_every_n'.*2.*1, or nothing"),
    "bias": ({"moe": {**MOE, "use_load_balancing_bias": True}}, r"field 'moe.use_load_balancing_bias'.*True.*False"),
    "unknown of experts": ({"moe": {**MOE, "scores": "sigmoid"}}, r"field 'moe.scores'.*sigmoid.*expert_hidden_dim"),
    "sharp": ({"yarn": {**YARN, "apply_scale": True}}, r"field 'yarn.apply_scale'.*True.*false, beside latents"),
    "unsaid": ({"yarn": {**YARN, "apply_scale": None}}, r"field 'yarn.apply_scale'.*nothing.*false"),
    "growth": ({"yarn": None}, r"field 'yarn'.*nothing.*beside llama_4_scaling"),
    "two lengths": (
        {"llama_4_scaling": {**GROWTH, "original_max_position_embeddings": 4096}},
        r"field 'llama_4_scaling.original_max_position_embeddings'.*4096.*the 8192 of yarn",
    ),
    "bits": ({"quantization": {"qformat_weight": "int8"}}, r"field 'quantization.qformat_weight'.*'int8'.*'fp8_e4m3'"),
    "scales": (
        {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "ROW"}},
        r"field 'quantization.qscheme_act'.*'ROW'.*'TENSOR' or 'NO_SCALES'",
    ),
    "no bits": ({"quantization": {"qscheme_act": "TENSOR"}}, r"field 'quantization.qformat_weight'.*nothing"),
    "two kinds": ({"quantization_config": NVFP4}, r"field 'quantization_config'.*nothing beside quantization"),
    "sounds": ({"multimodal": {"whisper_model_args": {"x": 1}}}, r"field 'multimodal.whisper_model_args'.*no sounds"),
    "not an object": ({"multimodal": 3}, r"field 'multimodal'.*an object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_understood(name: str, tmp_path: Path) -> None:
    changed, message = WRONG[name]
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(write(tmp_path, LARGE_3, **changed))


def test_experts_without_latents(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"field 'moe'.*kv_lora_rank.*experts come with latents"):
        load_model_config(write(tmp_path, SMALL_3, moe={"num_experts": 8, "num_experts_per_tok": 2}))


def test_modules_of_transformers(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"do not read Mistral's own form.*auto or raypp"):
        load_model_config(write(tmp_path, SMALL_3), impl="transformers")


def test_heads_that_draft(tmp_path: Path) -> None:
    """Large 3's EAGLE head is published so."""
    target = load_model_config(write(tmp_path, SMALL_3))
    with pytest.raises(ModelLoadError, match=r"heads are not read in Mistral's own form.*params.json.*config.json"):
        load_draft_head_config(tmp_path, target)


def test_which_form_is_read(tmp_path: Path) -> None:
    """config.json, but where only the weights of Mistral's own form are there."""
    assert not has_own_form(tmp_path)
    write(tmp_path, SMALL_3)
    assert has_own_form(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not has_own_form(tmp_path)
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "consolidated-00001-of-00002.safetensors")
    save_file({"output.weight": torch.ones(3, 2)}, tmp_path / "consolidated-00002-of-00002.safetensors")
    assert has_own_form(tmp_path)
    assert {name: one.shape for name, one in stored_tensors(tmp_path).items()} == {
        "model.norm.weight": (2,),
        "lm_head.weight": (3, 2),
    }
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert not has_own_form(tmp_path)
    assert file_of_tensor(tmp_path) == {"model.norm.weight": "model.safetensors"}


@pytest.mark.parametrize(
    ("own", "known"),
    [
        ("layers.3.attention.wkv_a_with_mqa.qscale_act", "model.layers.3.self_attn.kv_a_proj_with_mqa.input_scale"),
        ("layers.3.experts.12.w2.weight_global_scale", "model.layers.3.mlp.experts.12.down_proj.weight_global_scale"),
        ("layers.3.shared_experts.w1.qscale_weight", "model.layers.3.mlp.shared_experts.gate_proj.weight_scale"),
        ("layers.3.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("layers.0.feed_forward.w3.weight", "model.layers.0.mlp.up_proj.weight"),
        ("layers.0.attention.kv_fake_quantizer.qscale_act", "model.layers.0.self_attn.kv_scale"),
        ("norm.weight", "model.norm.weight"),
        ("vision_encoder.transformer.layers.0.attention.wq.weight", None),
        ("vision_language_adapter.w_in.weight", None),
        ("model.layers.0.mlp.gate.weight", None),
        ("lm_head", None),
    ],
)
def test_names(own: str, known: str | None) -> None:
    assert name_in_transformers(own) == (own if known is None else known)
