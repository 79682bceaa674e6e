"""Reads Mistral's own form of a checkpoint: params.json, and what its tensors are called. Needs no torch.

Both become what transformers' form of the same model has, so that all that reads a config.json or tensors reads this
form, too. Of models that are published in both forms, config.json is read.

    latents (Small 4, Large 3)    `Mistral4ForCausalLM`
    others (Small 3, Ministral)   `MistralForCausalLM`; pairs of a head that are rotated lie side by side

Sources: transformers 5, `models/mistral4` and `models/ministral3`, the scripts that convert weights; vLLM's
`transformers_utils/configs/mistral.py` and `models/mistral_large_3.py`; for `apply_scale` vLLM's pull request 57563 and
SGLang's 26203, which measured what Large 3 and Small 4 need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypp.models.config_fields import ConfigFields, read_json

PARAMS_FILE = "params.json"
_HINT = "a config.json says more of a model; it is read where it lies beside model.safetensors"
_EOS = 2  # of all of Mistral's tokenizers; params.json has no tokens
_POSITIONS = 128_000  # where nothing is said
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_SIZES_IF_SAID = {"n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "sliding_window": "sliding_window"}
_LATENTS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
}
_GROUPS = {"num_expert_groups": "n_group", "num_expert_groups_per_tok": "topk_group"}
_IGNORED = ("vision_encoder", "max_batch_size")
_IGNORED_OF_EXPERTS = ("expert_parallel", "expert_model_parallel")  # how it was trained

_NAMES = {
    "layers": "model.layers",
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "wq_a": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "feed_forward": "mlp",
    "gate": "mlp.gate",
    "experts": "mlp.experts",
    "shared_experts": "mlp.shared_experts",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "qscale_weight": "weight_scale",
    "qscale_act": "input_scale",
}
"""By the parts of a name, what transformers calls them."""
_OF_TEXT = re.compile(r"(layers|tok_embeddings|norm|output)(\.|$)")
_KV_SCALE = re.compile(r"(k|v|kv)_fake_quantizer\.qscale_act$")


def name_in_transformers(name: str) -> str:
    """Return what transformers calls a tensor or module of Mistral's; those of a tower keep their names."""
    if not _OF_TEXT.match(name):
        return name
    return ".".join(_NAMES.get(part, part) for part in _KV_SCALE.sub(r"\1_scale", name).split("."))


class _Section(ConfigFields):
    """An object of params.json that knows which of its fields were asked for."""

    def __init__(self, file: Path, values: Mapping[str, Any], path: str = "") -> None:
        super().__init__(file, values, path)
        self._asked: set[str] = set()

    def get(self, name: str) -> Any:
        self._asked.add(name)
        return super().get(name)

    def below(self, name: str) -> _Section:
        """Return an object in here."""
        return _Section(self.file, self.section(name).values, f"{name}.")

    def require(self, **allowed: tuple[object, ...]) -> None:
        """Refuse fields that have other values than raypp computes."""
        for name, values in allowed.items():
            if (value := self.get(name)) is not None and value not in values:
                raise self.error(name, repr(value), f"{' or '.join(map(repr, values))}, or nothing", _HINT)

    def refuse_others(self, *ignored: str) -> None:
        """Refuse fields that nothing asked for: they may change what a layer computes."""
        known = self._asked.union(ignored)
        for name, value in self.values.items():
            if value is not None and name not in known:
                raise self.error(name, repr(value), f"one of the fields {', '.join(sorted(known))}", _HINT)


def read_params(file: Path) -> ConfigFields:
    """Return what config.json would say of the model that params.json describes.

    Raises:
        ModelLoadError: a field is missing, wrong or unknown, or says what raypp does not have.
    """
    fields = _Section(file, read_json(file))
    fields.require(activation=("silu",), model_type=("transformer",), causal=(True,))
    if fields.get("multimodal") is not None and fields.section("multimodal").get("whisper_model_args"):
        raise fields.error("multimodal.whisper_model_args", "an encoder of sounds", "nothing: raypp reads no sounds")
    has_latents = any([fields.get(name) is not None for name in _LATENTS])
    values: dict[str, Any] = {known: fields.integer(name) for name, known in _SIZES.items()}
    for name, known in _SIZES_IF_SAID.items():
        values[known] = None if fields.get(name) is None else fields.integer(name)
    if not has_latents and fields.get("moe") is not None:
        expected = f"nothing, or {', '.join(_LATENTS)} beside it: experts come with latents in this form"
        raise fields.error("moe", "experts", expected, _HINT)
    values |= _read_latents(fields) if has_latents else {"architectures": ["MistralForCausalLM"]}
    rope, num_positions = _read_rope(fields, has_latents=has_latents)
    for name in ("max_seq_len", "max_position_embeddings"):
        num_positions = fields.integer(name, num_positions)
    values |= {
        "rms_norm_eps": fields.number("norm_eps"),
        "rope_interleave": True,
        "rope_parameters": rope,
        "max_position_embeddings": num_positions,
        "tie_word_embeddings": fields.flag("tied_embeddings"),
        "dtype": fields.get("dtype") or "bfloat16",
        "eos_token_id": _EOS,
        "quantization_config": _read_quantization(fields),
    }
    fields.refuse_others(*_IGNORED)
    return ConfigFields(file, values)


def _read_latents(fields: _Section) -> dict[str, Any]:
    """Return the fields of a model whose keys and values are made of latents, and of its experts."""
    if fields.get("sliding_window") is not None:
        expected = "nothing: layers with latents see all tokens"
        raise fields.error("sliding_window", fields.get("sliding_window"), expected)
    moe = fields.below("moe")
    moe.require(route_every_n=(1,), renorm_strategy=("WEIGHTS",), use_load_balancing_bias=(False,))
    values = {
        "architectures": ["Mistral4ForCausalLM"],
        "q_lora_rank": None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        **{name: fields.integer(name) for name in _LATENTS},
        **{known: moe.integer(name) for name, known in _EXPERTS.items()},
        **{known: moe.integer(name, 1) for name, known in _GROUPS.items()},
        "first_k_dense_replace": moe.integer("first_k_dense_replace", 0, least=0),
        "routed_scaling_factor": moe.number("routed_scale", 1.0),
        "norm_topk_prob": True,
    }
    moe.refuse_others(*_IGNORED_OF_EXPERTS)
    return values


def _read_rope(fields: _Section, *, has_latents: bool) -> tuple[dict[str, Any], int]:
    """Return `rope_parameters`, and how many positions they reach.

    Whether YaRN makes attention sharper is always said. Of latents it never does: programs differ in what they make of
    it there.
    """
    theta, has_growth = fields.number("rope_theta", 10000.0), fields.get("llama_4_scaling") is not None
    if fields.get("yarn") is None:
        if has_growth:
            raise fields.error("yarn", "nothing", "an object beside llama_4_scaling", _HINT)
        return {"rope_type": "default", "rope_theta": theta}, _POSITIONS
    yarn = fields.below("yarn")
    sharpens, original = yarn.get("apply_scale"), yarn.integer("original_max_position_embeddings")
    if not isinstance(sharpens, bool) or (has_latents and sharpens):
        allowed = "false, beside latents" if has_latents else "true or false"
        raise yarn.error("apply_scale", "nothing" if sharpens is None else repr(sharpens), allowed, _HINT)
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": yarn.number("factor"),
        "original_max_position_embeddings": original,
        "beta_fast": yarn.number("beta", 32.0),
        "beta_slow": yarn.number("alpha", 1.0),
        **({} if sharpens else {"attention_factor": 1.0}),
    }
    yarn.refuse_others()
    if has_growth:
        growth = fields.below("llama_4_scaling")
        if (other := growth.integer("original_max_position_embeddings", original)) != original:
            raise growth.error("original_max_position_embeddings", other, f"the {original} of yarn")
        rope["llama_4_scaling_beta"] = growth.number("beta")
        growth.refuse_others()
    return rope, int(rope["factor"] * original)


def _read_quantization(fields: _Section) -> dict[str, Any] | None:
    """Return `quantization_config`. FP8 has fields of Mistral's own; NVFP4 and others those of compressed-tensors."""
    said = [name for name in ("quantization", "quantization_config") if fields.get(name)]
    if len(said) > 1:
        raise fields.error(said[1], "an object", f"nothing beside {said[0]}")
    if not said:
        return None
    own = fields.below(said[0])
    if (method := own.get("quant_method")) is not None:
        listed = own.get("ignore")
        ignored = {"ignore": [_known_module(one) for one in listed]} if isinstance(listed, list) else {}
        return {**own.values, "quant_method": str(method).lower().replace("_", "-"), **ignored}
    own.require(qformat_weight=("fp8_e4m3",), qscheme_act=("TENSOR", "NO_SCALES"))
    if own.get("qformat_weight") is None:
        raise own.error("qformat_weight", "nothing", "'fp8_e4m3', or quant_method and its fields")
    own.refuse_others()
    scheme = "dynamic" if own.get("qscheme_act") == "NO_SCALES" else "static"
    return {"quant_method": "fp8", "activation_scheme": scheme, "modules_to_not_convert": ["lm_head"]}


def _known_module(listed: object) -> object:
    return name_in_transformers(listed) if isinstance(listed, str) else listed
