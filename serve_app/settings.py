"""What can be set about the HTTP door, and how `build` tells it from what can be set about the engine."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from raypp.config.engine_config import EngineConfig
from raypp.config.names import SECTION_OF_SETTING, unknown_name
from raypp.errors import ConfigError
from serve_app.client_connection import KEEP_ALIVE_S

_OF_AUTOSCALING = {
    "min_replicas",
    "target_ongoing_requests",
    "upscale_delay_s",
    "downscale_delay_s",
    "drain_timeout_s",
}


class ServeSettings(BaseModel):
    """Settings of the HTTP door."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    served_model_name: list[str] = Field(default=[], max_length=64)
    """The names that requests may call the model by; the first is the one in answers. Empty: the model's own."""
    num_replicas: int = Field(default=1, ge=1)
    """Engines behind the same address. Each has its own placement group. With `max_replicas`: as many at the start."""
    min_replicas: int = Field(default=1, ge=1)
    """With `max_replicas`: the fewest engines."""
    max_replicas: int | None = Field(default=None, ge=1)
    """The most engines: their number then follows the requests that run and wait. None: there are `num_replicas`."""
    target_ongoing_requests: float | None = Field(default=None, gt=0)
    """With `max_replicas`: requests per engine, waiting ones included, at which the number is right. By default
    `max_num_seqs`: another engine is started when requests wait for a row."""
    upscale_delay_s: float = Field(default=30.0, ge=0)
    """With `max_replicas`: how long there must be too many requests before an engine is added."""
    downscale_delay_s: float = Field(default=600.0, ge=0)
    """With `max_replicas`: how long there must be too few before one is taken away."""
    drain_timeout_s: float = Field(default=300.0, gt=0)
    """With `max_replicas`: how long an engine that is taken away may go on answering what it has."""
    prefix_routing: bool = True
    """With several engines: send a request to the one that probably has the beginning of its prompt in its cache."""
    prefix_routing_max_excess: int = Field(default=4, ge=0)
    """Requests that this engine may have beyond 1.5 times those of the least busy one; then the latter gets it."""
    replica_num_cpus: float = Field(default=0.01, ge=0)
    """CPUs that a replica's HTTP process asks Ray for. Placement only."""
    replica_resources: dict[str, float] = {}
    """Ray resources that a replica must find on its node, e.g. `{"accelerator_type:H200": 0.001}`: the engine is
    planned for the hardware of that node."""
    api_keys: list[str] = []
    """Keys of which requests must bring one as `Authorization: Bearer KEY`. Empty, and no file: everybody may ask."""
    api_key_file: str | None = None
    """A file with one more key per line. A key in a file does not show in the process list."""
    cors_origins: list[str] = []
    """Web pages of other origins that may call from a browser, e.g. `https://example.org`, or `*`. Empty: none."""
    max_body_bytes: int = Field(default=32 << 20, ge=1024)
    """The largest request body; larger ones are refused with 413."""
    max_queued_requests: int = Field(default=1024, ge=0)
    """Requests (each of `n` counts) that may wait beside the `max_num_seqs` that run; more are refused with 429."""
    max_unfinished_tokens: int = Field(default=1 << 23, ge=1)
    """Prompt tokens of all unfinished requests of a replica; more are refused with 429."""
    max_sequences_per_request: int = Field(default=256, ge=1)
    """Sequences that one body may ask for, prompts times `n`; more are refused with 400."""
    max_tokens_per_request: int = Field(default=1 << 20, ge=1)
    """Prompt tokens that one body with several prompts may bring; more are refused with 400."""
    max_encodes: int = Field(default=8, ge=1)
    """Requests whose pictures are encoded at once, over all replicas: more wait."""
    max_encodes_waiting: int = Field(default=64, ge=0)
    """Requests with pictures that may wait for that, of each replica; more are refused with 429."""
    stream_keep_alive_s: float = Field(default=KEEP_ALIVE_S, gt=0)
    """The longest silence of a stream: a comment goes out where there is nothing else, so that no proxy cuts it."""
    health_check_period_s: float = Field(default=0.5, gt=0)
    """How often Ray Serve asks a replica for its health. After three times unhealthy it is replaced."""
    ray_metrics_period_s: float = Field(default=5.0, ge=0)
    """How often Ray's own metrics are told how those of `/metrics` stand; 0: never."""
    live_period_s: float = Field(default=0.2, gt=0)
    """How often the page's live picture is renewed, while anybody looks at it."""

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if self.max_replicas is None:
            given = sorted(self.model_fields_set & _OF_AUTOSCALING)
            if given:
                raise ConfigError(
                    f"{given[0]} means nothing without max_replicas",
                    got=f"{given[0]} = {getattr(self, given[0])}",
                    hint=f"set max_replicas, or leave {given[0]} out",
                )
        elif not max(self.min_replicas, self.num_replicas) <= self.max_replicas:
            raise ConfigError(
                "max_replicas is below min_replicas or num_replicas",
                got=f"min_replicas = {self.min_replicas}, num_replicas = {self.num_replicas}, "
                f"max_replicas = {self.max_replicas}",
                expected="the largest of the three",
            )
        return self

    def keys(self) -> list[str]:
        """Return all API keys.

        Raises:
            ConfigError: the file cannot be read, or holds no key.
        """
        if self.api_key_file is None:
            return self.api_keys
        try:
            with open(self.api_key_file, encoding="utf-8") as file:
                found = [line.strip() for line in file if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("the file of API keys cannot be read", got=error) from error
        if not found:  # an empty file would otherwise open the door to everybody
            raise ConfigError("the file of API keys holds no key", got=self.api_key_file, expected="one key per line")
        return [*self.api_keys, *found]


def split_arguments(arguments: Mapping[str, Any]) -> tuple[EngineConfig, ServeSettings]:
    """Return the engine's configuration and the door's settings of flat arguments.

    Args:
        arguments: Settings of both by their names alone, and `config`, a TOML file of the engine's. Text is read as
            TOML where it can be: a command line has nothing else.

    Raises:
        ConfigError: an unknown name (the nearest valid one is said), or a value that cannot be.
    """
    door: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    config_file: str | None = None
    for name, given in arguments.items():
        if name == "config":
            config_file = str(given)
        elif name in ServeSettings.model_fields:
            door[name] = _door_value(name, given)
        elif name in SECTION_OF_SETTING:
            engine[name] = _parsed(given) if name != "model" else given
        else:
            places = {key: f" (section {section})" for key, section in SECTION_OF_SETTING.items()}
            raise unknown_name("setting", name, {**places, **dict.fromkeys(ServeSettings.model_fields, " (HTTP)")})
    if config_file is not None:
        return EngineConfig.from_toml(config_file, **engine), door_settings(door)
    if "model" not in engine:
        raise ConfigError("no model is named", expected="model=M", hint="model=tiny ships with raypp")
    return EngineConfig.from_flat(**engine), door_settings(door)


def door_settings(given: Mapping[str, Any]) -> ServeSettings:
    """Return the door's settings.

    Raises:
        ConfigError: a value that cannot be.
    """
    try:
        return ServeSettings.model_validate_json(json.dumps(dict(given), default=os.fspath))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{name} has a value that it cannot have", got=repr(first.get("input")), expected=first["msg"]
        ) from None


def _door_value(name: str, given: Any) -> Any:
    field = ServeSettings.model_fields[name]
    if not isinstance(given, str) or field.annotation in (str, str | None):
        return given
    value = _parsed(given)
    return [value] if field.annotation == list[str] and not isinstance(value, list) else value


def _parsed(given: Any) -> Any:
    """Return text as the TOML value that it spells; text that spells none is itself."""
    if not isinstance(given, str):
        return given
    try:
        return tomllib.loads(f"value = {given}")["value"]
    except tomllib.TOMLDecodeError:
        return given
