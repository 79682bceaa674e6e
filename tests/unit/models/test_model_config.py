"""Reading config.json: both forms of it, defaults, and every refusal by name."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from checkpoints import random_tensors, write_config, write_sharded
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from raypp.errors import ModelLoadError
from raypp.models.config import LM_HEAD, as_stored, load_model_config
from raypp.models.families import FAMILIES
from raypp.models.layer import inverse_frequencies
from raypp.models.registry import build_model
from raypp.models.rope_config import RopeConfig
from raypp.models.weights import CheckpointWeights

TEXT_ARCHITECTURES = [
    name
    for name, family in FAMILIES.items()
    if not family.vision and family.experts is None and family.full_attention_interval is None
]
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_published_form(tmp_path):
    config = load_model_config(write_config(tmp_path))
    assert config.architecture == "Qwen3ForCausalLM"
    assert (
        config.num_layers,
        config.attention[0].num_heads,
        config.attention[0].num_kv_heads,
        config.attention[0].head_dim,
    ) == (3, 4, 2, 8)
    assert config.attention[0].rope == RopeConfig(theta=1e6)
    assert config.qk_norm
    assert not config.qkv_bias
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (5,)


@pytest.mark.parametrize("kind", [None, "default", "linear", "llama3"])
def test_both_forms_of_rotary_parameters_say_the_same(tmp_path, kind):
    scaling = {None: None, "default": {"rope_type": "default"}, "linear": {"type": "linear", "factor": 2.0}}.get(
        kind, LLAMA3
    )
    old = load_model_config(write_config(tmp_path / "old", rope_theta=5e5, rope_scaling=scaling))
    new = load_model_config(
        write_config(
            tmp_path / "new",
            rope_theta=...,
            rope_scaling=...,
            torch_dtype=...,
            dtype="bfloat16",
            rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": 5e5}
            if kind != "linear"
            else {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        )
    )
    assert old == new
    assert old.attention[0].rope.theta == 5e5
    assert old.attention[0].rope.rope_type == (kind or "default")


def test_defaults_of_each_family(tmp_path):
    unsaid = {"head_dim": ..., "num_key_value_heads": ..., "rope_theta": ..., "torch_dtype": ..., "rms_norm_eps": ...}
    for architecture in TEXT_ARCHITECTURES:
        if architecture.startswith("Gemma"):  # test_published_families.py
            continue
        config = load_model_config(write_config(tmp_path, architectures=[architecture], **unsaid))
        assert config.attention[0].num_kv_heads == 4
        assert config.attention[0].head_dim == (128 if architecture == "Qwen3ForCausalLM" else 6)
        assert config.qkv_bias == (architecture == "Qwen2ForCausalLM")
        assert config.attention[0].rope.theta == 10000.0
        assert config.dtype == "float32"


def test_biases(tmp_path):
    said = {"attention_bias": True, "mlp_bias": True}
    found = {
        architecture: (config.qkv_bias, config.attention_output_bias, config.mlp_bias)
        for architecture in TEXT_ARCHITECTURES
        for config in [load_model_config(write_config(tmp_path, architectures=[architecture], **said))]
    }
    assert found == {
        "LlamaForCausalLM": (True, True, True),
        "MistralForCausalLM": (False, False, False),
        "Ministral3ForCausalLM": (False, False, False),
        "MinistralForCausalLM": (False, False, False),
        "Qwen2ForCausalLM": (True, False, False),
        "Qwen3ForCausalLM": (True, True, False),
        **{f"Gemma{end}": (True, True, False) for end in ("2ForCausalLM", "3ForCausalLM")},
    }


_KINDS = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("architecture", "said", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, [None, None, None]),
        ("MistralForCausalLM", {"sliding_window": 8}, [8, 8, 8]),
        ("MistralForCausalLM", {"sliding_window": None}, [None, None, None]),
        ("MistralForCausalLM", {"sliding_window": ...}, [4096, 4096, 4096]),
        ("MinistralForCausalLM", {"sliding_window": 8, "layer_types": _KINDS}, [None, 8, None]),
        ("MixtralForCausalLM", {"sliding_window": ..., "num_local_experts": 4, "num_experts_per_tok": 2}, [None] * 3),
        ("MixtralForCausalLM", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, [8, 8, 8]),
        ("Qwen3ForCausalLM", {"sliding_window": 8}, [None, None, None]),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, [None, None, None]),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8, 8]),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "layer_types": _KINDS}, [None, 8, None]),
    ],
)
def test_windows_by_layer(tmp_path, architecture, said, windows):
    """As transformers has them: 5.17, `configuration_mistral`, `configuration_ministral`, `configuration_qwen3`."""
    config = load_model_config(write_config(tmp_path, architectures=[architecture], **said))
    assert [attention.window for attention in config.attention] == windows
    assert config.windows == tuple(sorted(set(windows), key=lambda window: window or -1))


def test_end_of_sequence_ids_of_both_files(tmp_path):
    write_config(tmp_path, eos_token_id=[7, 5])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert load_model_config(tmp_path).eos_token_ids == (5, 7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert load_model_config(write_config(tmp_path, eos_token_id=None)).eos_token_ids == (3,)


@pytest.mark.parametrize("token_id", [-1, 64, 2**40])
@pytest.mark.parametrize("in_config", [True, False])
def test_end_of_sequence_ids_outside_of_the_vocabulary_are_refused(tmp_path, token_id, in_config):
    write_config(tmp_path, eos_token_id=[5, token_id] if in_config else 5)
    file = tmp_path / ("config.json" if in_config else "generation_config.json")
    if not in_config:
        file.write_text(json.dumps({"eos_token_id": token_id}))
    with pytest.raises(ModelLoadError, match=f"{file}: field 'eos_token_id'.*{token_id}.*0 to 63"):
        load_model_config(tmp_path)


def _rope(path, **changes):
    """Return what is read, and check that transformers computes the same frequencies of it."""
    file = write_config(path, architectures=["LlamaForCausalLM"], model_type="llama", **changes) / "config.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = LlamaRotaryEmbedding(LlamaConfig(**json.loads(file.read_text())))
    rope = load_model_config(path).attention[0].rope
    torch.testing.assert_close(inverse_frequencies(8, rope), theirs.inv_freq, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-7)
    return rope


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncate": False},
        {"attention_factor": 1.5},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"mscale": 0.7},
        {"beta_fast": 8, "beta_slow": 2, "factor": 40.0},
        {"original_max_position_embeddings": 64, "factor": 1.5},
        {"original_max_position_embeddings": ..., "factor": 2.0},
        {"factor": 0.5},
    ],
)
def test_yarn_is_that_of_transformers(tmp_path, changes):
    scaling = {name: value for name, value in {**YARN, **changes}.items() if value is not ...}
    rope = _rope(tmp_path, rope_scaling=scaling, max_position_embeddings=40960)
    assert rope.rope_type == "yarn"
    assert rope.original_max_position_embeddings == scaling.get("original_max_position_embeddings", 40960)
    parameters = {"rope_theta": 1e6, **scaling}
    changed = _rope(tmp_path, rope_scaling=None, rope_parameters=parameters, max_position_embeddings=40960)
    assert changed == rope


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (YARN, 131072),
        ({**YARN, "factor": 1.0}, 40960),  # no less than the file says
        ({"rope_type": "yarn", "factor": 4.0}, 40960),  # which may be stretched already
        ({"rope_type": "linear", "factor": 2.0}, 40960),
        ({"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 40960}, 81920),
        (LLAMA3, 40960),
    ],
)
def test_positions_grow_by_the_factor_where_the_original_ones_are_said(tmp_path, scaling, expected):
    config = load_model_config(write_config(tmp_path, rope_scaling=scaling, max_position_embeddings=40960))
    assert config.max_position_embeddings == expected


@pytest.mark.parametrize(
    ("asked", "stretched_to"), [(None, 512), (100, 512), (513, 513), (1500, 1500), (2048, 2048), (9999, 2048)]
)
def test_dynamic_scaling_has_the_base_of_the_longest_request(tmp_path, asked, stretched_to):
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    path = write_config(tmp_path, max_position_embeddings=512, rope_scaling=scaling)
    config = load_model_config(path, max_model_len=asked)
    assert config.max_position_embeddings == config.attention[0].rope.stretched_to == stretched_to
    theirs = LlamaConfig(head_dim=8, max_position_embeddings=512, rope_parameters={"rope_theta": 1e6, **scaling})
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, torch.device("cpu"), seq_len=stretched_to)
    torch.testing.assert_close(inverse_frequencies(8, config.attention[0].rope), frequencies, rtol=2e-6, atol=0)
    assert inverse_frequencies(2, config.attention[0].rope).tolist() == [1.0]


@pytest.mark.parametrize("form", ["old", "new"])
def test_another_scaling_can_be_asked_for(tmp_path, form):
    said = {"rope_theta": 5e5} if form == "old" else {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5}}
    path = write_config(tmp_path, max_position_embeddings=40960, **said)
    config = load_model_config(path, rope_scaling=YARN)
    assert (config.attention[0].rope.rope_type, config.attention[0].rope.theta, config.max_position_embeddings) == (
        "yarn",
        5e5,
        131072,
    )
    short = load_model_config(path, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    assert short.max_position_embeddings == 81920, "the original positions are those of the file"
    assert load_model_config(path, rope_scaling={"rope_type": "default"}) == load_model_config(path)
    for setting, said in (
        ({"rope_type": "yarn", "factor": 0}, r"rope_scaling.factor.*0"),
        ({"rope_type": "yarn"}, r"rope_scaling.factor.*nothing"),
        ({"rope_type": "yarm", "factor": 2.0}, r"rope_scaling.rope_type.*'yarm'"),
        ({**YARN, "betafast": 3}, r"rope_scaling.betafast.*beta_fast"),
        ({**YARN, "factor": 0.5}, r"rope_scaling.factor.*0.5.*at least 1"),
    ):
        with pytest.raises(ModelLoadError, match=f"^the settings: .*{said}"):
            load_model_config(path, rope_scaling=setting)


def test_rope_scaling_beside_rope_parameters_counts(tmp_path):
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    rope = _rope(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters=parameters)
    assert (rope.rope_type, rope.factor, rope.theta) == ("linear", 2.0, 1e6)
    assert _rope(tmp_path, rope_scaling=None, rope_parameters=parameters).theta == 5e5
    assert _rope(tmp_path, rope_scaling={}, rope_parameters=parameters).theta == 5e5


def test_the_original_context_at_the_top_level_counts(tmp_path):
    rope = _rope(tmp_path, rope_scaling=LLAMA3, original_max_position_embeddings=64)
    assert rope.original_max_position_embeddings == 64
    unsaid = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
    assert _rope(tmp_path, rope_scaling=unsaid, original_max_position_embeddings=64) == rope


def test_swish_is_silu(tmp_path):
    assert load_model_config(write_config(tmp_path, hidden_act="swish")) == load_model_config(
        write_config(tmp_path, hidden_act="silu")
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_a_stored_lm_head_that_is_not_the_embedding_is_not_tied(tmp_path, sharded, caplog):
    config = load_model_config(write_config(tmp_path, tie_word_embeddings=True))
    tensors = random_tensors(tmp_path)
    assert as_stored(config, tmp_path) is config  # no weights: whoever loads them says so

    def stored(lm_head=None):
        named = tensors if lm_head is None else {**tensors, LM_HEAD: lm_head}
        if sharded:
            write_sharded(tmp_path, named)
        else:
            save_file(named, tmp_path / "model.safetensors")
        return as_stored(config, tmp_path)

    embedding = tensors["model.embed_tokens.weight"]
    assert stored() is config
    assert stored(embedding.clone()) is config
    assert not caplog.records
    other = embedding.clone()
    other[-1, -1] += 1
    assert stored(other) == replace(config, tie_word_embeddings=False)
    assert LM_HEAD in caplog.text


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_without_a_prefix(tmp_path, tied):
    config = load_model_config(write_config(tmp_path, tie_word_embeddings=tied))
    tensors = random_tensors(tmp_path)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    stored = as_stored(config, tmp_path)
    assert stored == replace(config, weight_prefix="")
    source = CheckpointWeights(tmp_path)
    cpu = torch.device("cpu")
    build_model(stored, start_layer=0, end_layer=3, dtype=torch.float32, device=cpu).load_weights(source)
    assert not source.unread()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": ...}, ["architecture", "qwen3", *FAMILIES]),
        ({"hidden_size": ...}, ["'hidden_size'", "nothing"]),
        ({"vocab_size": "64"}, ["'vocab_size'", "'64'", "positive integer"]),
        ({"num_hidden_layers": 0}, ["'num_hidden_layers'", "0"]),
        ({"num_key_value_heads": 3}, ["'num_key_value_heads'", "3", "divisor"]),
        ({"head_dim": 7}, ["'head_dim'", "7", "even"]),
        ({"rms_norm_eps": -1}, ["'rms_norm_eps'", "-1"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["'layer_types'", "sliding_attention"]),
        ({"layer_types": ["linear_attention"] * 3}, ["'layer_types'", "linear_attention", "full_attention"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["'sliding_window'", "layer_types"]),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, ["'sliding_window'", "0"]),
        ({"hidden_act": "gelu"}, ["'hidden_act'", "gelu", "silu"]),
        ({"tie_word_embeddings": "yes"}, ["'tie_word_embeddings'", "yes"]),
        ({"torch_dtype": "int8"}, ["'torch_dtype'", "int8", "bfloat16"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["'quantization_config.quant_method'", "hqq"]),
        ({"eos_token_id": ["5"]}, ["'eos_token_id'"]),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, ["'rope_scaling.rope_type'", "su", "llama3"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["'rope_scaling.factor'", "nothing"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["'rope_scaling.factor'", "'2'", "positive number"]),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, ["'rope_scaling.beta_fast'", "0.5", "beta_slow=1.0"]),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, ["'rope_scaling.truncate'", "'no'", "true or false"]),
        ({"rope_scaling": {**YARN, "attention_factor": -1}}, ["'rope_scaling.attention_factor'", "-1"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["'rope_parameters.rope_type'", "longrope"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["'rope_scaling.low_freq_factor'", "nothing"]),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.5}}, ["low_freq_factor'", "4.5", "below", "4.0"]),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, ["low_freq_factor'", "below", "4.0"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["'partial_rotary_factor'", "0.5"]),
    ],
)
def test_refusals_name_file_and_field(tmp_path, changes, words):
    with pytest.raises(ModelLoadError) as caught:
        load_model_config(write_config(tmp_path, **changes))
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(caught.value)


def test_what_is_no_model_directory(tmp_path):
    with pytest.raises(ModelLoadError, match="no such directory"):
        load_model_config(tmp_path / "missing")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="not a JSON object"):
        load_model_config(tmp_path)


def test_planning_needs_no_torch():
    code = "import sys, raypp.models.registry, raypp.models.sizes; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
