"""Writes a checkpoint of transformers' in Mistral's own form: params.json, and consolidated files with other names.

Nothing here shares code with `raypp.models.mistral_format`, which reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_PATTERNS = {
    r"model\.embed_tokens\.(.+)": r"tok_embeddings.\1",
    r"model\.norm\.(.+)": r"norm.\1",
    r"lm_head\.(.+)": r"output.\1",
    r"model\.layers\.(\d+)\.input_layernorm\.(.+)": r"layers.\1.attention_norm.\2",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.(.+)": r"layers.\1.ffn_norm.\2",
    r"model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.+)": r"layers.\1.attention.w\2.\3",
    r"model\.layers\.(\d+)\.self_attn\.q_([ab])_proj\.(.+)": r"layers.\1.attention.wq_\2.\3",
    r"model\.layers\.(\d+)\.self_attn\.(q|kv)_a_layernorm\.(.+)": r"layers.\1.attention.\2_a_norm.\3",
    r"model\.layers\.(\d+)\.self_attn\.kv_a_proj_with_mqa\.(.+)": r"layers.\1.attention.wkv_a_with_mqa.\2",
    r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.(.+)": r"layers.\1.attention.wkv_b.\2",
    r"model\.layers\.(\d+)\.mlp\.gate\.weight": r"layers.\1.gate.weight",
    r"model\.layers\.(\d+)\.mlp\.(gate|down|up)_proj\.(.+)": r"layers.\1.feed_forward.<\2>.\3",
    r"model\.layers\.(\d+)\.mlp\.(shared_experts|experts\.\d+)\.(gate|down|up)_proj\.(.+)": r"layers.\1.\2.<\3>.\4",
}
_NUMBERS = {"<gate>": "w1", "<down>": "w2", "<up>": "w3"}
FP8 = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
_TOWER = {"hidden_size": 4, "image_token_id": 10}


def write_mistral_form(source: Path, target: Path, num_files: int = 1, *, has_index: bool = True) -> Path:
    """Write a checkpoint of transformers' to `target` in Mistral's own form, beside the tensors of a tower."""
    config = json.loads((source / "config.json").read_text())
    tensors = {name: part for file in source.glob("*.safetensors") for name, part in load_file(file).items()}
    head_dim = config.get("head_dim")
    has_latents, method = "kv_lora_rank" in config, (config.get("quantization_config") or {}).get("quant_method")
    stored = {"vision_encoder.patch_conv.weight": torch.ones(4, 4)}
    for name, tensor in one_by_one(tensors):
        own = next(re.sub(f"^{here}$", there, name) for here, there in _PATTERNS.items() if re.fullmatch(here, name))
        for number, letter in _NUMBERS.items():
            own = own.replace(number, letter)
        if method == "fp8":
            own = re.sub(r"weight_scale(_inv)?$", "qscale_weight", own).replace("input_scale", "qscale_act")
        if not has_latents and own.split(".")[-2] in ("wq", "wk") and tensor.ndim == 2:
            tensor = tensor.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()
        stored[own] = tensor
    target.mkdir()
    names = sorted(stored)
    files = [f"consolidated-{index:05}-of-{num_files:05}.safetensors" for index in range(1, num_files + 1)]
    files = ["consolidated.safetensors"] if num_files == 1 else files
    for index, file in enumerate(files):
        save_file({name: stored[name] for name in names[index::num_files]}, target / file)
    if num_files > 1 and has_index:
        weight_map = {name: files[index % num_files] for index, name in enumerate(names)}
        (target / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (target / "params.json").write_text(json.dumps(params_of(config)))
    return target


def one_by_one(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors, those of all experts as one for each."""
    for name, tensor in tensors.items():
        if not (found := re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)", name)):
            yield name, tensor
            continue
        for index, expert in enumerate(tensor):
            if found[2] == "down_proj":
                yield f"{found[1]}.{index}.down_proj.weight", expert.contiguous()
                continue
            for part, half in zip(("gate", "up"), expert.chunk(2), strict=True):
                yield f"{found[1]}.{index}.{part}_proj.weight", half.contiguous()


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with those of all experts as one, as transformers writes them; see `one_by_one`."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in tensors.keys() - found.keys()}:
        count = sum(name.startswith(f"{prefix}.experts.") for name in tensors) // 3
        parts = {
            part: torch.stack([tensors[f"{prefix}.experts.{index}.{part}_proj.weight"] for index in range(count)])
            for part in ("gate", "up", "down")
        }
        found[f"{prefix}.experts.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        found[f"{prefix}.experts.down_proj"] = parts["down"]
    return found


def params_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return what params.json says of the model that a config.json describes."""
    params = {
        own: config.get(name)
        for own, name in {
            "dim": "hidden_size",
            "n_layers": "num_hidden_layers",
            "hidden_dim": "intermediate_size",
            "n_heads": "num_attention_heads",
            "n_kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
            "norm_eps": "rms_norm_eps",
            "vocab_size": "vocab_size",
            "tied_embeddings": "tie_word_embeddings",
            "max_position_embeddings": "max_position_embeddings",
            "sliding_window": "sliding_window",
        }.items()
    }
    rope = config.get("rope_parameters") or {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    params |= {"rope_theta": rope["rope_theta"], "vision_encoder": _TOWER, "model_type": "transformer"}
    if rope["rope_type"] == "yarn":
        assert rope.get("attention_factor") == 1.0
        original = rope["original_max_position_embeddings"]
        params["yarn"] = {
            "original_max_position_embeddings": original,
            "factor": rope["factor"],
            "beta": rope.get("beta_fast", 32),
            "alpha": rope.get("beta_slow", 1),
            "apply_scale": False,
        }
        if beta := rope.get("llama_4_scaling_beta"):
            params["llama_4_scaling"] = {"original_max_position_embeddings": original, "beta": beta}
    if "kv_lora_rank" in config:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        params |= {name: config[name] for name in names}
        params["moe"] = {
            "expert_parallel": 1,
            "expert_model_parallel": 1,
            "route_every_n": 1,
            "first_k_dense_replace": config["first_k_dense_replace"],
            "num_experts": config.get("n_routed_experts", config.get("num_experts")),
            "num_experts_per_tok": config["num_experts_per_tok"],
            "num_expert_groups": config["n_group"],
            "num_expert_groups_per_tok": config["topk_group"],
            "routed_scale": config["routed_scaling_factor"],
            "expert_hidden_dim": config["moe_intermediate_size"],
            "num_shared_experts": config["n_shared_experts"],
        }
    quantization = config.get("quantization_config")
    if quantization is not None:
        params["quantization"] = FP8 if quantization["quant_method"] == "fp8" else quantization
    return params
