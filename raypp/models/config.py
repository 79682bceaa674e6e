"""Reads a model's architecture and sizes from its config.json.

Both forms of that file are read: `rope_theta` with `rope_scaling` (published checkpoints) and `rope_parameters` (what
transformers 5 writes); `torch_dtype` and `dtype`. Needs no torch, so that planning stays cheap.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from raypp.errors import ModelLoadError
from raypp.models.checkpoint_names import are_alike, file_of_tensor, has_safetensors, stored_tensors
from raypp.models.config_fields import ConfigFields, read_json
from raypp.models.expert_config import ExpertConfig, read_experts
from raypp.models.families import FAMILIES, Family
from raypp.models.generation_config import GENERATION_CONFIG
from raypp.models.kv_cache_scheme import has_fp8_kv_cache
from raypp.models.quantization import Quantization, read_quantization
from raypp.models.rope_config import RopeConfig, read_rope, with_rope_scaling
from raypp.models.vision_config import VisionConfig, read_vision_config

CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")
EMBEDDING = "embed_tokens.weight"
"""The token embedding's name below a model's `weight_prefix`."""
LM_HEAD = "lm_head.weight"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only language model's architecture and sizes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str  # the checkpoint's
    eos_token_ids: tuple[int, ...]  # ascending
    weight_prefix: str = "model."  # of the language model's tensors, but for the LM head's
    vision: VisionConfig | None = None  # None: it reads text alone
    experts: ExpertConfig | None = None  # None: all layers are dense
    quantization: Quantization | None = None  # None: weights are floats of 16 or 32 bits
    has_fp8_kv_cache: bool = False  # whether the checkpoint was made for a KV cache in 8 bits

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """Return the experts of a layer, None if it is dense."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def num_deepstack_layers(self) -> int:
        """Leading layers after which rows of the vision tower are added to its tokens."""
        return 0 if self.vision is None else len(self.vision.deepstack_layers)


def load_model_config(
    path: Path, *, rope_scaling: Mapping[str, Any] | None = None, max_model_len: int | None = None
) -> ModelConfig:
    """Read a model directory's config.json, and the end-of-sequence ids of its generation_config.json if it has one.

    Args:
        path: The directory.
        rope_scaling: In place of the file's field of that name; None: as the file has it.
        max_model_len: Tokens of the longest request, which dynamic scaling is chosen by; None: as many as are trained.

    Raises:
        ModelLoadError: no such file, an architecture or a feature that raypp does not have, a missing or wrong field.
    """
    file = path / "config.json"
    whole = ConfigFields(file, read_json(file))
    architecture = _architecture(whole)
    family = FAMILIES[architecture]
    fields = _text_fields(whole) if family.has_vision else whole
    if rope_scaling is not None:
        fields = with_rope_scaling(fields, rope_scaling)
    refuse_unsupported(fields)
    _refuse_sliding_window(fields, family)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads={num_heads}")
    head_dim = fields.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "an even number: rotary embedding pairs dimensions")
    num_positions = fields.integer("max_position_embeddings", family.default_max_position_embeddings)
    rope, num_positions = read_rope(fields, num_positions, max_model_len)
    num_layers = fields.integer("num_hidden_layers")
    vision = read_vision_config(path, whole, hidden_size) if family.has_vision else None
    if vision is not None and rope.mrope_section is None:
        raise fields.error("rope_parameters.mrope_section", "nothing", "three numbers of pairs: time, height, width")
    if vision is not None and len(vision.deepstack_layers) > num_layers:
        raise fields.error("num_hidden_layers", num_layers, f"a layer for each of {len(vision.deepstack_layers)} taps")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=fields.flag(family.qkv_bias),
        attention_output_bias=fields.flag(family.attention_output_bias),
        mlp_bias=fields.flag(family.mlp_bias),
        qk_norm=family.qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        max_position_embeddings=num_positions,
        dtype=read_dtype(fields),
        eos_token_ids=_eos_token_ids(path, fields),
        weight_prefix=family.weight_prefix,
        vision=vision,
        experts=None if family.experts is None else read_experts(fields, family.experts, num_layers),
        quantization=read_quantization(fields),
        has_fp8_kv_cache=has_fp8_kv_cache(fields),
    )


def as_stored(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the configuration as the directory's weights have it: their names, and whether the LM head is tied.

    A model that was saved without its head has no `model.` in front of its names.
    Some checkpoints are called tied and store an LM head besides. It is mostly the embedding once more; where it is
    not, it is the LM head (as transformers has it: 5.17, `PreTrainedModel.tie_weights`).

    Raises:
        ModelLoadError: the checkpoint is not readable.
    """
    if not has_safetensors(path):
        return config
    names = file_of_tensor(path)
    if config.vision is None and EMBEDDING in names and config.weight_prefix + EMBEDDING not in names:
        config = replace(config, weight_prefix="")
    if not config.tie_word_embeddings:
        return config
    tensors = stored_tensors(path)
    embedding, lm_head = tensors.get(f"{config.weight_prefix}{EMBEDDING}"), tensors.get(LM_HEAD)
    if embedding is None or lm_head is None or are_alike(embedding, lm_head):
        return config
    _LOG.warning(
        "%s: config.json says tie_word_embeddings, but %s is stored and is not the embedding: it is used", path, LM_HEAD
    )
    return replace(config, tie_word_embeddings=False)


def _text_fields(whole: ConfigFields) -> ConfigFields:
    """Return the language model's fields; what its own section leaves unsaid may stand beside it."""
    text = whole.section("text_config")
    above = {name: value for name, value in whole.values.items() if name not in ("text_config", "vision_config")}
    said = {name: value for name, value in text.values.items() if value is not None or name not in above}
    tied = {name: above[name] for name in ("tie_word_embeddings",) if name in above}  # said of the whole model
    return ConfigFields(whole.file, {**above, **said, **tied})


def _architecture(fields: ConfigFields) -> str:
    names = fields.get("architectures")
    if isinstance(names, list):
        for name in names:
            if name in FAMILIES:
                return cast(str, name)
    raise ModelLoadError(
        f"{fields.file}: raypp does not have this architecture",
        got=names if names else f"architectures={names!r}, model_type={fields.get('model_type')!r}",
        expected=f"one of {', '.join(FAMILIES)}",
        hint="the head of a draft goes beside its model: --draft-model" if "agle" in str(names) else None,
    )


def refuse_unsupported(fields: ConfigFields) -> None:
    """Refuse what changes a layer's computation and raypp does not have."""
    if fields.get("use_sliding_window"):
        raise fields.error("use_sliding_window", True, "false: raypp has no sliding-window attention")
    layer_types = fields.get("layer_types") or []
    others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if others:
        raise fields.error("layer_types", others, "full_attention in every layer")
    activation = fields.get("hidden_act")
    if activation not in (None, "silu", "swish"):  # two names of one function
        raise fields.error("hidden_act", repr(activation), "silu, or swish, which is the same")


def _refuse_sliding_window(fields: ConfigFields, family: Family) -> None:
    window = fields.get("sliding_window")
    if family.uses_sliding_window and window is not None:
        raise fields.error("sliding_window", window, "null: raypp has no sliding-window attention")


def read_dtype(fields: ConfigFields) -> str:
    """Return the checkpoint's type."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.get(name)
    if dtype is None:
        return "float32"  # what transformers takes when nothing is said
    if dtype not in CHECKPOINT_DTYPES:
        raise fields.error(name, repr(dtype), f"one of {', '.join(CHECKPOINT_DTYPES)}")
    return cast(str, dtype)


def _eos_token_ids(path: Path, fields: ConfigFields) -> tuple[int, ...]:
    """Return the ids of both files: chat models name the end of a turn in one and the end of a text in the other."""
    sources, vocab_size = [fields], fields.integer("vocab_size")
    generation = path / GENERATION_CONFIG
    if generation.is_file():
        sources.append(ConfigFields(generation, read_json(generation)))
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        listed = value if isinstance(value, list) else [value] if value is not None else []
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
            raise source.error("eos_token_id", repr(value), "a token id or a list of them")
        if not all(0 <= token < vocab_size for token in listed):
            raise source.error("eos_token_id", repr(value), f"token ids from 0 to {vocab_size - 1}")
        ids.update(listed)
    return tuple(sorted(ids))
