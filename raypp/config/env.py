"""Environment variables: the only place that reads them, and there are few."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from raypp.config.names import unknown_name
from raypp.errors import ConfigError

_PREFIX = "RAYPP_"
_LOG_LEVEL = "RAYPP_LOG_LEVEL"
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class Environment:
    """What the environment says."""

    log_level: str = "WARNING"  # RAYPP_LOG_LEVEL, of the logger "raypp"


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Return what the variables named RAYPP_* say (None: those of the process).

    Raises:
        ConfigError: a variable of that prefix that does not exist, or a value that it cannot have.
    """
    given = os.environ if variables is None else variables
    for name in given:
        if name.startswith(_PREFIX) and name != _LOG_LEVEL:
            raise unknown_name("environment variable", name, {_LOG_LEVEL: ""})
    level = given.get(_LOG_LEVEL, Environment.log_level).upper()
    if level not in _LOG_LEVELS:
        raise ConfigError(f"{_LOG_LEVEL} has a value that it cannot have", got=level, expected=", ".join(_LOG_LEVELS))
    return Environment(log_level=level)
