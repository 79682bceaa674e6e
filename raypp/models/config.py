"""What raypp knows of a model before it reads a weight: its architecture and sizes, from config.json.

Both forms of that file are read: `rope_theta` with `rope_scaling` (published checkpoints) and `rope_parameters` (what
transformers 5 writes); `torch_dtype` and `dtype`. Needs no torch, so that planning stays cheap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from raypp.errors import ModelLoadError

RopeType = Literal["default", "linear", "llama3"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3")
CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies are stretched for longer contexts."""

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, and so are the following
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


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


@dataclass(frozen=True)
class _Family:
    """Where an architecture differs in what its config.json says and leaves unsaid."""

    qkv_bias: bool | str  # fixed, or the key that says it
    attention_output_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    default_head_dim: int | None  # None: hidden_size / num_attention_heads
    default_max_position_embeddings: int


_FAMILIES = {
    "LlamaForCausalLM": _Family("attention_bias", "attention_bias", "mlp_bias", False, None, 2048),
    "Qwen2ForCausalLM": _Family(True, False, False, False, None, 32768),
    "Qwen3ForCausalLM": _Family("attention_bias", "attention_bias", False, True, 128, 32768),
}

SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


def load_model_config(path: Path) -> ModelConfig:
    """Read a model directory's config.json, and the end-of-sequence ids of its generation_config.json if it has one.

    Raises:
        ModelLoadError: no such file, an architecture or a feature that raypp does not have, a missing or wrong field.
    """
    file = path / "config.json"
    fields = _Fields(file, _read_json(file))
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    _refuse_unsupported(fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads={num_heads}")
    head_dim = fields.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "an even number: rotary embedding pairs dimensions")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        qkv_bias=fields.flag(family.qkv_bias),
        attention_output_bias=fields.flag(family.attention_output_bias),
        mlp_bias=fields.flag(family.mlp_bias),
        qk_norm=family.qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        max_position_embeddings=fields.integer("max_position_embeddings", family.default_max_position_embeddings),
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(path, fields),
    )


class _Fields:
    """One JSON object's entries, typed, with errors that name the file and the field."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def error(self, name: str, got: object, expected: str, hint: str | None = None) -> ModelLoadError:
        """Return the error of a field."""
        return ModelLoadError(f"{self.file}: field {name!r} is not usable", got=got, expected=expected, hint=hint)

    def get(self, name: str) -> Any:
        """Return the field, None when absent."""
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; without a default the field must be there."""
        value = self.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "nothing" if value is None else repr(value), "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number; without a default the field must be there."""
        value = self.get(name)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(name, "nothing" if value is None else repr(value), "a positive number")
        return float(value)

    def flag(self, name: bool | str) -> bool:
        """Return what a field says, False when absent; or what is given, when that is fixed."""
        if isinstance(name, bool):
            return name
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, repr(value), "true or false")
        return bool(value)


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ModelLoadError(
            f"{file.parent} is not a model directory",
            got=f"no {file.name}" if file.parent.is_dir() else "no such directory",
            expected="a directory in Hugging Face layout: config.json, *.safetensors, tokenizer files",
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not JSON", got=str(error)) from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file} is not a JSON object", got=type(values).__name__)
    return values


def _architecture(fields: _Fields) -> str:
    names = fields.get("architectures")
    if isinstance(names, list):
        for name in names:
            if name in _FAMILIES:
                return cast(str, name)
    raise ModelLoadError(
        f"{fields.file}: raypp does not have this architecture",
        got=names if names else f"architectures={names!r}, model_type={fields.get('model_type')!r}",
        expected=f"one of {', '.join(SUPPORTED_ARCHITECTURES)}",
    )


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.get("use_sliding_window"):
        raise fields.error("use_sliding_window", True, "false: raypp has no sliding-window attention")
    layer_types = fields.get("layer_types") or []
    others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if others:
        raise fields.error("layer_types", others, "full_attention in every layer")
    activation = fields.get("hidden_act")
    if activation not in (None, "silu"):
        raise fields.error("hidden_act", repr(activation), "silu")
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise fields.error("quantization_config", repr(method), "weights in bfloat16, float16 or float32")


def _rope(fields: _Fields) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    values = fields.get(name) or {}
    if not isinstance(values, dict):
        raise fields.error(name, repr(values), "an object")
    # Each form may lack the base that the other keeps elsewhere.
    scaling = _Fields(fields.file, {"rope_theta": fields.get("rope_theta"), **values})
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise fields.error(f"{name}.rope_type", repr(rope_type), f"one of {', '.join(ROPE_TYPES)}")
    rotated = scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor")
    if rotated not in (None, 1, 1.0):
        raise fields.error("partial_rotary_factor", rotated, "1: all of a head is rotated")
    theta = scaling.number("rope_theta", 10000.0)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(theta=theta, rope_type="linear", factor=scaling.number("factor"))
    return RopeConfig(
        theta=theta,
        rope_type="llama3",
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
    )


def _dtype(fields: _Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.get(name)
    if dtype is None:
        return "float32"  # what transformers takes when nothing is said
    if dtype not in CHECKPOINT_DTYPES:
        raise fields.error(name, repr(dtype), f"one of {', '.join(CHECKPOINT_DTYPES)}")
    return cast(str, dtype)


def _eos_token_ids(path: Path, fields: _Fields) -> tuple[int, ...]:
    """Return the ids of both files: chat models name the end of a turn in one and the end of a text in the other."""
    sources = [fields]
    generation = path / "generation_config.json"
    if generation.is_file():
        sources.append(_Fields(generation, _read_json(generation)))
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        listed = value if isinstance(value, list) else [value] if value is not None else []
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
            raise source.error("eos_token_id", repr(value), "a token id or a list of them")
        ids.update(listed)
    return tuple(sorted(ids))
