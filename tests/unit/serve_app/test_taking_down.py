"""What `raypp serve` removes when it ends, and in which order."""

from __future__ import annotations

import pytest
from ray import serve

from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpSettings
from serve_app import run, running_serve
from serve_app.app import end_timeout_s
from serve_app.running_serve import RunningServe


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is done to Ray Serve, which has one application, "raypp", until that is deleted."""
    done: list[str] = []
    monkeypatch.setattr(RunningServe, "of_this_cluster", lambda: RunningServe("127.0.0.1", 8000, {"raypp": "/"}))
    monkeypatch.setattr(run, "delete_application", lambda name, timeout_s: done.append(f"{name} {timeout_s:g}"))
    monkeypatch.setattr(run, "end_serve", lambda: done.append("serve"))
    return done


def test_answers_end_while_serves_proxies_carry_them(calls: list[str]) -> None:
    run._take_down("raypp", started_serve=True, timeout_s=20)
    assert calls == ["raypp 30", "serve"], "Serve's end breaks off what is running"


def test_what_never_served_is_not_waited_for(calls: list[str]) -> None:
    run._take_down("raypp", started_serve=True, timeout_s=0)
    assert calls == ["serve"]


@pytest.mark.parametrize(("name", "started_serve"), [("raypp", False), ("second", True)])
def test_a_serve_that_others_use_stays(calls: list[str], name: str, started_serve: bool) -> None:
    run._take_down(name, started_serve=started_serve, timeout_s=20)
    assert calls == [f"{name} 30"]


def test_with_autoscaling_answers_have_longer() -> None:
    config = EngineConfig.from_flat("tiny", close_timeout_s=4.0)
    assert end_timeout_s(config, HttpSettings()) == 8
    assert end_timeout_s(config, HttpSettings(max_replicas=2, drain_timeout_s=60.0)) == 68


def test_an_application_that_does_not_end_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RunningServe, "of_this_cluster", lambda: RunningServe("127.0.0.1", 8000, {"raypp": "/"}))
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: None)
    running_serve.delete_application("raypp", 0.05)
    assert "raypp does not end within 0.05 s" in caplog.text
