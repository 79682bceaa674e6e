"""What `raypp serve` removes when it ends, and in which order."""

from __future__ import annotations

import logging
import threading

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


class FakeCluster:
    """A Ray that dies."""

    def __init__(self, *, is_useful: bool) -> None:
        self._is_useful = is_useful

    def is_useful(self) -> bool:
        return self._is_useful


def test_nobody_waits_for_a_ray_that_has_died() -> None:
    waiting = threading.Event()
    run._while_useful(FakeCluster(is_useful=False), waiting.wait)
    waiting.set()


def test_what_fails_while_ray_lives_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run._while_useful(FakeCluster(is_useful=True), lambda: 1 / 0)


def test_it_says_when_a_replica_is_replaced_and_when_it_serves_again(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    health = run._Health("raypp", lambda: now_s)
    for troubles in ({}, {"raypp": "a health check failed"}, {"raypp": ""}, {}, {}):
        health.look(RunningServe("127.0.0.1", 8000, {"raypp": "/"}, troubles))
        now_s += 4
    assert capsys.readouterr().err.splitlines() == [
        "raypp: a replica does not serve; Ray Serve replaces it",
        "raypp: serving again after 8 s",
    ]


def test_the_cause_of_a_failed_start_is_the_last_exception() -> None:
    said = "A replica failed. Error:\nTraceback:\n  x\nValueError: a\nraypp.errors.ModelLoadError: no model; got: b"
    assert run.cause_of(said) == "raypp.errors.ModelLoadError: no model; got: b"
    assert run.cause_of("Waiting for replicas") is None


def test_what_serve_says_of_each_start_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    running_serve.hide_noise()
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        logging.getLogger("ray.serve").info("Deleting app ['raypp']")
        logging.getLogger("ray.serve").info("Application 'raypp' is ready at http://localhost:8000/")
        logging.getLogger("ray.serve").info("Replica raypp is unhealthy")
    assert caplog.messages == ["Replica raypp is unhealthy"]


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
