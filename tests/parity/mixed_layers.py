"""A model whose layers attend in different ways, side by side, and what transformers' parts make of it.

Layers are Llama's but for attention: each has numbers and sizes of heads of its own, sizes of keys and values that
differ, a window or none, and sinks (gpt-oss) or a soft cap (Gemma 2).
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from hf_models import choices_of
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models import gemma2, gpt_oss, llama

from raypp.models.attention_config import AttentionConfig
from raypp.models.config_fields import ConfigFields
from raypp.models.families import Family

ARCHITECTURE = "MixedForCausalLM"
_SIZES = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _layer_attention(fields: ConfigFields, index: int, attention: AttentionConfig) -> AttentionConfig:
    values = dict(fields.get("layers")[index])
    return replace(attention, rope=replace(attention.rope, theta=values.pop("theta")), **values)


FAMILY = Family(defaults={"max_position_embeddings": 8192}, layer_attention=_layer_attention)


def make_mixed(directory: Path, seed: int, *, num_layers: int = 6) -> Path:
    """Write a random model to `directory` and return it. Equal arguments, equal files."""
    rng = random.Random(seed)
    layers = [_layer(rng, index) for index in range(num_layers)]
    directory.mkdir(parents=True, exist_ok=True)
    values = {"architectures": [ARCHITECTURE], **_SIZES, "num_hidden_layers": num_layers, "layers": layers}
    (directory / "config.json").write_text(json.dumps(values))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(layers)
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.data = (
                1 + 0.3 * noise if name.endswith("norm.weight") else (2 if "sinks" in name else 0.15) * noise
            )
    save_file(model.state_dict(), directory / "model.safetensors")
    return directory


def _layer(rng: random.Random, index: int) -> dict[str, Any]:
    num_kv_heads = rng.choice((1, 2))
    kind = index % 3
    return {
        "num_heads": num_kv_heads * rng.choice((1, 2, 4)),
        "num_kv_heads": num_kv_heads,
        "head_dim": rng.choice((8, 16, 24)),
        "v_dim": rng.choice((8, 16, 32)),
        "window": None if kind == 0 else rng.choice((3, 8, 20)) if kind == 1 else rng.choice((8, 64)),
        "scale": rng.choice((None, 0.2)),
        "soft_cap": rng.choice((None, 2.0)) if kind != 1 else None,
        "has_sinks": kind == 1,
        "theta": rng.choice((1e3, 1e4)),
    }


class _Attention(nn.Module):
    is_causal = True

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        self.layer, hidden = layer, _SIZES["hidden_size"]
        heads, kv_heads = layer["num_heads"], layer["num_kv_heads"]
        self.num_key_value_groups = heads // kv_heads
        self.q_proj = nn.Linear(hidden, heads * layer["head_dim"], bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * layer["head_dim"], bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * layer["v_dim"], bias=False)
        self.o_proj = nn.Linear(heads * layer["v_dim"], hidden, bias=False)
        if layer["has_sinks"]:
            self.sinks = nn.Parameter(torch.empty(heads))

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        layer, length = self.layer, hidden_states.shape[1]
        q, k, v = (
            getattr(self, f"{name}_proj")(hidden_states).unflatten(-1, (-1, layer[size])).transpose(1, 2)
            for name, size in (("q", "head_dim"), ("k", "head_dim"), ("v", "v_dim"))
        )
        pairs = torch.arange(0, layer["head_dim"], 2) / layer["head_dim"]
        angles = torch.arange(length).unsqueeze(1) * layer["theta"] ** -pairs
        angles = torch.cat((angles, angles), -1).unsqueeze(0)
        q, k = llama.modeling_llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
        behind = torch.arange(length).unsqueeze(1) - torch.arange(length)
        seen = (behind >= 0) & (behind < (layer["window"] or length))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        scaling = layer["scale"] or layer["head_dim"] ** -0.5
        if layer["has_sinks"]:
            attend = gpt_oss.modeling_gpt_oss.eager_attention_forward
            attended, _ = attend(self, q, k, v, mask, scaling=scaling, dropout=0.0)
        else:
            attend = gemma2.modeling_gemma2.eager_attention_forward
            attended, _ = attend(self, q, k, v, mask, scaling=scaling, softcap=layer["soft_cap"])
        return self.o_proj(attended.flatten(2)), None


def _model(layers: list[dict[str, Any]]) -> Any:
    model = llama.LlamaForCausalLM(llama.LlamaConfig(**_SIZES, num_hidden_layers=len(layers)))
    for module, layer in zip(model.model.layers, layers, strict=True):
        module.self_attn = _Attention(layer)
    return model.eval()


@lru_cache(maxsize=2)
def _load(path: Path) -> Any:
    model = _model(json.loads((path / "config.json").read_text())["layers"])
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model


@torch.inference_mode()
def mixed_choices(path: Path, prompt_token_ids: list[int], output: list[int]) -> tuple[list[int], list[float]]:
    """As `hf_models.hf_choices`."""
    token_ids = torch.tensor([prompt_token_ids + output[:-1]])
    return choices_of(_load(path)(input_ids=token_ids).logits[0, len(prompt_token_ids) - 1 :], output)
