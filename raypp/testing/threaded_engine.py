"""A whole engine in the threads of one process, behind the real wire: what the APIs are tested with, without Ray.

Scheduler, driver, stages and every message are the real ones; only the processes are missing.
"""

from __future__ import annotations

import os
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.errors import DeadlineError
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.scheduler.scheduler import Scheduler
from raypp.stage.build_stage import StageFactory
from raypp.supervision.supervised_engine import SupervisedEngine
from raypp.testing.threaded_life import ThreadedLife
from raypp.transport.edges import OpenEdge

_RESTART_END_S = 30.0


def launch_in_threads(
    config: EngineConfig, *, stage_factory: StageFactory | None = None, open_edge: OpenEdge | None = None
) -> ThreadedEngine:
    """Start an engine in this process; a `Launch`: `LLM("tiny", launch=launch_in_threads)`.

    Args:
        config: Of the engine.
        stage_factory: Makes a stage in place of the model's own.
        open_edge: Joins two stages in place of local links; `functools.partial` passes it.
    """
    return ThreadedEngine(plan_engine(config, Hardware.of_this_machine()), stage_factory, open_edge)


class ThreadedEngine(SupervisedEngine[ThreadedLife]):
    """An `EngineHandle` whose driver and stages are threads; it is started again as the real one is.

    `kill_stage` plays a stage's death.
    """

    def __init__(
        self, plan: EnginePlan, factory: StageFactory | None = None, open_edge: OpenEdge | None = None
    ) -> None:
        self._factory = factory
        self._open_edge = open_edge
        super().__init__(plan, ThreadedLife(plan, factory, open_edge))

    @property
    def scheduler(self) -> Scheduler:
        """The present life's, to look at once the engine is closed."""
        return self._supervisor.life.scheduler

    def processes(self) -> dict[str, Any]:
        """Return this process's id, for the driver and for every stage."""
        return {"driver": os.getpid(), "stages": [os.getpid()] * len(self._plan.stages), "encoders": []}

    def encoder_actors(self) -> list[Any]:
        """Return nothing: there are no actors."""
        return []

    def kill_stage(self, stage_index: int) -> None:
        """Let the engine die as it does when a stage dies."""
        self._supervisor.life.kill_stage(stage_index)

    def close(self) -> None:
        """End all threads."""
        if not self._supervisor.stop(_RESTART_END_S):
            raise DeadlineError("the engine's restart does not end", expected=f"its end within {_RESTART_END_S:g} s")
        self._supervisor.life.end()

    def _make_plan(self, config: EngineConfig) -> EnginePlan:
        return plan_engine(config, Hardware.of_this_machine())

    def _start_life(self) -> ThreadedLife:
        return ThreadedLife(self._plan, self._factory, self._open_edge)
