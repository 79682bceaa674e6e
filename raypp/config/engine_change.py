"""Which settings may change under running requests, when an engine is started again on purpose."""

from __future__ import annotations

from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError

_FIXED_SECTIONS = ("model", "images", "observability", "faults")
_FIXED_SETTINGS = {
    "cache": ("kv_cache_dtype",),
    "scheduler": ("max_waiting_bytes",),
    "encoder": ("max_waiting_pixel_bytes",),
}
"""The model and what it is multiplied in decide texts; the others are settings of the client, which stays."""


def changed_settings(before: EngineConfig, after: EngineConfig) -> dict[str, tuple[Any, Any]]:
    """Return what differs: `section.setting` with both values."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    return {
        f"{section}.{name}": (value, new[section][name])
        for section, values in old.items()
        for name, value in values.items()
        if value != new[section][name]
    }


def check_change(before: EngineConfig, after: EngineConfig) -> None:
    """Refuse changes under which requests could not go on as they began.

    Raises:
        ConfigError: it names the settings.
    """
    refused = {}
    for name, values in changed_settings(before, after).items():
        section, setting = name.split(".")
        if section in _FIXED_SECTIONS or setting in _FIXED_SETTINGS.get(section, ()):
            refused[name] = values
    if refused:
        raise ConfigError(
            "these settings cannot change while requests run",
            got=", ".join(f"{name}: {old!r} to {new!r}" for name, (old, new) in refused.items()),
            expected="others: of stages, layers and links, KV blocks, graphs, speculation, encoders, rows and tokens",
            hint="start a new engine",
        )
