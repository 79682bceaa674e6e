"""Environment variables, which are read here only; and where log lines go in a process of raypp's own."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from raypp.config.options import VARIABLES
from raypp.errors import ConfigError, nearest_name

_LOG = logging.getLogger(__name__)
_PREFIX = "RAYPP_"
_LOG_LEVEL = "RAYPP_LOG_LEVEL"
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # so it is called
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LOGGERS = ("raypp", "serve_app")
_LINE = re.compile(rf"\d{{4}}-\d\d-\d\d [\d:,]+ [A-Z]+ (?:{'|'.join(_LOGGERS)})[.:]")


@dataclass(frozen=True)
class Environment:
    """What the environment says."""

    log_level: str = "WARNING"  # RAYPP_LOG_LEVEL, of the logger "raypp"
    settings: Mapping[str, str] = field(default_factory=dict)  # of the `raypp` command, by variable
    ray_job_id: str | None = None  # of the Ray job whose entrypoint this process is; set by Ray


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Return what the variables named RAYPP_* say (None: those of the process).

    Raises:
        ConfigError: a value that a variable cannot have.
    """
    given = os.environ if variables is None else variables
    level = given.get(_LOG_LEVEL, Environment.log_level).upper()
    if level not in _LOG_LEVELS:
        raise ConfigError(f"invalid value for {_LOG_LEVEL}", got=level, expected=", ".join(_LOG_LEVELS))
    settings = {name: given[name] for name in VARIABLES.keys() & given.keys() if not _is_kubernetes(given[name])}
    return Environment(log_level=level, settings=settings, ray_job_id=_ray_job_id(given.get(_RAY_JOB, "")))


def passed_on(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables (None: this process's) that an engine's processes take from the one that starts it.

    The others are each node's own: folders, tokens, GPUs.
    """
    given = os.environ if variables is None else variables
    return {name: value for name, value in given.items() if name.startswith("NCCL_") or name == _LOG_LEVEL}


def warn_of_unknown_variables(variables: Mapping[str, str] | None = None) -> None:
    """Log the variables named RAYPP_* that raypp does not read (None: those of the process), once in a process.

    They are no errors: Kubernetes gives every pod beside a Service of that name RAYPP_SERVICE_HOST and some more.
    """
    given = os.environ if variables is None else variables
    valid = {_LOG_LEVEL, *VARIABLES}
    unknown = tuple(sorted(name for name in given if name.startswith(_PREFIX) and name not in valid))
    if unknown:
        _warn_of(unknown)


@functools.cache
def _warn_of(names: tuple[str, ...]) -> None:
    valid = [_LOG_LEVEL, *VARIABLES]
    by_end = {variable.removeprefix(_PREFIX): variable for variable in valid}
    nearest = {name: nearest_name(name.removeprefix(_PREFIX), by_end) for name in names}
    hints = [f"{name}: did you mean {by_end[best]}?" for name, best in nearest.items() if best]
    _LOG.warning(
        "environment variables that raypp does not have are ignored: %s%s",
        ", ".join(names),
        "".join(f"; {hint}" for hint in hints),
    )


def _is_kubernetes(value: str) -> bool:
    """Return whether Kubernetes has set a variable: beside a Service raypp RAYPP_PORT is tcp://ADDRESS:PORT."""
    return value.startswith(("tcp://", "udp://"))


def _ray_job_id(config: str) -> str | None:
    try:
        submission_id: object = json.loads(config)["metadata"]["job_submission_id"]
    except (ValueError, KeyError, TypeError):
        return None
    return submission_id if isinstance(submission_id, str) else None


def log_to_stderr() -> None:
    """Write what raypp and its server log, from the level of RAYPP_LOG_LEVEL on, to stderr."""
    level = read_environment().log_level
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)


def is_log_line(line: str) -> bool:
    """Return whether a line is one that `log_to_stderr` has written, in whatever process."""
    return _LINE.match(line) is not None
