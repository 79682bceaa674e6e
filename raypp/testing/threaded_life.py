"""One life of an engine in the threads of one process; see `raypp.testing.threaded_engine`."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
import zmq

from raypp.driver.channel_pipeline import ChannelPipeline
from raypp.driver.engine_loop import Engine
from raypp.driver.failure_reports import FailureReports, Witness
from raypp.driver.grammars import Grammars
from raypp.driver.server import DriverServer, OpenRequests, open_client_socket
from raypp.driver.stage_health import StageHealth
from raypp.errors import DeadlineError, RayppError, StageDiedError
from raypp.grammar.grammar_threads import GrammarThreads
from raypp.plan.engine_plan import EnginePlan
from raypp.scheduler.scheduler import Scheduler
from raypp.stage.build_stage import StageFactory, allocate_kv_caches, build_stage_model
from raypp.stage.loop import run_stage_loop
from raypp.stage.schemas import StageSchemas
from raypp.stage.stage import Stage
from raypp.stage.step_sizes import StepSizes
from raypp.step_channel import DriverChannel, StageChannel
from raypp.supervision.recovery import StartTimes
from raypp.testing.local_encoder import LocalEncoder
from raypp.tracing import DRIVER_LANE, Tracer
from raypp.transport.edges import OpenEdge
from raypp.transport.open import open_local_links

_JOIN_TIMEOUT_S = 10.0


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
        self._is_closed = False
        self._meeting_place = tempfile.mkdtemp(prefix="raypp-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.client_address = f"ipc://{self._meeting_place}/clients"
        self._clients = open_client_socket(self._context, self.client_address)
        num_stages, faults = len(plan.stages), plan.config.faults
        addresses = [f"ipc://{self._meeting_place}/stage-{index}" for index in range(num_stages)]
        channel = DriverChannel(addresses, f"ipc://{self._meeting_place}/results", context=self._context)
        health = StageHealth(
            num_stages, step_timeout_s=faults.step_timeout_s, silence_timeout_s=faults.silence_timeout_s
        )
        failures = FailureReports()
        predictor = plan.step_predictor()
        self._pipeline = ChannelPipeline(channel, health, failures, predictor)
        self.scheduler = Scheduler(plan.scheduler_limits(), plan.draft_policy(), predictor)
        """To look at once the engine is closed."""
        self._links: list[Any] = []
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

    @property
    def start_times(self) -> StartTimes:
        """Nothing of it was measured."""
        return StartTimes()

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
        specs = [plan.stage_spec(index) for index in range(num_stages)]
        models = [build_stage_model(spec, plan.model, factory) for spec in specs]
        schemas = StageSchemas.of(specs[0], models[0].hidden_size)
        self._links = open_local_links(
            num_stages,
            forward=schemas.forward_messages(specs[0]),
            feedback=schemas.feedback_messages(specs[0]),
            device=torch.device(specs[0].device),
            deadline_s=plan.config.faults.step_timeout_s,
            open_edge=self._open_edge,
        )

        tracers = [Tracer(f"stage {index}", enabled=False) for index in range(num_stages)]
        stages = [
            Stage(spec, model, allocate_kv_caches(spec, plan.model), links, schemas, tracer)
            for spec, model, links, tracer in zip(specs, models, self._links, tracers, strict=True)
        ]
        sizes = StepSizes.common([stage.recordings.sizes for stage in stages])
        for stage in stages:
            stage.pad_to(sizes)
        self._pipeline.activity.note_recordings([stage.recordings.describe() for stage in stages])

        def loop(index: int) -> Callable[[], None]:
            address = driver.stage_addresses[index]
            channel = StageChannel(index, address, driver.result_address, num_stages=num_stages)
            return lambda: _run_stage(plan, index, stages[index], channel, tracers[index], self._is_leaving)

        encoder = LocalEncoder(plan, stages[0].items) if plan.encoders.num_encoders else None
        return [loop(index) for index in range(num_stages)], encoder

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
        for links in self._links:
            links.abort()


def _run_stage(
    plan: EnginePlan, index: int, stage: Stage, channel: StageChannel, tracer: Tracer, is_leaving: threading.Event
) -> None:
    has_last_words = False
    try:
        run_stage_loop(
            stage,
            channel,
            stage_index=index,
            heartbeat_s=plan.config.faults.heartbeat_s,
            silence_timeout_s=plan.config.faults.silence_timeout_s,
            forwards=tracer.forwards,
            is_leaving=is_leaving,
        )
    except RayppError:
        has_last_words = True
        return  # it told the driver, or the driver told it: the links are aborted when the engine dies
    finally:
        channel.close(delivers=has_last_words)
