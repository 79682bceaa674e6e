"""A small model directory, written by hand: what a published checkpoint looks like."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from raypp.models.config import load_model_config
from raypp.models.weights import DummyWeights

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "eos_token_id": 5,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 24,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 64,
}


def write_config(directory: Path, **changes: object) -> Path:
    """Write a config.json with some fields changed, those that are ... left out; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in {**QWEN3, **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a Qwen3 checkpoint of this configuration has."""
    c = load_model_config(directory)
    query, key_value = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for index in range(c.num_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "input_layernorm.weight": (c.hidden_size,),
            layer + "self_attn.q_proj.weight": (query, c.hidden_size),
            layer + "self_attn.k_proj.weight": (key_value, c.hidden_size),
            layer + "self_attn.v_proj.weight": (key_value, c.hidden_size),
            layer + "self_attn.o_proj.weight": (c.hidden_size, query),
            layer + "self_attn.q_norm.weight": (c.head_dim,),
            layer + "self_attn.k_norm.weight": (c.head_dim,),
            layer + "post_attention_layernorm.weight": (c.hidden_size,),
            layer + "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            layer + "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            layer + "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def random_tensors(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return random tensors of these shapes."""
    return {name: DummyWeights(1).get(name, shape, dtype) for name, shape in tensor_shapes(directory).items()}


def write_sharded(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write two shards and their index, every other tensor to the second."""
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {name: shards[index % 2] for index, name in enumerate(tensors)}
    for shard in shards:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
