"""Flat arguments, as Ray Serve hands them to an application, become the engine's configuration and HTTP settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpSettings, http_settings
from raypp.config.names import SECTION_OF_SETTING, SECTIONS, unknown_name
from raypp.config.options import value_of
from raypp.errors import ConfigError


def split_arguments(arguments: Mapping[str, Any]) -> tuple[EngineConfig, HttpSettings]:
    """Return the engine's configuration and the HTTP settings of flat arguments.

    Args:
        arguments: Settings of both by their names alone, whole sections of the engine's (`speculative`), and `config`,
            a TOML file of the engine's. Text is read as a value of the setting's type.

    Raises:
        ConfigError: an unknown name (the nearest valid one is said), or a value that cannot be.
    """
    http: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    config_file: str | None = None
    for name, given in arguments.items():
        if name == "config":
            config_file = str(given)
        elif name in HttpSettings.model_fields:
            http[name] = _read(given, HttpSettings.model_fields[name].annotation)
        elif name in SECTION_OF_SETTING:
            engine[name] = _read(given, SECTIONS[SECTION_OF_SETTING[name]].model_fields[name].annotation)
        elif name in SECTIONS:
            engine[name] = _read(given, dict)
        else:
            places = {key: f" (section {section})" for key, section in SECTION_OF_SETTING.items()}
            raise unknown_name("setting", name, {**places, **dict.fromkeys(HttpSettings.model_fields, " (HTTP)")})
    if config_file is not None:
        return EngineConfig.from_toml(config_file, **engine), http_settings(HttpSettings, http)
    if "model" not in engine:
        raise ConfigError("no model is named", expected="model=M", hint="model=tiny comes with raypp")
    return EngineConfig.from_flat(**engine), http_settings(HttpSettings, http)


def _read(given: Any, annotation: Any) -> Any:
    return value_of(given, annotation) if isinstance(given, str) else given
