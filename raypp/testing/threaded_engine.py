"""A whole engine in the threads of one process, behind the real wire: what the APIs are tested with, without Ray.

Scheduler, driver, stages and every message are the real ones; only the processes are missing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import zmq

from raypp.config.engine_config import EngineConfig
from raypp.driver.engine_loop import ChannelPipeline, Engine
from raypp.driver.grammars import Grammars
from raypp.driver.server import DriverServer, OpenRequests, open_client_socket
from raypp.driver.stage_health import FailureReports, StageHealth, Witness
from raypp.errors import DeadlineError, RayppError, StageDiedError
from raypp.grammar.grammar_threads import GrammarThreads
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.scheduler.scheduler import Scheduler
from raypp.stage.build_stage import StageFactory
from raypp.stage.loop import run_stage_loop
from raypp.stage.stage import Stage
from raypp.step_channel import DriverChannel, StageChannel
from raypp.supervision.supervised_engine import SupervisedEngine
from raypp.supervision.supervisor import StartTimes
from raypp.testing.local_engine import LocalEncoder, build_members
from raypp.tracing import DRIVER_LANE, Tracer
from raypp.transport.edges import OpenEdge

_JOIN_TIMEOUT_S = 10.0
_RESTART_END_S = 30.0


class ThreadedLife:
    """A `Life` whose driver and stages are threads. `kill_stage` plays a stage's death."""

    def __init__(
        self, plan: EnginePlan, factory: StageFactory | None = None, open_edge: OpenEdge | None = None
    ) -> None:
        self._plan = plan
        self._open_edge = open_edge
        self._lock = threading.Lock()  # of the following two
        self._watcher: Callable[[RayppError], None] = lambda _: None
        self._death: RayppError | None = None
        self.start_times = StartTimes()  # not measured
        self._is_closed = False
        self._meeting_place = tempfile.mkdtemp(prefix="raypp-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.client_address = f"ipc://{self._meeting_place}/clients"
        self._clients = open_client_socket(self._context, self.client_address)
        num_stages, num_members, faults = len(plan.stages), plan.num_members, plan.config.faults
        addresses = [f"ipc://{self._meeting_place}/stage-{index}" for index in range(num_stages * num_members)]
        results = f"ipc://{self._meeting_place}/results"
        channel = DriverChannel(addresses, results, num_members=num_members, context=self._context)
        health = StageHealth(
            num_stages,
            num_members,
            step_timeout_s=faults.step_timeout_s,
            silence_timeout_s=faults.silence_timeout_s,
        )
        failures = FailureReports()
        predictor = plan.step_predictor()
        self._pipeline = ChannelPipeline(channel, health, failures, predictor, num_members)
        self.scheduler = Scheduler(plan.scheduler_limits(), plan.draft_policy(), predictor)
        """To look at once the engine is closed."""
        self._stages: list[Stage] = []
        self._is_leaving = threading.Event()  # the driver's stop does not reach a stage that has not connected yet
        try:
            loops, encoder = self._stage_loops(channel, factory)
            self._server = self._make_server(health, failures, encoder)
        except BaseException:  # with sockets that are open a process does not end
            self._close_pipeline()
            self._close_sockets()
            raise
        targets = [*loops, self._drive]
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def num_lost_nodes(self) -> int:
        """Return 0: it is on this machine."""
        return 0

    def watch(self, on_death: Callable[[RayppError], None]) -> None:
        """Call back, from another thread, when it dies; also if it has died already."""
        with self._lock:
            if self._death is None:
                self._watcher = on_death
                return
        threading.Thread(target=on_death, args=(self._death,), daemon=True).start()

    def kill_stage(self, stage_index: int) -> None:
        """Let the engine die as it does when a stage dies."""
        self._server.fail(StageDiedError(f"stage {stage_index} died", stage_index=stage_index), Witness.DEATH)

    def end(self) -> None:
        """End all threads."""
        if not self._is_closed:
            self._is_closed = True
            self._server.stop()
            for thread in self._threads:
                thread.join(_JOIN_TIMEOUT_S)
            if left := [thread.name for thread in self._threads if thread.is_alive()]:
                raise DeadlineError("threads of the engine do not end", got=", ".join(left))  # with sockets in use
            self._server.close()
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._clients.close()
        self._context.term()
        shutil.rmtree(self._meeting_place, ignore_errors=True)

    def _stage_loops(
        self, driver: DriverChannel, factory: StageFactory | None
    ) -> tuple[list[Callable[[], None]], LocalEncoder | None]:
        """Return what the stages' threads run, and the encoder, which works in the driver's thread."""
        plan, num_stages = self._plan, len(self._plan.stages)
        tracers = [Tracer(f"stage {index}", enabled=False) for index in range(num_stages)]
        deadline_s = plan.config.faults.step_timeout_s
        by_rank = build_members(
            plan,
            factory,
            member_deadline_s=deadline_s,
            deadline_s=deadline_s,
            open_edge=self._open_edge,
            tracers=tracers,
        )
        stages = self._stages = [member.stage for of_stage in zip(*by_rank, strict=True) for member in of_stage]
        graphs = [stage.graphs.describe() for stage in stages[:: plan.num_members]]
        self._pipeline.activity.note_graphs(graphs)

        def loop(index: int) -> Callable[[], None]:
            address, stage_index = driver.stage_addresses[index], index // plan.num_members
            channel = StageChannel(
                index, address, driver.result_address, num_stages=len(stages), num_members=plan.num_members
            )
            tracer = tracers[stage_index] if index % plan.num_members == 0 else Tracer("member", enabled=False)
            return lambda: _run_stage(plan, index, stages[index], channel, tracer, self._is_leaving)

        encoder = (
            LocalEncoder(plan, [stage.items for stage in stages[: plan.num_members]])
            if plan.encoders.num_encoders
            else None
        )
        return [loop(index) for index in range(len(stages))], encoder

    def _make_server(self, health: StageHealth, failures: FailureReports, encoder: LocalEncoder | None) -> DriverServer:
        config = self._plan.config
        tracer = Tracer(DRIVER_LANE, enabled=False)
        backend = GrammarThreads(self._plan.vocabulary_source())
        grammars = Grammars(backend, config.scheduler.grammar_compile_timeout_s, self._pipeline.send_masks)
        return DriverServer(
            Engine(self.scheduler, self._pipeline, tracer, encoder, grammars),
            self._pipeline,
            self._clients,
            health,
            failures,
            OpenRequests(
                max_bytes=config.scheduler.max_waiting_bytes, max_pixel_bytes=config.encoder.max_waiting_pixel_bytes
            ),
            heartbeat_s=config.faults.heartbeat_s,
        )

    def _drive(self) -> None:
        try:
            self._server.serve()
        except RayppError as error:
            with self._lock:
                self._death, watcher = error, self._watcher
            watcher(error)
        finally:
            self._is_leaving.set()
            self._close_pipeline()

    def _close_pipeline(self) -> None:
        self._pipeline.close()
        for stage in self._stages:
            stage.abort()


def _run_stage(
    plan: EnginePlan, index: int, stage: Stage, channel: StageChannel, tracer: Tracer, is_leaving: threading.Event
) -> None:
    has_last_words = False
    try:
        run_stage_loop(
            stage,
            channel,
            process_index=index,
            num_members=plan.num_members,
            heartbeat_s=plan.config.faults.heartbeat_s,
            silence_timeout_s=plan.config.faults.silence_timeout_s,
            forwards=tracer.forwards,
            is_leaving=is_leaving,
        )
    except RayppError:
        has_last_words = True
        return  # the driver knows: the links are aborted when the engine dies
    finally:
        channel.close(delivers=has_last_words)


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
        return {
            "driver": os.getpid(),
            "stages": [os.getpid()] * len(self._plan.stages) * self._plan.num_members,
            "encoders": [],
        }

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
