"""The scales of a KV cache in 8 bits that a checkpoint has, one number per layer each for keys and values."""

from __future__ import annotations

import math

from raypp.errors import ModelLoadError
from raypp.models.weights import WeightReader

_NAMES = {"k": ("k_scale", "k_proj.k_scale", "kv_scale"), "v": ("v_scale", "v_proj.v_scale", "kv_scale")}
"""Below a layer's `self_attn.`, as tools that measure scales write them; `kv_scale` is of keys and values alike."""


def read_kv_scales(weights: WeightReader) -> tuple[float, float]:
    """Return what keys and what values are divided by before they are rounded, 1 where the checkpoint does not say.

    Raises:
        ModelLoadError: a scale that is not one positive number.
    """
    return _scale(weights, _NAMES["k"]), _scale(weights, _NAMES["v"])


def _scale(weights: WeightReader, names: tuple[str, ...]) -> float:
    found = {name: scale for name in names if (scale := weights.number(name)) is not None}
    for name, scale in found.items():
        if not (math.isfinite(scale) and scale > 0):
            raise ModelLoadError(
                f"the checkpoint's scale {weights.prefix}{name} is not usable",
                got=scale,
                expected="a positive number",
                hint="the checkpoint is damaged, or its scales were never measured",
            )
    return next(iter(found.values()), 1.0)
