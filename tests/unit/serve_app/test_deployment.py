"""What Ray Serve is told of the deployment; nothing is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
from ray.serve.deployment import Deployment

from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpSettings, http_settings
from raypp.errors import ConfigError
from serve_app.app import build_application


def deployed(settings: HttpSettings) -> Deployment:
    """Return the engine's deployment, for an engine of 64 rows."""
    return build_application(EngineConfig.from_flat("tiny", max_num_seqs=64), settings)._bound_deployment


def test_without_a_maximum_the_number_of_replicas_is_fixed() -> None:
    engine = deployed(HttpSettings(num_replicas=3))
    assert engine.num_replicas == 3
    assert engine._deployment_config.autoscaling_config is None
    assert engine._deployment_config.graceful_shutdown_timeout_s == 20


def test_the_number_of_replicas_follows_requests_up_to_the_maximum() -> None:
    engine = deployed(HttpSettings(max_replicas=4))._deployment_config
    scaling = engine.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (1, 1, 4)
    assert scaling.target_ongoing_requests == 64, "as many as run: more wait"
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (30, 600)
    assert engine.graceful_shutdown_timeout_s == 320, "answers end before their engine does"


def test_every_setting_of_autoscaling_reaches_serve() -> None:
    engine = deployed(
        HttpSettings(
            num_replicas=1,
            min_replicas=2,
            max_replicas=5,
            target_ongoing_requests=7.5,
            upscale_delay_s=1.0,
            downscale_delay_s=2.0,
            drain_timeout_s=3.0,
        )
    )._deployment_config
    scaling = engine.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, 2, 5)
    assert scaling.target_ongoing_requests == 7.5
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (1, 2)
    assert engine.graceful_shutdown_timeout_s == 23


def test_prefixes_route_where_there_is_a_choice() -> None:
    def router(**given: object) -> object:
        return deployed(HttpSettings(**given))._deployment_config.request_router_config

    for settings in ({"num_replicas": 2}, {"max_replicas": 2}):
        found = router(**settings, prefix_routing_max_excess=7)
        assert found.request_router_class == "serve_app.prefix_router.PrefixRouter"
        assert found.request_router_kwargs == {"max_excess": 7}
    for settings in ({}, {"max_replicas": 1}, {"num_replicas": 2, "prefix_routing": False}):
        assert router(**settings).is_default_request_router()


def test_a_replica_takes_the_variables_that_are_passed_on_and_keeps_what_its_job_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "RAYPP_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    assert "runtime_env" not in deployed(HttpSettings()).ray_actor_options
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    assert deployed(HttpSettings()).ray_actor_options["runtime_env"]["env_vars"] == {"NCCL_SOCKET_IFNAME": "eth1"}
    job = {"py_modules": ["gcs://a.zip"], "env_vars": {"A": "1", "NCCL_SOCKET_IFNAME": "eth0"}}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env=job))
    assert deployed(HttpSettings()).ray_actor_options["runtime_env"] == {
        "py_modules": ["gcs://a.zip"],
        "env_vars": {"A": "1", "NCCL_SOCKET_IFNAME": "eth1"},
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_replicas": 2}, "min_replicas needs max_replicas"),
        ({"num_replicas": 3, "max_replicas": 2}, "num_replicas = 3, max_replicas = 2"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas = 3"),
        ({"max_replicas": 2, "target_ongoing_requests": 0}, "target_ongoing_requests"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        http_settings(HttpSettings, given)
    assert said in str(caught.value)
