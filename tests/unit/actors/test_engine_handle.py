"""Closing an engine's handle, while a thread of it asks Ray for the driver."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raypp.actors import engine_actors, engine_life, stage_pool
from raypp.actors.cluster import Cluster
from raypp.actors.deadline import Deadline
from raypp.actors.engine_actors import EngineHandle
from raypp.actors.engine_life import EngineLife
from raypp.actors.stage_pool import StagePool
from raypp.config.engine_config import EngineConfig
from raypp.errors import ResourceError
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware

WAIT_S = 20.0


class SlowRay:
    """A Ray that is being asked whether the driver runs, until the test lets it answer."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.exceptions = SimpleNamespace(RayError=Exception)

    def is_initialized(self) -> bool:
        return True

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.asked.set()
        assert self.may_answer.wait(WAIT_S)
        return [], refs


def test_ray_is_left_only_when_nobody_asks_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.wait` without a Ray starts one."""
    ray, left = SlowRay(), threading.Event()
    monkeypatch.setattr(engine_life, "ray", ray)
    for module in (engine_life, stage_pool):
        monkeypatch.setattr(module, "end_processes", lambda *_: None)
    plan = plan_engine(EngineConfig.from_flat("tiny", num_stages=2), Hardware(4))
    cluster = cast(Cluster, SimpleNamespace(disconnect=left.set, death=lambda: None, is_useful=lambda: True))
    pool = StagePool(None)
    handle = EngineHandle(plan, Hardware(4), cluster, pool, EngineLife(plan, cluster, pool))
    assert ray.asked.wait(WAIT_S)
    closer = threading.Thread(target=handle.close)
    closer.start()
    assert not left.wait(0.2)
    ray.may_answer.set()
    assert left.wait(WAIT_S)
    closer.join(WAIT_S)


def test_a_restart_plans_for_the_gpus_that_there_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may have smaller ones; while there are none, the plan stays, and room is waited for."""
    ray = SlowRay()
    ray.may_answer.set()
    monkeypatch.setattr(engine_life, "ray", ray)
    for module in (engine_life, stage_pool):
        monkeypatch.setattr(module, "end_processes", lambda *_: None)
    large, small = (Hardware(16, num_gpus=2, gpu_memory_bytes=gib << 30) for gib in (80, 24))
    there = [large]
    monkeypatch.setattr(engine_actors, "may_be_elsewhere", lambda *_: True)
    monkeypatch.setattr(engine_actors, "hardware_of_stages", lambda *_: there[0])
    plan = plan_engine(EngineConfig.from_flat("tiny", num_stages=2), large)
    cluster = cast(Cluster, SimpleNamespace(disconnect=lambda: None, death=lambda: None, is_useful=lambda: True))
    pool = StagePool(None)
    handle = EngineHandle(plan, large, cluster, pool, EngineLife(plan, cluster, pool))
    try:
        assert handle._plan_anew(Deadline(WAIT_S)) is None
        there[0] = Hardware(4)
        assert handle._plan_anew(Deadline(WAIT_S)) is None
        there[0] = small
        anew = handle._plan_anew(Deadline(WAIT_S))
        assert anew is not None
        assert anew.num_blocks < plan.num_blocks
        assert handle.plan() == anew.describe()
    finally:
        handle.close()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_cpus_beside_gpus_without_their_packages_are_said(
    is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also before an engine that does not fit the CPUs' memory."""
    machine = Hardware(4, memory_bytes=1 << 20, num_unusable_gpus=2)
    monkeypatch.setattr(Hardware, "of_this_machine", lambda: machine)
    monkeypatch.setattr(engine_actors, "may_be_elsewhere", lambda *_: is_elsewhere)
    monkeypatch.setattr(engine_actors, "hardware_of_stages", lambda *_: machine)
    monkeypatch.setattr(Cluster, "connect", lambda: SimpleNamespace(disconnect=lambda: None))
    with pytest.raises(ResourceError):
        engine_actors.connect_and_plan(EngineConfig.from_flat("tiny"), Deadline(WAIT_S))
    assert "stages compute on CPUs: this machine has GPUs (2)" in caplog.text
    caplog.clear()
    with pytest.raises(ResourceError):
        engine_actors.connect_and_plan(EngineConfig.from_flat("tiny", device="cpu"), Deadline(WAIT_S))
    assert not caplog.text
