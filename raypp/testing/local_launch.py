"""An engine in a thread of the calling process: `LLM(..., launch=launch_in_thread)`. Real parts, no Ray; for tests."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from raypp.config.engine import EngineConfig
from raypp.driver.engine import Engine
from raypp.driver.engine_plan import EnginePlan, plan_engine
from raypp.driver.failure_reports import FailureReports
from raypp.driver.hardware import Hardware
from raypp.driver.server import DriverServer, open_client_socket
from raypp.driver.stage_health import StageHealth
from raypp.errors import RayppError
from raypp.messages import NO_STEP, StepPlan, StepResult
from raypp.scheduler.scheduler import Scheduler
from raypp.stage.build import StageFactory
from raypp.testing.local_engine import build_local_pipeline
from raypp.testing.local_pipeline import LocalPipeline
from raypp.tracing import Tracer


class ThreadEngine:
    """An `EngineHandle` whose driver and stages share a thread."""

    def __init__(self, plan: EnginePlan, factory: StageFactory | None) -> None:
        self._plan = plan
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        clients = open_client_socket(self._context, "tcp://127.0.0.1:*")
        clients.linger = 0
        self.client_address = clients.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.scheduler = Scheduler(plan.scheduler_limits())
        faults = plan.config.faults
        health = StageHealth(
            len(plan.stages), step_timeout_s=faults.step_timeout_s, silence_timeout_s=faults.silence_timeout_s
        )
        pipeline = _PolledPipeline(build_local_pipeline(plan, factory), self._context, health, len(plan.stages))
        engine = Engine(self.scheduler, pipeline, Tracer("local", enabled=False))
        self._server = DriverServer(
            engine,
            pipeline,  # type: ignore[arg-type]  # what the server needs of a ChannelPipeline
            clients,
            health,
            FailureReports(),
            heartbeat_s=faults.heartbeat_s,
        )
        self._watchers: list[Callable[[RayppError], None]] = []
        self._is_closed = False
        self._clients, self._pipeline = clients, pipeline
        self._thread = threading.Thread(target=self._serve, name="raypp-local-engine", daemon=True)
        self._thread.start()

    @property
    def model_info(self) -> Mapping[str, Any]:
        """Return what clients need to know of the model."""
        return {
            "vocab_size": self._plan.model.vocab_size,
            "max_model_len": self._plan.max_model_len,
            "eos_token_ids": sorted(self._plan.model.eos_token_ids),
            "model_path": self._plan.model_path,
        }

    def plan(self) -> dict[str, Any]:
        """Return layers, bytes and blocks per stage."""
        return self._plan.describe()

    def processes(self) -> dict[str, Any]:
        """Return this process's id, for the driver and for every stage."""
        return {"driver": os.getpid(), "stages": [os.getpid()] * len(self._plan.stages), "encoders": []}

    def watch(self, callback: Callable[[RayppError], None]) -> None:
        """Call back, from another thread, when the engine dies."""
        self._watchers.append(callback)

    def close(self) -> None:
        """Stop the thread."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.stop()
        self._thread.join()
        self._server.close()
        self._pipeline.close()
        self._clients.close()
        self._context.term()

    def _serve(self) -> None:
        try:
            self._server.serve()
        except RayppError as error:
            for callback in self._watchers:
                callback(error)


def launch_in_thread(config: EngineConfig, *, stage_factory: StageFactory | None = None) -> ThreadEngine:
    """Start an engine in a thread; a `Launch`."""
    return ThreadEngine(plan_engine(config, Hardware.of_this_machine()), stage_factory)


class _PolledPipeline:
    """A local pipeline with a socket that is readable while steps are in flight, as the server's poller wants it.

    Its stages run in the server's own turn: whenever that comes round, they are alive.
    """

    def __init__(
        self, pipeline: LocalPipeline, context: zmq.Context[zmq.Socket[bytes]], health: StageHealth, num_stages: int
    ) -> None:
        self._pipeline = pipeline
        self._health = health
        self._num_stages = num_stages
        self._last_step_id = NO_STEP
        self.socket = context.socket(zmq.PAIR)
        self.socket.bind("inproc://steps")
        self._signal = context.socket(zmq.PAIR)
        self._signal.connect("inproc://steps")

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan."""
        self._pipeline.submit(plan)
        self._signal.send(b"")

    def collect(self) -> list[StepResult]:
        """Execute the oldest plan and return its result."""
        results = self._pipeline.collect()
        for result in results:
            self.socket.recv()
            self._last_step_id = result.step_id
        for stage_index in range(self._num_stages):
            self._health.heard(stage_index, self._last_step_id)
        return results

    def send_heartbeat(self) -> None:
        """Nobody needs one."""

    def close(self) -> None:
        """Close the sockets."""
        self._pipeline.close()
        with contextlib.suppress(zmq.ZMQError):
            self.socket.close(linger=0)
            self._signal.close(linger=0)
