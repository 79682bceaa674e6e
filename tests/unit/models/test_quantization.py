"""config.json's `quantization_config`: which forms are known, what stays in 16 bits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import write_config

from raypp.errors import ModelLoadError
from raypp.models.config import load_model_config
from raypp.models.config_fields import ConfigFields
from raypp.models.quantization import Quantization, read_quantization

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128}


def _compressed(group=None, **changes):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    values = {"weights": weights | changes.pop("weights", {}), "targets": ["Linear"]} | (group or {})
    whole = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return whole | {"config_groups": {"group_0": values}} | changes


def _float8(**weights):
    return _compressed(
        format="float-quantized", weights={"num_bits": 8, "type": "float", "group_size": None, **weights}
    )


def _read(config, **more):
    return read_quantization(ConfigFields(Path("config.json"), {"quantization_config": config, **more}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FP8, {"format": "fp8", "block": (128, 128)}),
        ({**FP8, "weight_block_size": None}, {"format": "fp8", "block": (1, 0)}),
        ({**FP8, "weight_block_size": [64, 256]}, {"format": "fp8", "block": (64, 256)}),
        (AWQ, {"format": "awq", "block": (1, 128), "has_zeros": True}),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": -1},
            {"format": "awq", "block": (1, 0), "has_zeros": True},
        ),
        (GPTQ, {"format": "gptq", "block": (1, 128), "zero_offset": 1}),
        (
            {**GPTQ, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
            {"format": "gptq", "block": (1, 128), "has_zeros": True, "has_order": True},
        ),
        ({**GPTQ, "desc_act": True, "group_size": -1}, {"format": "gptq", "block": (1, 0), "zero_offset": 1}),
        (_compressed(), {"format": "compressed_int4", "block": (1, 128)}),
        (
            _compressed(weights={"symmetric": False, "actorder": "group"}),
            {"format": "compressed_int4", "block": (1, 128), "has_zeros": True, "has_order": True},
        ),
        (_compressed(weights={"actorder": "weight"}), {"format": "compressed_int4", "block": (1, 128)}),
        (
            _compressed(weights={"strategy": "channel", "group_size": None}),
            {"format": "compressed_int4", "block": (1, 0)},
        ),
        (_float8(strategy="tensor"), {"format": "fp8", "block": (1, 0)}),
        (_float8(strategy="channel"), {"format": "fp8", "block": (1, 0)}),
        (_float8(strategy="block", block_structure=[128, 128]), {"format": "fp8", "block": (128, 128)}),
        (_compressed(weights={"num_bits": 8, "group_size": 32}), {"format": "int8", "block": (1, 32)}),
        (
            _compressed(format="nvfp4-pack-quantized", weights={"type": "float", "group_size": 16}),
            {"format": "nvfp4", "block": (1, 16)},
        ),
        ({"quant_method": "mxfp4"}, {"format": "mxfp4", "block": (1, 32), "only": ("experts",)}),
        (MODELOPT, {"format": "nvfp4", "block": (1, 16), "skipped": ("lm_head",)}),
        ({**MODELOPT, "quant_algo": "FP8"}, {"format": "fp8", "block": (1, 0), "skipped": ("lm_head",)}),
        (AUTO_ROUND, {"format": "gptq", "block": (1, 128), "zero_offset": 1}),
        (_compressed({"format": "pack-quantized"}, format="mixed"), {"format": "compressed_int4", "block": (1, 128)}),
    ],
)
def test_forms(config, expected):
    skipped = ("lm_head",) if config["quant_method"] == "compressed-tensors" else ()
    assert _read(config) == Quantization(**{"skipped": skipped, **expected})


@pytest.mark.parametrize(("name", "form"), [("qwen3-8b-fp8", "fp8"), ("qwen3-8b-awq", "awq")])
def test_published_configurations(name, form):
    quantization = load_model_config(Path(__file__).parents[3] / "benchmarks" / "models" / name).quantization
    assert quantization is not None
    assert (quantization.format, quantization.block[1]) == (form, 128)
    assert quantization.covers("model.layers.35.mlp.down_proj")


def test_models_without_and_with_text_config(tmp_path):
    assert load_model_config(write_config(tmp_path)).quantization is None
    assert load_model_config(write_config(tmp_path, quantization_config=None)).quantization is None
    read = load_model_config(write_config(tmp_path, quantization_config=FP8)).quantization
    assert read == Quantization(format="fp8", block=(128, 128))


@pytest.mark.parametrize("inside", [True, False])
def test_a_model_that_reads_images(tmp_path, inside):
    from raypp.models.registry import resolve_model_path

    whole = dict(json.loads((resolve_model_path("tiny-vl") / "config.json").read_text()))
    if inside:
        whole["text_config"]["quantization_config"] = FP8
    else:
        whole["quantization_config"], whole["text_config"]["quantization_config"] = FP8, None
    config = load_model_config(write_config(tmp_path, **whole))
    assert config.quantization == Quantization(format="fp8", block=(128, 128))


@pytest.mark.parametrize(
    ("skipped", "module", "covered"),
    [
        ("lm_head", "lm_head", False),
        ("lm_head", "model.layers.0.mlp.up_proj", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", False),
        ("model.layers.1", "model.layers.10.mlp.up_proj", True),
        ("mlp.gate", "model.layers.0.mlp.gate", False),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", True),
        ("gate", "model.layers.0.block_sparse_moe.gate", False),
        ("q_proj", "model.layers.0.self_attn.q_proj", False),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", False),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", True),
        ("re:layers", "model.layers.0.mlp.gate", True),  # a pattern begins where the name does
        (r"re:model\.layers\.[12]\.", "model.layers.2.mlp.up_proj", False),
    ],
)
def test_what_stays_in_16_bits(skipped, module, covered):
    assert _read({**FP8, "modules_to_not_convert": ["x", skipped]}).covers(module) == covered
    assert _read(_compressed(ignore=["lm_head", skipped])).covers(module) == covered
    assert _read(FP8).covers(module)


@pytest.mark.parametrize(
    ("skipped", "module", "covered"),
    [
        ("layers.1", "model.layers.10.mlp.up_proj", False),
        ("_proj", "model.layers.0.mlp.up_proj", False),
        ("attn.q", "model.layers.0.self_attn.q_proj", False),
        ("mlp.gate.", "model.layers.0.mlp.gate", False),
        ("mlp.gate.", "model.layers.0.mlp.gate_proj", True),
        ("visual", "model.layers.0.mlp.gate_proj", True),
        ("q.proj", "model.layers.0.self_attn.q_proj", True),
    ],
)
def test_awq_takes_any_part_of_a_name(skipped, module, covered):
    assert _read({**AWQ, "modules_to_not_convert": ["x", skipped]}).covers(module) == covered


def test_gptqs_dynamic_modules():
    read = _read({**GPTQ, "dynamic": {r"-:.*\.q_proj": {}}})
    assert not read.covers("model.layers.0.self_attn.q_proj")
    assert read.covers("model.layers.0.self_attn.k_proj")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("fp8", ["'quantization_config'", "an object"]),
        ({"quant_method": "bitsandbytes"}, ["quant_method", "bitsandbytes", "fp8, compressed-tensors, awq, gptq"]),
        ({"load_in_8bit": True}, ["quant_method", "nothing", "awq"]),
        ({"quant_method": ["fp8"]}, ["quant_method", "['fp8']"]),
        ({**FP8, "fmt": "e5m2"}, ["fmt", "e5m2", "e4m3"]),
        ({**FP8, "activation_scheme": "none"}, ["activation_scheme", "'none'", "dynamic"]),
        ({**FP8, "weight_block_size": [128]}, ["weight_block_size", "[128]", "two positive integers"]),
        ({**FP8, "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert", "'lm_head'", "a list"]),
        ({**FP8, "modules_to_not_convert": ["re:("]}, ["modules_to_not_convert", "regular expression"]),
        ({**AWQ, "bits": 8}, ["bits", "8", "4"]),
        ({**AWQ, "version": "gemv"}, ["version", "gemv", "'gemm'"]),
        ({**AWQ, "zero_point": False}, ["zero_point", "false", "true"]),
        ({**AWQ, "group_size": 0}, ["group_size", "0", "-1"]),
        ({**GPTQ, "bits": 3}, ["bits", "3", "4"]),
        ({**GPTQ, "bits": None}, ["bits", "nothing", "4"]),
        ({**GPTQ, "lm_head": True}, ["lm_head", "true", "false"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format", "marlin", "gptq_v2"]),
        ({**GPTQ, "group_size": ...}, ["group_size", "-1"]),
        ({**GPTQ, "pack_dtype": "int64"}, ["pack_dtype", "int64", "int32"]),
        ({**GPTQ, "modules_in_block_to_quantize": [["q_proj"]]}, ["modules_in_block_to_quantize", "q_proj"]),
        ({**GPTQ, "sym": 1}, ["sym", "1", "true or false"]),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, ["dynamic", "+:.*"]),
        ({**GPTQ, "dynamic": {"-:(": {}}}, ["dynamic", "-:(", "a regular expression behind -:"]),
        (_compressed(ignore=[]), ["ignore", "lm_head"]),
        (_compressed(config_groups={}), ["config_groups", "no group"]),
        (_compressed(config_groups=None), ["config_groups", "nothing", "an object"]),
        (_compressed(weights={"num_bits": 3}), ["group_0.weights.num_bits", "3", "4 or 8"]),
        (_compressed(weights={"num_bits": 8, "symmetric": False}), ["symmetric", "false", "true"]),
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, ["quant_algo", "W4A8_AWQ", "'nvfp4' or 'fp8'"]),
        ({**AUTO_ROUND, "packing_format": "auto_round"}, ["packing_format", "auto_round:auto_gptq"]),
        ({**AUTO_ROUND, "extra_config": {"a": {"bits": 8}}}, ["extra_config", "a: {'bits': 8}", "16 bits"]),
        ({"quant_method": "mxfp4", "group_size": 16}, ["group_size", "16", "32"]),
        (_compressed(weights={"num_bits": 8, "actorder": "group"}), ["actorder", "'group'", "'weight'"]),
        (_compressed(weights={"strategy": "tensor"}), ["strategy", "tensor", "'channel' or 'group'"]),
        (_compressed(weights={"actorder": "so"}), ["actorder", "'so'"]),
        (_compressed(weights={"type": "nf"}), ["type", "'nf'", "'float' or 'int'"]),
        (_compressed(weights={"num_bits": 8, "type": "float"}), ["format", "pack-quantized", "float-quantized"]),
        (_compressed(format="int-quantized"), ["format", "int-quantized", "pack-quantized"]),
        (_compressed({"targets": []}), ["targets", "nothing", "Linear"]),
        (_compressed({"targets": ["re:.*("]}), ["targets", "regular expression"]),
        (_compressed({"weights": None}), ["group_0.weights", "nothing", "an object"]),
        (_compressed(sparsity_config={"format": "sparse-24-bitmask"}), ["sparsity_config", "sparse-24"]),
        (_compressed(transform_config={"config_groups": {}}), ["transform_config"]),
        (_compressed(moe_sparsity_config={"method": "prune"}), ["moe_sparsity_config", "prune"]),
        (_float8(strategy="tensor", symmetric=False), ["symmetric", "false", "true"]),
        (_float8(strategy="tensor", dynamic=True), ["dynamic", "true", "false"]),
    ],
)
def test_refusals_name_file_field_and_what_is_known(tmp_path, config, words):
    if isinstance(config, dict):
        config = {name: value for name, value in config.items() if value is not ...}
    with pytest.raises(ModelLoadError) as caught:
        load_model_config(write_config(tmp_path, quantization_config=config))
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(caught.value)


def test_groups_that_differ_are_refused():
    config = _compressed()
    groups = config["config_groups"]
    groups["group_1"] = groups["group_0"]
    assert _read(config) == _read(_compressed())
    groups["group_1"] = _float8(strategy="tensor")["config_groups"]["group_0"] | {"format": "float-quantized"}
    with pytest.raises(ModelLoadError, match="2 kinds of weights"):
        _read(config)


@pytest.mark.parametrize(
    ("config", "covered", "skipped"),
    [
        ({**MODELOPT, "ignore": ["model.layers.*.mlp.gate"]}, ["mlp.gate_proj"], ["mlp.gate", "mlp.gate.weight"]),
        ({**MODELOPT, "ignore": ["*self_attn*"]}, ["mlp.gate_proj"], ["self_attn.q_proj"]),
        ({**AUTO_ROUND, "extra_config": {r".*mlp\.gate$": {"bits": 16}}}, ["mlp.gate_proj"], ["mlp.gate"]),
        ({**AUTO_ROUND, "extra_config": {"mlp.up_proj": {"bits": 4, "group_size": 128}}}, ["mlp.up_proj"], []),
    ],
)
def test_names_with_stars_and_patterns(config, covered, skipped):
    quantization = _read(config)
    assert all(quantization.covers(f"model.layers.3.{name}") for name in covered)
    assert not any(quantization.covers(f"model.layers.3.{name}") for name in skipped)


def test_groups_name_the_modules_that_are_quantized():
    config = _compressed({"targets": ["re:.*self_attn.*"]}, ignore=["re:.*k_proj"])
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"] | {"targets": ["mlp.down_proj"]}
    quantization = _read(config, tie_word_embeddings=True)
    layer = "model.layers.3."
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    assert [quantization.covers(layer + name) for name in names] == [True, False, False, True]
    assert not quantization.covers("lm_head")


def test_an_lm_head_beside_a_tower_may_be_named_so():
    assert _read(_compressed(ignore=["language_model.lm_head", "re:vision_tower.*"])) is not None


def test_a_tied_lm_head_needs_no_word():
    assert _read(_compressed(ignore=[]), tie_word_embeddings=True) is not None
