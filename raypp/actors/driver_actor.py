"""The Ray actor of the driver: starts the stages, runs the engine loop, watches the stages."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from raypp.actors.deadline import Deadline
from raypp.actors.encoder_group import EncoderGroup
from raypp.actors.placement import Placement
from raypp.actors.processes import ActorProcess, live_with
from raypp.actors.stage_group import StageGroup
from raypp.config.env import log_to_stderr
from raypp.driver.engine_loop import ChannelPipeline, Engine
from raypp.driver.grammars import Grammars
from raypp.driver.server import DriverServer, OpenRequests, open_client_socket, spare_the_collector
from raypp.driver.stage_health import FailureReports, StageHealth, Witness
from raypp.errors import EngineDeadError, name_process
from raypp.grammar.grammar_threads import GrammarThreads
from raypp.plan.engine_plan import EnginePlan
from raypp.scheduler.scheduler import Scheduler
from raypp.step_channel import DriverChannel
from raypp.supervision.supervisor import StartTimes
from raypp.tracing import DRIVER_LANE, Lane, Tracer


class DriverActor:
    """Hosts the engine. `run` is endless; the other methods answer beside it.

    Called in this order: `process`, `place`, `start`, `run`; `stop`, `trace` and those about encoders any time later.
    """

    def __init__(
        self,
        plan: EnginePlan,
        placement: Placement,
        meeting_place: str,
        *,
        may_be_replaced: bool = False,
    ) -> None:
        """Know what to make.

        Args:
            plan: Of the engine.
            placement: Where everything runs.
            meeting_place: A folder for socket files.
            may_be_replaced: Whether another engine is started when this one dies: then it dies with its last encoder.
                Otherwise text goes on without.
        """
        log_to_stderr()
        self._plan = plan
        self._placement = placement
        self._meeting_place = meeting_place
        self._may_be_replaced = may_be_replaced
        self._tracer = Tracer(DRIVER_LANE, enabled=plan.config.observability.trace is not None)
        self._last_lanes: list[Lane] | None = None
        self._asking = threading.Lock()  # no stage is killed while it is asked for its trace

    def process(self, owner: ActorProcess) -> ActorProcess:
        """Return this process, which from now on ends with its owner's."""
        return live_with(owner)

    def place(self, stages: Sequence[Any], owner: ActorProcess, timeout_s: float) -> list[ActorProcess]:
        """Wait for the stages' processes, and return them; start those of encoders, too.

        Args:
            stages: Their actors, by index.
            owner: The process that made them.
            timeout_s: For all of it.

        Raises:
            StageDiedError, EngineDeadError, DeadlineError: one does not start.
        """
        self._stages = StageGroup(self._plan, self._placement, stages)
        self._encoders: EncoderGroup | None = None
        if self._plan.encoders.num_encoders:
            self._encoders = EncoderGroup(
                self._plan, self._placement, self._stages.first, lambda: self._server.wake(), self._on_encoders_end
            )
        deadline = Deadline(timeout_s)
        processes = self._stages.processes(owner, deadline)
        if self._encoders is not None:
            self._encoders.start(deadline)
        return processes

    def start(self, timeout_s: float) -> tuple[str, StartTimes]:
        """Get the stages ready; return the zmq address for clients, and how long it took.

        Raises:
            ModelLoadError, ConfigError, ResourceError, DeadlineError, StageDiedError: a stage cannot start.
            EngineDeadError: an encoder cannot.
        """
        deadline = Deadline(timeout_s)
        faults = self._plan.config.faults
        num_stages = len(self._plan.stages)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client_address = f"ipc://{self._meeting_place}/clients"
        self._clients = open_client_socket(self._context, client_address)

        num_members = self._plan.num_members
        channel = self._open_step_channel(num_stages * num_members)
        if self._encoders is not None:
            self._encoders.load()  # while the stages load
        grammars = GrammarThreads(self._plan.vocabulary_source())  # at the same time
        begun_s = time.monotonic()
        rendezvous = self._stages.load(deadline)
        loaded_s = time.monotonic()
        graphs = self._stages.connect(
            rendezvous, channel.stage_addresses, channel.result_address, channel.server_key, deadline
        )
        if self._encoders is not None:
            self._encoders.join(deadline)
        times = StartTimes(weights_s=loaded_s - begun_s, links_and_graphs_s=time.monotonic() - loaded_s)
        failures = FailureReports()
        health = StageHealth(
            num_stages,
            num_members,
            step_timeout_s=faults.step_timeout_s,
            silence_timeout_s=faults.silence_timeout_s,
        )
        predictor = self._plan.step_predictor()
        self._pipeline = ChannelPipeline(channel, health, failures, predictor, num_members)
        self._pipeline.activity.note_graphs([of_stage.describe() for of_stage in graphs[::num_members]])
        scheduler = Scheduler(self._plan.scheduler_limits(), self._plan.draft_policy(), predictor)
        self._server = DriverServer(
            Engine(
                scheduler,
                self._pipeline,
                self._tracer,
                self._encoders,
                Grammars(grammars, self._plan.config.scheduler.grammar_compile_timeout_s, self._pipeline.send_masks),
            ),
            self._pipeline,
            self._clients,
            health,
            failures,
            OpenRequests(
                max_bytes=self._plan.config.scheduler.max_waiting_bytes,
                max_pixel_bytes=self._plan.config.encoder.max_waiting_pixel_bytes,
            ),
            heartbeat_s=faults.heartbeat_s,
            on_connected=self._forget_meeting_place,
        )
        return client_address, times

    def run(self) -> None:
        """Serve until `stop`, then end the stages.

        Raises:
            EngineDeadError, StageDiedError: the pipeline failed.
        """
        faults = self._plan.config.faults
        self._stages.run(faults.heartbeat_s, faults.silence_timeout_s, self._server.fail)
        spare_the_collector()
        try:
            self._server.serve()
            self._pipeline.close()
            self._stages.await_end(faults.close_timeout_s)
        finally:
            with self._asking:
                if self._tracer.enabled:
                    self._last_lanes = self._lanes()
            if self._encoders is not None:
                self._encoders.kill()
            self._stages.leave()
            self._clients.close()
            self._server.close()
            self._forget_meeting_place()

    def stop(self) -> None:
        """Make `run` return soon."""
        self._server.stop()

    def encoder_processes(self) -> list[ActorProcess]:
        """Return the encoders' processes of this moment: they may be started again."""
        return [] if self._encoders is None else self._encoders.processes()

    def encoder_actors(self) -> list[Any]:
        """Return the encoder actors, for clients that have images encoded without a request."""
        return [] if self._encoders is None else self._encoders.actors

    def trace(self) -> list[Lane]:
        """Return what the driver and the stages did when; after `run`, what they had done until then."""
        with self._asking:
            return self._last_lanes or self._lanes()

    def _on_encoders_end(self, reason: str) -> None:
        if self._may_be_replaced:
            self._server.fail(EngineDeadError("all encoders of images have died", got=reason), Witness.DEATH)

    def _lanes(self) -> list[Lane]:
        stages, members = enumerate(self._stages.traces()), self._plan.num_members
        return [
            Lane(DRIVER_LANE, self._tracer.events()),
            *(Lane(name_process(index, members)[0], events) for index, events in stages if events is not None),
        ]

    def _open_step_channel(self, num_processes: int) -> DriverChannel:
        options: dict[str, Any] = {"num_members": self._plan.num_members, "context": self._context}
        if self._placement.is_on_one_node:
            folder = f"ipc://{self._meeting_place}"
            addresses = [f"{folder}/stage-{index}" for index in range(num_processes)]
            return DriverChannel(addresses, f"{folder}/results", **options)
        anywhere = f"tcp://{self._placement.host_of(self._placement.driver_node_id)}:*"
        return DriverChannel([anywhere] * num_processes, anywhere, encrypted=True, **options)

    def _forget_meeting_place(self) -> None:
        """Remove the socket files: everyone is connected."""
        shutil.rmtree(self._meeting_place, ignore_errors=True)
