"""Gemma 4 beside its tower, in few bits, and what of it only transformers' modules compute.

Its texts on stages, in chunks, with drafts and members: see `hf_models.GEMMA4` and the tests of all families.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import quantized_tensors
import torch
import transformers
from exactness import ExactComparison
from hf_models import make_checkpoint
from quantized_tensors import CONFIGS, LINEAR, quantize_checkpoint, quantized_layer
from safetensors.torch import load_file, save_file
from shrunken_models import make_shrunken
from test_quantized_weights import compare_texts

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ModelLoadError
from raypp.models.config import load_model_config
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.testing.try_decoder import try_cut
from raypp.types import SamplingParams

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
DIMS = {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "vocab_size": 199}
EXPERTS = {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 64}
GROUP = 32  # of the published INT4


VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 64,
}
OF_UNIFIED = {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32, "patch_size": 4}


def _beside_a_tower(path: Path, name: str) -> Path:
    """Write a checkpoint as `Gemma4ForConditionalGeneration` is published: a tower, and the text part below it."""
    family, vision = ("gemma4_moe", VISION) if name == "Gemma4" else ("gemma4", OF_UNIFIED)
    text = json.loads((make_checkpoint(family, 4, path / "text") / "config.json").read_text())
    text = {key: value for key, value in text.items() if key != "model_type"}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    model: Any = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    own = transformers.AutoModelForCausalLM.from_pretrained(path / "text", dtype=torch.float32)
    model.model.language_model.load_state_dict(own.model.state_dict())
    model.save_pretrained(path / "whole")
    return path / "whole"


@pytest.mark.parametrize("name", ["Gemma4", "Gemma4Unified"])
def test_the_text_part_of_a_checkpoint_with_a_tower(name, tmp_path, caplog):
    path = _beside_a_tower(tmp_path, name)
    names = load_file(path / "model.safetensors")
    assert "model.language_model.layers.0.layer_scalar" in names
    assert any(each.startswith(("model.vision_tower.", "model.vision_embedder.")) for each in names)
    settings = {"num_stages": 2, "num_kv_blocks": 200, "max_model_len": 128, "stage_num_threads": 1}
    plan = plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware(1))
    assert plan.model.measured is None  # raypp's own layers
    assert (plan.model.vision is None) == (name == "Gemma4Unified")
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(plan)
    assert "not used" not in caplog.text
    comparison = ExactComparison()
    comparison.compare(
        path,
        [[5, 6, 7, 8] * 6, [9, 10, 11]],
        24,
        lambda prompts, lengths: engine.generate(
            prompts, [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in lengths]
        ),
    )
    comparison.assert_rare()


@pytest.mark.in_ci("fp8 blocks-1", "compressed int4-1", "modelopt nvfp4-3")
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("form", ["fp8 blocks", "compressed int4", "modelopt nvfp4"])
def test_greedy_tokens_of_few_bits(form, num_stages, tmp_path, monkeypatch):
    """In NVFP4 attention stays in 16 bits, as published; in INT4 32 inputs share a scale."""
    monkeypatch.setattr(quantized_tensors, "_GROUP", GROUP)
    if form == "compressed int4":
        group = CONFIGS[form]["config_groups"]["group_0"]
        monkeypatch.setitem(group["weights"], "group_size", GROUP)
    elif form == "modelopt nvfp4":
        monkeypatch.setitem(CONFIGS, form, CONFIGS[form] | {"ignore": ["lm_head", "model.layers.*.self_attn*"]})
    linear = LINEAR if form != "modelopt nvfp4" else ("gate_proj", "up_proj", "down_proj")
    source = make_checkpoint("gemma4", 8, tmp_path / "source", min_layers=4, **SIZES, **DIMS)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain", linear)
    compare_texts(source, tmp_path / "small", tmp_path / "plain", linear, num_stages=num_stages)


@pytest.mark.in_ci("compressed int4-1", "compressed fp8 channel-2", "modelopt nvfp4-2")
@pytest.mark.parametrize("num_members", [1, 2])
@pytest.mark.parametrize("form", ["compressed int4", "compressed fp8 channel", "modelopt nvfp4"])
def test_greedy_tokens_of_experts_of_few_bits(form, num_members, tmp_path, monkeypatch):
    """Checkpoints of few bits have each expert's layers by themselves; the router stays as it is."""
    monkeypatch.setattr(quantized_tensors, "_GROUP", GROUP)
    config = json.loads(json.dumps(CONFIGS[form]))
    if form == "compressed int4":
        config["config_groups"]["group_0"]["weights"]["group_size"] = GROUP
    config["ignore"] = ["lm_head", "re:.*router.*"] if form != "modelopt nvfp4" else ["lm_head", "*router*"]
    source = make_checkpoint("gemma4_moe", 8, tmp_path / "source", min_layers=3, **SIZES, **DIMS, **EXPERTS)
    small, plain = {}, load_file(source / "model.safetensors")
    for name, tensor in list(plain.items()):
        module, _, kind = name.rpartition(".")
        if ".experts." in name:
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for expert, matrix in enumerate(tensor):
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    stored, values = quantized_layer(form, rows.float())
                    rows.copy_(values)
                    small |= {f"{module}.{expert}.{part}.{end}": each for end, each in stored.items()}
        elif module.rpartition(".")[2] in LINEAR and kind == "weight":
            stored, plain[name] = quantized_layer(form, tensor.float())
            small |= {f"{module}.{end}": each for end, each in stored.items()}
        else:
            small[name] = tensor
    values = json.loads((source / "config.json").read_text())
    for directory, tensors, more in (("small", small, {"quantization_config": config}), ("plain", plain, {})):
        (tmp_path / directory).mkdir()
        save_file(tensors, tmp_path / directory / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / directory / "config.json").write_text(json.dumps(values | more))
    more = {"num_stages": 2, "tensor_parallel_size": num_members}
    compare_texts(source, tmp_path / "small", tmp_path / "plain", **more)


def test_keys_and_values_of_other_layers_stay_with_transformers_modules(tmp_path):
    """A cut between a layer and the one whose keys it takes is refused."""
    path = make_shrunken("gemma4_text", tmp_path, num_kv_shared_layers=2)
    assert load_model_config(path).architecture == "transformers:Gemma4ForCausalLM"
    with pytest.raises(ModelLoadError, match=r"num_kv_shared_layers(.|\n)*0 for raypp's own layers(.|\n)*auto"):
        load_model_config(path, impl="raypp")
    assert try_cut(path, [4]) == {"whole": None, "cut": None, "members": None}
    with pytest.raises(ConfigError, match=r"more stages than the model can be cut into.*num_stages=2.*num_stages = 1"):
        try_cut(path, [2, 2])
