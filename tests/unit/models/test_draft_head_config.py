"""What is read of a draft head, in the forms in which heads are published, and which ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raypp.errors import ConfigError, ModelLoadError
from raypp.models.config import ModelConfig, load_model_config
from raypp.models.draft_head_config import checkpoint_shapes, load_draft_head_config
from raypp.models.registry import resolve_draft_head_path, resolve_model_path
from raypp.models.weights import CheckpointWeights, DummyWeights, PickledWeights

H, V = 256, 4032
BASE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": H,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "torch_dtype": "float32",
}
EAGLE3 = {
    "fc.weight": (H, 3 * H),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.self_attn.q_proj.weight": (4 * 64, 2 * H),
    "norm.weight": (H,),
    "lm_head.weight": (V, H),
}
EAGLE = {
    "fc.weight": (H, 2 * H),
    "fc.bias": (H,),
    "layers.0.self_attn.q_proj.weight": (256, H),
    "embed_tokens.weight": (V, H),
}


@pytest.fixture(scope="module")
def tiny() -> ModelConfig:
    return load_model_config(resolve_model_path("tiny"))


def head(directory: Path, shapes: dict[str, tuple[int, ...]], *, pickled: bool = False, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({k: v for k, v in (BASE | changes).items() if v is not None}))
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    if pickled:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return directory


def test_the_embedded_head(tiny: ModelConfig) -> None:
    config = load_draft_head_config(resolve_draft_head_path("tiny-eagle3"), tiny)
    assert (config.kind, config.aux_depths, config.layer_prefix) == ("eagle3", (2, 4, 6), "midlayer.")
    assert config.layer.vocab_size == 768
    assert config.maps_vocabulary
    assert config.has_lm_head
    assert not config.has_embedding


def test_depths_in_each_form(tiny: ModelConfig, tmp_path: Path) -> None:
    forms: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({}, (2, 3, 3)),  # the paper's code, for six layers
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}, (1, 3, 5)),  # layers whose outputs they are
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (1, 3, 5)),  # layers whose inputs they are
    ]
    for changes, depths in forms:
        assert load_draft_head_config(head(tmp_path, EAGLE3, **changes), tiny).aux_depths == depths


@pytest.mark.parametrize(
    ("architecture", "shapes", "kind"),
    [
        ("LlamaForCausalLMEagle3", EAGLE3, "eagle3"),
        ("Eagle3LlamaForCausalLM", EAGLE3, "eagle3"),
        ("Eagle3Qwen3ForCausalLM", EAGLE3, "eagle3"),
        ("Eagle3Speculator", EAGLE3, "eagle3"),
        ("EagleLlamaForCausalLM", EAGLE, "eagle"),
        ("EagleQwen3ForCausalLM", EAGLE, "eagle"),
        ("LlamaForCausalLM", EAGLE, "eagle"),
        ("LlamaForCausalLM", EAGLE3, "eagle3"),
    ],
)
@pytest.mark.parametrize("pickled", [False, True])
def test_kinds(tiny: ModelConfig, tmp_path: Path, architecture, shapes, kind, pickled) -> None:
    config = load_draft_head_config(head(tmp_path, shapes, pickled=pickled, architectures=[architecture]), tiny)
    assert config.kind == kind
    assert config.has_embedding == config.has_fc_bias == (kind == "eagle")


def test_nested_form(tiny: ModelConfig, tmp_path: Path) -> None:
    layer = {name: BASE[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    absent = dict.fromkeys(layer)
    config = load_draft_head_config(
        head(tmp_path, EAGLE3, **absent, transformer_layer_config=layer, norm_before_residual=True), tiny
    )
    assert config.norm_before_residual
    assert config.layer.intermediate_size == 64


@pytest.mark.parametrize(
    ("changes", "shapes", "message"),
    [
        ({"architectures": ["DeepseekForCausalLMEagle3"]}, EAGLE3, "does not have this draft head"),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"norm.weight": (H,)}, "does not have this draft head"),
        ({"vocab_size": 32000}, EAGLE3, "vocab_size.*4032.*another model"),
        ({"num_hidden_layers": 2}, EAGLE3, "num_hidden_layers"),
        ({"hidden_size": 512}, EAGLE3, "hidden_size.*256"),
        ({"target_hidden_size": 512}, EAGLE3, "target_hidden_size.*256"),
        ({"norm_before_fc": True}, EAGLE3, "norm_before_fc"),
        ({"draft_vocab_size": 1000}, EAGLE3 | {"lm_head.weight": (1000, H)}, "draft_vocab_size.*d2t"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, EAGLE3, "depths up to 6"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, EAGLE3, "fc.weight"),
        ({"quantization_config": {"quant_method": "gptq"}}, EAGLE3, "quantization_config"),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, EAGLE3, "rope_type"),
    ],
)
def test_heads_that_do_not_fit(tiny: ModelConfig, tmp_path: Path, changes, shapes, message) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_draft_head_config(head(tmp_path, shapes, **changes), tiny)


def test_a_directory_without_weights(tiny: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(ModelLoadError, match="has no weights"):
        load_draft_head_config(tmp_path, tiny)
    assert load_draft_head_config(tmp_path, tiny, is_dummy=True).has_lm_head


def test_files_that_are_broken(tiny: ModelConfig, tmp_path: Path) -> None:
    head(tmp_path, EAGLE3)
    (tmp_path / "model.safetensors").write_bytes(b"\\x10\\x00")
    with pytest.raises(ModelLoadError, match="truncated or not a safetensors file"):
        load_draft_head_config(tmp_path, tiny)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(ModelLoadError, match="not a file of tensors alone"):
        load_draft_head_config(tmp_path, tiny)
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="not a dict of tensors"):
        load_draft_head_config(tmp_path, tiny)


def test_pickled_weights(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, 3).half(), "n": torch.arange(4)}, tmp_path / "w.bin")
    weights = PickledWeights(tmp_path / "w.bin")
    assert weights.get("a", (2, 3), torch.float32).dtype == torch.float32
    assert weights.get("n", (4,), torch.int64).tolist() == [0, 1, 2, 3]
    for name, shape, dtype, message in (
        ("b", (1,), torch.float32, "no tensor b"),
        ("a", (3, 2), torch.float32, "wrong shape"),
        ("n", (4,), torch.float32, "not of a type"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            weights.get(name, shape, dtype)


def test_the_bytes_are_those_of_the_tensors(tiny: ModelConfig) -> None:
    """What the plan counts for a head is what its tensors take, its maps aside."""
    path = resolve_draft_head_path("tiny-eagle3")
    config, source = load_draft_head_config(path, tiny), CheckpointWeights(path)
    shapes = {name: shape for name, shape in checkpoint_shapes(path).items() if name not in ("d2t", "t2d")}
    loaded = sum(source.get(name, shape, torch.float32).nbytes for name, shape in shapes.items())
    assert config.weight_bytes(4) == loaded
    products = {name: shape for name, shape in shapes.items() if len(shape) == 2 and name != "embed_tokens.weight"}
    rounded = sum(rows * columns + 4 * rows for rows, columns in products.values())  # a scale per row
    in_8_bits = replace(config, has_8_bit_weights=True)
    assert in_8_bits.weight_bytes(4) == loaded + rounded


def test_drafts_read_the_head_once_each_and_what_joins_states_once(tiny: ModelConfig) -> None:
    config = load_draft_head_config(resolve_draft_head_path("tiny-eagle3"), tiny)
    fc = config.layer.hidden_size * config.fc_inputs
    assert config.drafting_bytes(3, 2) == 2 * (3 * (config.weight_bytes(1) - fc) + fc)
    in_8_bits = replace(config, has_8_bit_weights=True)
    assert 0.5 < in_8_bits.drafting_bytes(3, 2) / config.drafting_bytes(3, 2) < 0.55  # vectors and scales besides


def test_dummy_maps_are_valid() -> None:
    assert not DummyWeights(0).get("d2t", (7,), torch.int64).any()


def test_settings_that_do_not_go_together() -> None:
    from raypp.config.engine_config import EngineConfig
    from raypp.plan.engine_plan import plan_engine
    from raypp.plan.hardware import Hardware

    for speculative, message in (
        ({"method": "eagle3"}, "is required for this method"),
        ({"method": "ngram", "model": "tiny-eagle3"}, "has no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.from_flat("tiny", speculative=speculative)
    config = EngineConfig.from_flat("tiny", speculative={"method": "eagle", "model": "tiny-eagle3"})
    with pytest.raises(ConfigError, match="not of the kind that was asked for"):
        plan_engine(config, Hardware(1))
    config = EngineConfig.from_flat("tiny", speculative={"method": "eagle3", "model": "no/such head"})
    with pytest.raises(ModelLoadError, match="tiny-eagle3"):
        plan_engine(config, Hardware(1))
