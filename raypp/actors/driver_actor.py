"""The Ray actor of the driver: makes the stages, hosts the engine loop, watches the stages.

The stages are its children: when this process dies, Ray ends them.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
import zmq
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypp.actors.remote_errors import first_line, raypp_errors
from raypp.actors.stage_actor import StageActor
from raypp.driver.channel_pipeline import ChannelPipeline
from raypp.driver.engine import Engine
from raypp.driver.engine_plan import EnginePlan
from raypp.driver.server import HEARTBEAT_S, DriverServer
from raypp.errors import RayppError, StageDiedError
from raypp.scheduler.scheduler import Scheduler
from raypp.tracing import DRIVER_LANE, Lane, Tracer
from raypp.transport.step_channel import DriverChannel

if TYPE_CHECKING:
    from raypp.stage.build import StageFactory

_BLAME_S = 0.2  # neighbours of a dead stage fail too, a moment later or earlier: wait this long to name the right one


class DriverActor:
    """Hosts the engine. `run` is endless; the other methods answer beside it."""

    def __init__(self, plan: EnginePlan, factory: StageFactory | None, meeting_place: str) -> None:
        self._plan = plan
        self._factory = factory
        self._meeting_place = meeting_place  # a folder for socket files
        self._tracer = Tracer(DRIVER_LANE, enabled=plan.config.observability.trace is not None)

    def start(self, group: PlacementGroup) -> dict[str, Any]:
        """Start the stages; return {"client_address": zmq address, "processes": {"driver": pid, "stages": [pid, ...]}}.

        Raises:
            ModelLoadError, ConfigError, DeadlineError, StageDiedError: a stage cannot start.
        """
        timeout_s = self._plan.config.faults.start_timeout_s
        num_stages = len(self._plan.stages)
        self._context = zmq.Context()
        clients = self._context.socket(zmq.ROUTER)
        clients.setsockopt(zmq.LINGER, 1000)
        clients.setsockopt(zmq.SNDHWM, 0)  # a slow client is no reason to lose what it asked for
        clients.setsockopt(zmq.RCVHWM, 0)
        client_address = f"ipc://{self._meeting_place}/clients"
        clients.bind(client_address)

        plan_addresses = [f"ipc://{self._meeting_place}/stage-{index}" for index in range(num_stages)]
        result_address = f"ipc://{self._meeting_place}/results"
        channel = DriverChannel(plan_addresses, result_address, context=self._context)

        self._stages = [self._make_stage(index, group) for index in range(num_stages)]
        with raypp_errors():
            rendezvous = ray.get([stage.prepare.remote() for stage in self._stages], timeout=timeout_s)[0]
            pids = ray.get(
                [
                    stage.connect.remote(rendezvous, address, result_address)
                    for stage, address in zip(self._stages, plan_addresses, strict=True)
                ],
                timeout=timeout_s,
            )
        pipeline = ChannelPipeline(channel, num_stages)
        engine = Engine(Scheduler(self._plan.scheduler_limits()), pipeline, self._tracer)
        self._pipeline = pipeline
        self._server = DriverServer(
            engine,
            pipeline,
            clients,
            step_timeout_s=self._plan.config.faults.step_timeout_s,
            on_connected=self._forget_meeting_place,
        )
        self._clients = clients
        return {"client_address": client_address, "processes": {"driver": os.getpid(), "stages": pids}}

    def _forget_meeting_place(self) -> None:
        """Remove the socket files: everyone is connected."""
        shutil.rmtree(self._meeting_place, ignore_errors=True)

    def run(self) -> None:
        """Serve until `stop`, then end the stages.

        Raises:
            EngineDeadError, StageDiedError: the pipeline failed.
        """
        silence_timeout_s = max(self._plan.config.faults.step_timeout_s, 10 * HEARTBEAT_S)
        runs = [stage.run.remote(HEARTBEAT_S, silence_timeout_s) for stage in self._stages]
        watcher = threading.Thread(target=self._watch, args=(runs,), name="stage-watcher", daemon=True)
        watcher.start()
        try:
            self._server.serve()
            self._pipeline.close()
            ray.wait(runs, num_returns=len(runs), timeout=self._plan.config.faults.close_timeout_s)
        finally:
            for stage in self._stages:
                ray.kill(stage)
            watcher.join()
            self._clients.close()
            self._server.close()
            self._forget_meeting_place()

    def stop(self) -> None:
        """Make `run` return soon."""
        self._server.stop()

    def trace(self) -> list[Lane]:
        """Return what the driver and the stages did when."""
        timeout_s = self._plan.config.faults.close_timeout_s
        events = ray.get([stage.trace.remote() for stage in self._stages], timeout=timeout_s)
        return [
            Lane(DRIVER_LANE, self._tracer.events()),
            *(Lane(f"stage {index}", of_stage) for index, of_stage in enumerate(events)),
        ]

    def _make_stage(self, stage_index: int, group: PlacementGroup) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=1 + stage_index)
        resources = self._plan.stage_resources()
        options: dict[str, Any] = {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": strategy,
            "max_concurrency": 3,  # run, trace, and one to spare
            "max_restarts": 0,
        }
        if "GPU" in resources:  # stages see all GPUs of their node: each maps its neighbours' memory
            options["runtime_env"] = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        remote = ray.remote(StageActor).options(**options)
        return remote.remote(self._plan.stage_spec(stage_index), self._plan.model, self._factory)

    def _watch(self, runs: Sequence[Any]) -> None:
        """Report the first stage whose run ends with an error, until all have ended."""
        running = list(runs)
        while running:
            ended, running = ray.wait(running, num_returns=1, timeout=1.0)
            if ended and (error := self._failure_of(runs, ended[0])) is not None:
                self._server.fail(error)
                return

    def _failure_of(self, runs: Sequence[Any], ended: Any) -> RayppError | None:
        error = _run_error(runs.index(ended), ended)
        if error is None:
            return None
        others = [run for run in runs if run is not ended]
        if error.died or not others:
            return error.error
        also_ended, _ = ray.wait(others, num_returns=len(others), timeout=_BLAME_S)
        for run in also_ended:
            other = _run_error(runs.index(run), run)
            if other is not None and other.died:
                return other.error
        return error.error


class _RunError:
    def __init__(self, error: RayppError, *, died: bool) -> None:
        self.error = error
        self.died = died


def _run_error(stage_index: int, run: Any) -> _RunError | None:
    try:
        ray.get(run)
    except ray.exceptions.RayTaskError as failure:
        cause = failure.cause
        if isinstance(cause, StageDiedError):  # it noticed a neighbour's end
            return _RunError(cause, died=False)
        return _RunError(
            StageDiedError(f"stage {stage_index} failed", stage_index=stage_index, got=str(cause)), died=False
        )
    except ray.exceptions.RayError as death:
        return _RunError(
            StageDiedError(f"stage {stage_index} died", stage_index=stage_index, got=first_line(death)), died=True
        )
    return None
