"""How long Ray Serve may take to start, and what is said when it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError
from ray.serve._private import api, client, constants

from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpAddress, HttpSettings
from raypp.errors import EngineDeadError
from serve_app import run, running_serve
from serve_app.running_serve import RunningServe, serve_environment, start_serve, wait_for_proxies

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: ProxyActor
\tname: SERVE_PROXY_ACTOR-9ddf7da7099b4c9c
The actor is dead because it was killed by `ray.kill`."""


class FakeStop:
    """No signal comes."""

    received = None


@pytest.fixture(autouse=True)
def own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Serve's own limits for what runs after this test."""
    for module in (api, client):
        monkeypatch.setattr(module, "HTTP_PROXY_TIMEOUT", constants.HTTP_PROXY_TIMEOUT)


def check_start(start_serve: Callable[[], None]) -> None:
    start = partial(run._start, EngineConfig.from_flat("tiny"), HttpSettings(), HttpAddress(), FakeStop(), start_serve)
    starting = run._begun("start", start)
    assert starting.exception(30.0) is not None
    run._check_started(starting, "raypp")


@pytest.mark.parametrize(
    ("error", "got"),
    [
        (RayActorError(error_msg=DIED), "ProxyActor: The actor died unexpectedly"),
        (RayActorError(error_msg=DIED), "it was killed by `ray.kill`"),
        (TimeoutError("HTTP proxies not available after 60s."), "HTTP proxies not available after 60s."),
        (GetTimeoutError("Get timed out: some object(s) not ready."), "Get timed out"),
        (RuntimeError("Deploying application raypp failed"), "Deploying application raypp failed"),
    ],
)
def test_a_serve_that_does_not_start_is_one_error_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, error: Exception, got: str
) -> None:
    monkeypatch.setattr(RunningServe, "of_this_cluster", lambda: None)

    def fail() -> None:
        raise error

    with pytest.raises(EngineDeadError, match="Ray Serve could not deploy the application") as raised:
        check_start(fail)
    assert got in str(raised.value.got)
    assert "logs" in str(raised.value.hint)
    assert "start_timeout_s" in str(raised.value.hint)


@pytest.mark.parametrize("error", [EngineDeadError("of raypp"), KeyError("a fault of raypp")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        check_start(fail)
    assert raised.value is error


@pytest.mark.parametrize("timeout_s", [600.0, math.inf])
def test_serves_waits_for_its_proxies_are_as_long_as_a_start_may_take(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(serve, "start", lambda **options: given.update(options))
    start_serve("127.0.0.1", 8000, timeout_s=timeout_s)
    limits = {api.HTTP_PROXY_TIMEOUT, client.HTTP_PROXY_TIMEOUT}
    of_controller = given["controller_options"].runtime_env["env_vars"]["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"]
    for limit in (*limits, float(of_controller)):
        assert min(timeout_s, 1e9) <= limit < 2**63 / 1000, "Ray counts milliseconds"
    assert serve_environment(timeout_s)["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] == of_controller


def test_a_second_application_waits_as_long() -> None:
    wait_for_proxies(1234.5)
    assert client.HTTP_PROXY_TIMEOUT == 1235


def test_serve_reads_its_limit_from_the_environment() -> None:
    """Of another name it would be ignored without a word."""
    (name,) = serve_environment(600.0).keys() - running_serve.ENVIRONMENT.keys()
    source = constants.__file__
    assert source is not None
    with open(source) as file:
        assert f'"{name}", 5.0' in file.read()
