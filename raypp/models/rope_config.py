"""Reads from config.json how a model's rotary embedding turns, and how far it is stretched. Needs no torch.

Both forms of that file are read: `rope_theta` with `rope_scaling` (published checkpoints) and `rope_parameters` (what
transformers 5 writes). `raypp.models.layer` makes frequencies of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from raypp.models.config_fields import ConfigFields

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "proportional"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "proportional")
_ORIGINAL = "original_max_position_embeddings"
_MAX = "max_position_embeddings"
_GROWTH = "llama_4_scaling_beta"
_SETTINGS = Path("the settings")
"""What errors of a setting name in place of a file."""
_FIELDS = (
    "rope_type",
    "type",
    "factor",
    _ORIGINAL,
    "rope_theta",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "low_freq_factor",
    "high_freq_factor",
    "mrope_section",
    "mrope_interleaved",
    "partial_rotary_factor",
    _GROWTH,
)


_KEPT = ("rope_theta", "mrope_section", "mrope_interleaved", "partial_rotary_factor", _GROWTH)
"""Fields that another scaling does not change."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies are stretched for longer contexts."""

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192  # of llama3, yarn and dynamic
    low_freq_factor: float = 1.0  # llama3 only, and so is the following
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn only, and so are the following
    beta_slow: float = 1.0
    truncates: bool = True
    attention_factor: float = 1.0  # what cosines and sines are multiplied by
    sharpness: float = 1.0  # by `mscale_all_dim`: of both sides of scores, where keys are of latents
    query_growth: float = 0.0  # see `raypp.ops.attention.query_growth`; 0: queries do not grow
    stretched_to: int = 0  # dynamic only: positions that the base is chosen for
    mrope_section: tuple[int, int, int] | None = None
    """Pairs of a head that turn with time, height and width (M-RoPE); None: all with the index alone."""
    share: float = 1.0
    """Of a head's elements, the leading ones, that are rotated (`partial_rotary_factor`); see `pairs_all`."""

    @property
    def pairs_all(self) -> bool:
        """Whether pairs lie half a head apart all the same: the first `share` of them turn, as in a whole head."""
        return self.rope_type == "proportional"


def read_rope(
    fields: ConfigFields, num_positions: int, max_model_len: int | None = None, *, share: float | None = None
) -> tuple[RopeConfig, int]:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Where a file has both, `rope_scaling` counts, as it does for transformers (5.17, `modeling_rope_utils.py`). Scaled
    by `linear` or `yarn`, a model takes `factor` times the original positions where these are said. `dynamic` scaling
    has one base for all positions up to the longest request: keys that are cached cannot turn again.

    Args:
        fields: Of the language model.
        num_positions: `max_position_embeddings`.
        max_model_len: Tokens of the longest request, for dynamic scaling; None: no more than `num_positions`.
        share: Of a head's elements that are rotated where config.json does not say it; None: all, always.

    Returns:
        What was read, and how many positions the model takes with it.

    Raises:
        ModelLoadError: a field is missing or wrong, or of a type that raypp does not have.
    """
    name, scaling = _scaling_section(fields)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise fields.error(f"{name}.rope_type", repr(rope_type), f"one of {', '.join(ROPE_TYPES)}")
    rotated = scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor")
    if share is None and rotated not in (None, 1, 1.0) and rope_type != "proportional":
        raise fields.error("partial_rotary_factor", rotated, "1: all of a head is rotated")
    if rotated is None:
        rotated = share or 1.0
    if isinstance(rotated, bool) or not isinstance(rotated, int | float) or not 0.0 < rotated <= 1.0:
        raise fields.error("partial_rotary_factor", repr(rotated), "a number above 0, at most 1")
    section = _mrope_section(fields, scaling)
    rope = RopeConfig(theta=scaling.number("rope_theta", 10000.0), share=float(rotated), mrope_section=section)
    if rope_type == "default":
        return rope, num_positions
    of_original = fields if fields.get(_ORIGINAL) is not None else scaling  # as transformers has it
    if rope_type == "proportional":
        return replace(rope, rope_type="proportional", factor=scaling.number("factor", 1.0)), num_positions
    if rope_type == "llama3":
        return _read_llama3(rope, scaling, of_original), num_positions
    if rope_type == "dynamic":
        factor = scaling.number("factor")
        stretched_to = max(min(max_model_len or 0, int(factor * num_positions)), num_positions)
        rope = replace(rope, factor=factor, original_max_position_embeddings=num_positions, stretched_to=stretched_to)
        return replace(rope, rope_type="dynamic"), stretched_to
    original = of_original.integer(_ORIGINAL, num_positions)
    default = num_positions / original if rope_type == "yarn" else None
    factor = scaling.number("factor", default)
    if of_original.get(_ORIGINAL) is not None:
        num_positions = max(num_positions, int(factor * original))
    if rope_type == "linear":
        return replace(rope, rope_type="linear", factor=factor), num_positions
    return _read_yarn(rope, scaling, factor, original), num_positions


def with_query_growth(fields: ConfigFields, rope: RopeConfig) -> RopeConfig:
    """Return how layers turn whose queries grow with the position, where the file says so.

    Raises:
        ModelLoadError: a field is missing or wrong.
    """
    _, scaling = _scaling_section(fields)
    if not scaling.get(_GROWTH):
        return rope
    if rope.rope_type != "yarn":
        raise scaling.error(
            _GROWTH, scaling.get(_GROWTH), f"0, with rope_type {rope.rope_type}; others with yarn alone"
        )
    return replace(rope, query_growth=scaling.number(_GROWTH))


def of_kind(fields: ConfigFields, kind: str) -> ConfigFields:
    """Return the fields with the `rope_parameters` of one kind of layers, where these say them by kind."""
    by_kind = fields.get("rope_parameters")
    if not isinstance(by_kind, dict) or not any(isinstance(value, dict) for value in by_kind.values()):
        return fields
    return ConfigFields(fields.file, {**fields.values, "rope_parameters": by_kind.get(kind)})


def read_local_rope(fields: ConfigFields) -> RopeConfig:
    """Return how layers with a window turn, where they have a base of their own, `rope_local_base_freq` (Gemma 3).

    Raises:
        ModelLoadError: a field is missing or wrong.
    """
    values = {**fields.values, "rope_theta": fields.get("rope_local_base_freq"), "rope_scaling": None}
    of_window = of_kind(ConfigFields(fields.file, values), "sliding_attention")
    return read_rope(of_window, fields.integer(_MAX))[0]


def with_rope_scaling(
    fields: ConfigFields, rope_scaling: Mapping[str, Any], share: float | None = None
) -> ConfigFields:
    """Return the fields with another `rope_scaling`; `share` is as in `read_rope`.

    The base stays that of the file, unless it is given, and so do the original context and the share of a head.

    Raises:
        ModelLoadError: a field of the setting is unknown, missing or wrong.
    """
    setting = ConfigFields(_SETTINGS, rope_scaling, "rope_scaling.")
    for field, value in rope_scaling.items():
        if field not in _FIELDS:
            raise setting.error(field, repr(value), f"one of the fields {', '.join(_FIELDS)}")
    if (setting.get("rope_type") or setting.get("type") or "default") != "default":
        factor = setting.number("factor")  # in a file YaRN's may follow from the contexts
        if factor < 1:
            raise setting.error("factor", factor, "at least 1, by which positions are stretched")
    _, scaling = _scaling_section(fields)
    kept = {name: scaling.get(name) for name in _KEPT}
    original = scaling.get(_ORIGINAL) or fields.get(_ORIGINAL) or fields.get(_MAX)
    changed = {**kept, _ORIGINAL: original, **rope_scaling}
    others = {name: value for name, value in fields.values.items() if name not in ("rope_parameters", _ORIGINAL)}
    values = {**others, "rope_scaling": changed}
    # What is wrong is no fault of the file's.
    read_rope(ConfigFields(_SETTINGS, values), fields.integer(_MAX, 1), share=share)
    return ConfigFields(fields.file, values)


def _scaling_section(fields: ConfigFields) -> tuple[str, ConfigFields]:
    """Return the field that counts, and what is in it."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    values = fields.get(name) or {}
    if not isinstance(values, dict):
        raise fields.error(name, repr(values), "an object")
    # Each form may lack the base that the other keeps elsewhere.
    return name, ConfigFields(fields.file, {"rope_theta": fields.get("rope_theta"), **values}, f"{name}.")


def _read_llama3(rope: RopeConfig, scaling: ConfigFields, of_original: ConfigFields) -> RopeConfig:
    low_freq_factor, high_freq_factor = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low_freq_factor >= high_freq_factor:
        raise scaling.error("low_freq_factor", low_freq_factor, f"below high_freq_factor={high_freq_factor}")
    return replace(
        rope,
        rope_type="llama3",
        factor=scaling.number("factor"),
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        original_max_position_embeddings=of_original.integer(_ORIGINAL),
    )


def _read_yarn(rope: RopeConfig, scaling: ConfigFields, factor: float, original: int) -> RopeConfig:
    beta_fast, beta_slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise scaling.error("beta_fast", beta_fast, f"at least beta_slow={beta_slow}")
    return replace(
        rope,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncates=scaling.get("truncate") is None or scaling.flag("truncate"),
        attention_factor=scaling.number("attention_factor", _attention_factor(scaling, factor)),
        sharpness=_sharpened(factor, scaling.number("mscale_all_dim")) if scaling.get("mscale_all_dim") else 1.0,
    )


def _attention_factor(scaling: ConfigFields, factor: float) -> float:
    """Return by how much sharper attention must be for positions that are stretched (arXiv:2309.00071, section 3.4)."""
    mscale, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and of_all:
        return _sharpened(factor, scaling.number("mscale")) / _sharpened(factor, scaling.number("mscale_all_dim"))
    return _sharpened(factor, 1.0)


def _sharpened(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _mrope_section(fields: ConfigFields, scaling: ConfigFields) -> tuple[int, int, int] | None:
    section = scaling.get("mrope_section")
    if section is None:
        return None
    if not (isinstance(section, list) and len(section) == 3 and all(isinstance(n, int) and n > 0 for n in section)):
        raise fields.error("mrope_section", repr(section), "three positive integers: time, height, width")
    if scaling.get("mrope_interleaved") is False:
        raise fields.error("mrope_interleaved", False, "true: the axes take turns over a head's pairs")
    return section[0], section[1], section[2]
