"""Small random models in the shape of any decoder of transformers: as many layers of the same kinds, narrow ones."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 6,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 257,
    "hidden_size_per_layer_input": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_dt_rank": 8,
    "mamba_chunk_size": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "qk_head_dim": 24,
    "num_experts_per_token": 2,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "router_hidden_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What fields of a configuration become, where it has them."""
_OF_STATE_SPACES = {"state_size": 16, "num_heads": 8, "time_step_rank": 8}
"""The same, where it has the first: others mean other things by these names."""
_WIDE = {"head_dim": 32, "num_key_value_heads": 1}
"""Of layers that differ from the others."""
_OPTIONAL = ("sliding_window", "q_lora_rank", "hidden_size_per_layer_input")
_MATRIX_STD, _VECTOR_STD = 0.15, 0.5  # large enough that texts vary


def shrunken_config(config: Any, *, num_layers: int | None = None, **values: Any) -> Any:
    """Return a decoder's configuration, narrow.

    Args:
        config: The decoder's.
        num_layers: As many of its layers, of all kinds in turn; None: all of them, as they are.
        values: Fields to set besides.
    """
    config, of_layers = copy.deepcopy(config), _differing_layers(config, num_layers)
    if hasattr(config, "per_layer_config"):
        config.per_layer_config = None
    new = copy.deepcopy(config)
    if hasattr(new, "quantization_config"):  # a random model has no weights of few bits
        del new.quantization_config
    chosen = {
        name: size
        for name, size in SIZES.items()
        if hasattr(config, name) and (name not in _OPTIONAL or getattr(config, name))
    }
    if hasattr(config, "state_size"):
        chosen |= {name: size for name, size in _OF_STATE_SPACES.items() if hasattr(config, name)}
    if "kv_lora_rank" in chosen:  # keys are rotated apart from the rest, for each head
        chosen |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in chosen else {})
    elif getattr(config, "num_key_value_heads", None) == getattr(config, "num_attention_heads", None):
        chosen["num_key_value_heads"] = 4
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        chosen["rope_parameters"] = _narrow_rope(rope)
    if num_layers is not None:
        chosen |= _of_layers(config, num_layers)
    if of_layers:
        chosen["per_layer_config"] = of_layers
    for name, value in (chosen | values).items():
        setattr(new, name, value)
    new.dtype = torch.float32
    return new


def _differing_layers(config: Any, num_layers: int | None) -> dict[int, dict[str, Any]]:
    """Return what transformers' `per_layer_config` says of layers that differ from others in sizes, narrow (Gemma 4).

    Of fewer layers each has what the first of its kind has.
    """
    if not getattr(config, "is_heterogeneous", False):
        return {}
    said = {int(layer): values for layer, values in config.to_dict()["per_layer_config"].items()}
    kinds = config.layer_types
    firsts = list(range(config.num_hidden_layers))
    if num_layers is not None:
        in_turn = list(dict.fromkeys(kinds))
        firsts = [kinds.index(in_turn[index % len(in_turn)]) for index in range(num_layers)]
    return {
        index: {name: _WIDE.get(name, value) for name, value in said[layer].items()}
        for index, layer in enumerate(firsts)
        if layer in said
    }


def _of_layers(config: Any, num_layers: int) -> dict[str, Any]:
    """Return the fields that have a value by layer, for fewer layers."""
    found: dict[str, Any] = {"num_hidden_layers": num_layers}
    for name, value in vars(config).items():
        if isinstance(getattr(type(config), name, None), property):  # another field says it
            continue
        if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
            found[name] = {key: of_layer for key, of_layer in value.items() if key < num_layers}
        elif isinstance(value, list) and len(value) == config.num_hidden_layers:
            kinds = list(dict.fromkeys(value)) if name == "layer_types" else value
            found[name] = (kinds * num_layers)[:num_layers]
    return found


def _narrow_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters, per kind of layer or not, whose lists of a number per pair are cut to those left."""
    if all(isinstance(value, dict) for value in rope.values()) and rope:
        return {kind: _narrow_rope(value) for kind, value in rope.items()}
    share = rope.get("partial_rotary_factor") or 1.0
    num_pairs = int(SIZES["head_dim"] * share) // 2
    return {name: value[:num_pairs] if isinstance(value, list) else value for name, value in rope.items()}


def save_random_model(config: Any, directory: Path, *, seed: int = 0, code: Path | None = None) -> Path:
    """Write a random float32 model of a configuration to `directory` and return it; `code`: where its own code is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=code is not None
        )
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and parameter.shape[1] > 1:
                torch.nn.init.normal_(parameter, std=_MATRIX_STD)
            elif "norm" not in name:  # vectors, and convolutions of a channel each
                torch.nn.init.normal_(parameter, std=_VECTOR_STD)
    model.save_pretrained(directory)
    for file in [] if code is None else code.glob("*.py"):
        shutil.copy(file, directory)
    return directory
