"""The Serve application: `serve run serve_app.app:build model=tiny num_stages=2`, or `configs/serve.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from raypp.config.engine_config import EngineConfig
from raypp.config.env import passed_on
from raypp.config.http_settings import HttpSettings, http_settings
from raypp.config.names import SECTION_OF_SETTING, SECTIONS, unknown_name
from raypp.config.options import value_of
from raypp.errors import ConfigError, ModelLoadError
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.openai_api.syntaxes import check_parsers
from serve_app.replica import EngineReplica, encoder_deployment

if TYPE_CHECKING:
    from raypp.stage.build_stage import StageFactory  # imports torch


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


ENGINE = "engine"
"""The deployment whose replicas own engines."""

_MAX_STARTS = 3
"""What keeps an engine from starting is seldom gone at the next attempt, and each may take minutes."""

_OTHER_REQUESTS = 256
"""Requests beside those that generate: health, metrics, pages. They never wait behind the others."""


def build(arguments: dict[str, Any]) -> Application:
    """Return the application that Serve deploys.

    Args:
        arguments: Settings of the engine and of HTTP by their names alone, and `config`, a TOML file.

    Raises:
        ConfigError: an unknown name, or a value that cannot be.
    """
    return build_application(*split_arguments(arguments))


def build_application(
    config: EngineConfig, settings: HttpSettings, *, stage_factory: StageFactory | None = None
) -> Application:
    """Return the application of an engine's configuration and the HTTP settings.

    Args:
        config: Of the engine.
        settings: Of HTTP.
        stage_factory: Makes other models than the real ones.

    Raises:
        ConfigError: the API keys cannot be read, or a syntax of calls or thoughts is not known.
    """
    # What cannot be read is an error here, not in a replica's log.
    settings.keys()
    check_parsers(config.model.tool_call_parser, config.model.reasoning_parser)
    # The app itself refuses what is too much, with Retry-After and the reason; Serve's own limits only hold further
    # away, and silently make requests wait.
    max_requests = config.scheduler.max_num_seqs + settings.max_queued_requests + _OTHER_REQUESTS
    deployed = serve.deployment(
        name=ENGINE,
        **_number_of_replicas(config, settings),
        **_routing(settings),
        max_ongoing_requests=max_requests,
        max_constructor_retry_count=_MAX_STARTS,
        ray_actor_options=_with_environment(
            {"num_cpus": settings.replica_num_cpus, "resources": settings.replica_resources}
        ),
        health_check_period_s=settings.health_check_period_s,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=end_timeout_s(config, settings),
    )
    # Nothing is given to ingress: the app is made in the replica, once there is an engine to make it around.
    encoder = None
    if takes_pictures(config):
        encoder = encoder_deployment(
            num_cpus=settings.replica_num_cpus,
            max_ongoing=settings.max_encodes,
            max_queued=settings.max_encodes_waiting,
        ).bind()
    application: Application = deployed(serve.ingress()(EngineReplica)).bind(config, settings, stage_factory, encoder)
    return application


def _with_environment(options: dict[str, Any]) -> dict[str, Any]:
    """Return a replica's options with the variables that are passed on; its engine's actors inherit them."""
    if not (variables := passed_on()):
        return options
    given = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}  # else Serve would leave it out
    return {**options, "runtime_env": {**given, "env_vars": {**given.get("env_vars", {}), **variables}}}


def end_timeout_s(config: EngineConfig, settings: HttpSettings) -> float:
    """Return how many seconds a replica has for its running requests and its own end, before Serve kills it."""
    drain_s = 0.0 if settings.max_replicas is None else settings.drain_timeout_s
    return drain_s + 2 * config.faults.close_timeout_s


def _number_of_replicas(config: EngineConfig, settings: HttpSettings) -> dict[str, Any]:
    """Return Serve's options about the number of replicas."""
    if settings.max_replicas is None:
        return {"num_replicas": settings.num_replicas}
    autoscaling = AutoscalingConfig(
        min_replicas=settings.min_replicas,
        initial_replicas=max(settings.num_replicas, settings.min_replicas),
        max_replicas=settings.max_replicas,
        target_ongoing_requests=settings.target_ongoing_requests or config.scheduler.max_num_seqs,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
    )
    return {"num_replicas": None, "autoscaling_config": autoscaling}


def _routing(settings: HttpSettings) -> dict[str, Any]:
    """Return Serve's options about the choice between replicas: none where there is never a choice."""
    if not settings.prefix_routing or max(settings.num_replicas, settings.max_replicas or 1) == 1:
        return {}
    router: dict[str, Any] = {
        "request_router_class": "serve_app.prefix_router.PrefixRouter",
        "request_router_kwargs": {"max_excess": settings.prefix_routing_max_excess},
    }
    return {"request_router_config": RequestRouterConfig(**router)}


def takes_pictures(config: EngineConfig) -> bool:
    """Return whether the model takes images. One that cannot be read here is the replica's to complain of."""
    if not config.encoder.num_encoders:
        return False
    try:
        return load_model_config(resolve_model_path(config.model.model, config.model.revision)).vision is not None
    except ModelLoadError:
        return False
