"""A stage stands by when its driver is gone, and begins anew with the weights that it has."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from raypp.actors import stage_actor
from raypp.actors.stage_actor import StageActor
from raypp.config.engine_config import EngineConfig
from raypp.errors import EngineDeadError
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage import build_stage
from raypp.stage import loop as stage_loop

WAIT_S = 20.0
ADDRESSES = dict[str, Any](own_host="", rendezvous=None, plan_address="", result_address="", server_key=None)


class FakeStage:
    graphs = None

    def __init__(self) -> None:
        self.is_aborted, self.is_closed = threading.Event(), False

    def abort(self) -> None:
        self.is_aborted.set()

    def close(self) -> None:
        self.is_closed = True


class World:
    """What stands in the place of models, stages and their loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_models = 0
        self.stages: list[FakeStage] = []
        self.is_running = threading.Event()
        self.loop_error: Exception | None = None
        self.delivered: list[bool] = []  # of each channel that was closed, whether last messages got time to leave
        self.hangs = False
        self.num_connected = 0
        monkeypatch.setattr(stage_actor, "log_to_stderr", lambda: None)
        monkeypatch.setattr(build_stage, "configure_torch", lambda *_: None)
        monkeypatch.setattr(build_stage, "build_stage_model", self._model)
        monkeypatch.setattr(build_stage, "build_stage", self._stage)
        monkeypatch.setattr(stage_loop, "run_stage_loop", self._loop)
        channel = SimpleNamespace(close=self._close, await_driver=self._await_driver)
        monkeypatch.setattr("raypp.step_channel.StageChannel", lambda *_, **__: channel)
        plan = plan_engine(EngineConfig.from_flat("tiny", num_stages=1), Hardware(4))
        self.actor = StageActor(plan.stage_spec(0), plan.model, None)

    def begin(self) -> threading.Thread:
        """Start a life as a driver does; return the thread of its loop, which runs."""
        self.actor.prepare("127.0.0.1")
        self.actor.connect(WAIT_S, **ADDRESSES)
        self.is_running.clear()
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        assert self.is_running.wait(WAIT_S)
        return thread

    def _run(self) -> None:
        with contextlib.suppress(EngineDeadError, ValueError):
            self.actor.run(0.1, 1.0)

    def _close(self, *, delivers: bool) -> None:
        self.delivered.append(delivers)

    def _await_driver(self, timeout_s: float) -> None:
        assert 0 < timeout_s <= WAIT_S
        self.num_connected += 1

    def _model(self, *_: object) -> object:
        self.num_models += 1
        return SimpleNamespace()

    def _stage(self, *_: object, **__: object) -> FakeStage:
        self.stages.append(FakeStage())
        return self.stages[-1]

    def _loop(self, stage: FakeStage, *_: object, is_leaving: threading.Event, **__: Any) -> None:
        self.is_running.set()
        if self.loop_error is not None:
            raise self.loop_error
        assert is_leaving.wait(WAIT_S)
        if self.hangs:
            threading.Event().wait(2.0)
        assert stage.is_aborted.wait(WAIT_S), "else a wait for a neighbour would not end"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_it_keeps_its_weights_and_nothing_else(world: World) -> None:
    for life in range(1, 4):
        thread = world.begin()
        assert world.actor.stand_by(WAIT_S)
        thread.join(WAIT_S)
        assert (world.num_models, len(world.stages)) == (1, life)
        assert world.num_connected == life, "a driver that is ready removes the files that sockets connect by"
        assert world.stages[-1].is_closed
    assert world.delivered == [False] * 3, "nobody is there who could take it"
    world.actor.run(0.1, 1.0)  # of a driver that is gone
    assert not world.is_running.wait(0.0) or not world.actor._connected


def test_it_stands_by_before_its_loop_began(world: World) -> None:
    world.actor.prepare("127.0.0.1")
    world.actor.connect(WAIT_S, **ADDRESSES)
    assert world.actor.stand_by(WAIT_S)
    assert world.stages[0].is_closed
    world.actor.run(0.1, 1.0)
    assert not world.is_running.is_set()


def test_a_neighbours_death_is_not_its_own(world: World) -> None:
    world.loop_error = EngineDeadError("stage 1 is gone")
    world.begin().join(WAIT_S)
    assert world.actor.stand_by(WAIT_S)
    assert world.delivered == [True], "the driver wants to know"


def test_who_failed_or_does_not_end_or_is_in_the_middle_is_not_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not world.actor.stand_by(0.1), "it has no weights"
    world.hangs = True
    world.begin()
    assert not world.actor.stand_by(0.1)

    failing = World(monkeypatch)
    failing.loop_error = ValueError("a step failed")
    failing.begin().join(WAIT_S)
    assert not failing.actor.stand_by(WAIT_S)

    connecting = World(monkeypatch)
    connecting.actor.prepare("127.0.0.1")

    def never(*_: object, **__: object) -> None:
        raise EngineDeadError("a neighbour did not come")

    monkeypatch.setattr(build_stage, "build_stage", never)
    with pytest.raises(EngineDeadError):
        connecting.actor.connect(WAIT_S, **ADDRESSES)
    assert not connecting.actor.stand_by(WAIT_S)
