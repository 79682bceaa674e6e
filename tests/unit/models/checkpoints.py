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


EXPERTS = {
    "qwen3": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2},
}
"""Changes that make an expert model of it."""


def write_config(directory: Path, **changes: object) -> Path:
    """Write a config.json with some fields changed, those that are ... left out; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in {**QWEN3, **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a checkpoint of this configuration has: Qwen3, or one with experts."""
    c = load_model_config(directory)
    query, key_value = (
        c.attention[0].num_heads * c.attention[0].head_dim,
        c.attention[0].num_kv_heads * c.attention[0].head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for index in range(c.num_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "input_layernorm.weight": (c.hidden_size,),
            layer + "self_attn.q_proj.weight": (query, c.hidden_size),
            layer + "self_attn.k_proj.weight": (key_value, c.hidden_size),
            layer + "self_attn.v_proj.weight": (key_value, c.hidden_size),
            layer + "self_attn.o_proj.weight": (c.hidden_size, query),
            layer + "post_attention_layernorm.weight": (c.hidden_size,),
        }
        if c.qk_norm:
            shapes |= {layer + f"self_attn.{name}_norm.weight": (c.attention[0].head_dim,) for name in "qk"}
        if c.experts_of(index) is None:
            shapes |= _mlp(layer + "mlp.", ("gate_proj", "up_proj", "down_proj"), c.hidden_size, c.intermediate_size)
            continue
        is_mixtral = c.architecture == "MixtralForCausalLM"
        block = layer + ("block_sparse_moe." if is_mixtral else "mlp.")
        names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        shapes[block + "gate.weight"] = (c.experts.num_experts, c.hidden_size)
        for expert in range(c.experts.num_experts):
            shapes |= _mlp(f"{block}experts.{expert}.", names, c.hidden_size, c.experts.intermediate_size)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def _mlp(prefix: str, names: tuple[str, str, str], hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: (size, hidden), up: (size, hidden), down: (hidden, size)}


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
