"""The type of the KV cache: that of the activations, or 8 bits."""

from __future__ import annotations

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.models.config import ModelConfig
from raypp.plan.hardware import Hardware

_FP8 = "float8_e4m3fn"


def choose_kv_dtype(config: EngineConfig, model: ModelConfig, hardware: Hardware, *, device: str, dtype: str) -> str:
    """Return the name of the KV cache's torch type.

    Args:
        config: What is asked for.
        model: Whether its checkpoint was made for a cache in 8 bits.
        hardware: What the GPUs can.
        device: `cpu` or `cuda`.
        dtype: Of the activations.

    Raises:
        ConfigError: 8 bits are asked for, and the GPUs have no such type.
    """
    asked = config.cache.kv_cache_dtype
    is_possible = device == "cpu" or dtype == "float32" or hardware.has_fp8  # plain torch needs no such GPU
    if asked == "fp8" and not is_possible:
        raise ConfigError(
            "the KV cache cannot be in 8 bits here",
            got=f"kv_cache_dtype=fp8, compute capability {'.'.join(map(str, hardware.gpu_capability))}",
            expected="GPUs of compute capability 8.9 or later (Ada, Hopper, Blackwell), stages on CPUs, or float32",
            hint="kv_cache_dtype=auto",
        )
    wants_fp8 = asked == "fp8" or (asked == "auto" and model.has_fp8_kv_cache)
    return _FP8 if wants_fp8 and is_possible else dtype
