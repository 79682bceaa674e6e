"""The stages of one engine, on the driver's side: gets them ready, has them run, and watches them.

They are the owner's, see `raypp.actors.stage_pool`: when a driver dies, they may serve the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray

from raypp.actors.deadline import Deadline, in_short, value_of
from raypp.actors.placement import Placement
from raypp.actors.processes import ActorProcess
from raypp.driver.stage_health import BLAME_S, FailureReports, Witness
from raypp.errors import DeadlineError, RayppError, StageDiedError, name_process
from raypp.plan.engine_plan import EnginePlan
from raypp.stage.failure import name_failure
from raypp.stage.step_sizes import StageGraphs, StepSizes
from raypp.tracing import TraceEvent

_WATCH_S = 0.5
_LAST_TRACE_SHARE = 0.5  # of the time to close that stages get to tell their trace; one that answers does so at once


class StageGroup:
    """All stage actors of an engine."""

    def __init__(self, plan: EnginePlan, placement: Placement, actors: Sequence[Any]) -> None:
        """Take over the actors of the stages' members, in order; their owner ends them."""
        self._placement = placement
        self._num_members = plan.num_members
        self._last_trace_s = plan.config.faults.close_timeout_s * _LAST_TRACE_SHARE
        self._start_timeout_s = plan.config.faults.start_timeout_s  # of which a deadline here is the rest
        self._actors = list(actors)
        self._runs: list[Any] = []
        self._is_ending = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def first(self) -> list[Any]:
        """The actors of the first stage's members, which encoders bring their embeddings to."""
        return self._actors[: self._num_members]

    def processes(self, owner: ActorProcess, deadline: Deadline) -> list[ActorProcess]:
        """Return the stages' processes, which end with their owner's; waits until they are there.

        Raises:
            StageDiedError, DeadlineError: one does not start.
        """
        return self._gather([actor.process.remote(owner) for actor in self._actors], "starting its process", deadline)

    def load(self, deadline: Deadline) -> Any:
        """Load the model; return where the stages meet, None for a single one.

        Raises:
            ModelLoadError, ResourceError, ConfigError: a stage cannot hold or read its part.
            StageDiedError, DeadlineError: one does not come through.
        """
        hosts = self._hosts()
        loading = [actor.prepare.remote(host) for actor, host in zip(self._actors, hosts, strict=True)]
        return self._gather(loading, "loading the model", deadline)[0]

    def connect(
        self,
        rendezvous: Any,
        plan_addresses: Sequence[str],
        result_address: str,
        server_key: bytes | None,
        deadline: Deadline,
    ) -> list[StageGraphs]:
        """Have the stages open their links and step channels, capture, and agree; return what each has captured.

        Raises:
            ConfigError, ResourceError, StageDiedError, DeadlineError: one does not come through.
        """
        connecting = [
            actor.connect.remote(
                deadline.remaining_s,
                own_host=host,
                rendezvous=rendezvous,
                plan_address=plan_address,
                result_address=result_address,
                server_key=server_key,
            )
            for actor, host, plan_address in zip(self._actors, self._hosts(), plan_addresses, strict=True)
        ]
        graphs: list[StageGraphs] = self._gather(connecting, "connecting to its neighbours", deadline)
        sizes = StepSizes.common([of_stage.sizes for of_stage in graphs])
        self._gather([actor.pad_to.remote(sizes) for actor in self._actors], "agreeing about sizes", deadline)
        return graphs

    def run(
        self, heartbeat_s: float, silence_timeout_s: float, on_failure: Callable[[RayppError, Witness], None]
    ) -> None:
        """Start the stages' loops, and watch them from a thread.

        Args:
            heartbeat_s: How often a stage sends a heartbeat to the driver.
            silence_timeout_s: How long a stage goes on without a message from the driver.
            on_failure: Called in that thread for every loop that ends with an error.
        """
        self._runs = [actor.run.remote(heartbeat_s, silence_timeout_s) for actor in self._actors]
        self._watcher = threading.Thread(target=self._watch, args=(on_failure,), name="stage-watcher", daemon=True)
        self._watcher.start()

    def await_end(self, timeout_s: float) -> None:
        """Wait for the loops to end, once the stages were told to stop."""
        ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout_s)

    def traces(self) -> list[list[TraceEvent] | None]:
        """Return what each stage did when; None for one that does not answer any more."""
        asked = [actor.trace.remote() for actor in self._actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=self._last_trace_s)
        return [value_of(ref) if ref in answered else None for ref in asked]

    def leave(self) -> None:
        """Watch the actors no longer."""
        self._is_ending.set()
        if self._watcher is not None:
            self._watcher.join()

    def _hosts(self) -> list[str]:
        places = self._placement.stages
        return [self._placement.host_of(place.node_id) for place in places for _ in range(self._num_members)]

    def _gather(self, refs: Sequence[Any], doing: str, deadline: Deadline) -> list[Any]:
        """Return what all stages answered, or raise the error of the stage that is the cause."""
        waiting, failures = list(refs), FailureReports()
        while waiting:
            timeout_s = deadline.remaining_s if failures.best is None else BLAME_S
            ended, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
            for ref in ended:
                if (failure := self._failure_of(refs.index(ref), ref, doing)) is not None:
                    failures.add(*failure)
            if (error := failures.verdict()) is not None:
                raise error
            if not ended and failures.best is None:
                late = ", ".join(name_process(refs.index(ref), self._num_members)[0] for ref in waiting)
                raise DeadlineError(
                    f"{late} took too long {doing}",
                    expected=f"all stages ready within start_timeout_s={self._start_timeout_s:g}",
                    hint="raise start_timeout_s if starting really takes that long",
                )
        if failures.best is not None:
            raise failures.best
        return list(ray.get(list(refs)))

    def _failure_of(self, index: int, ref: Any, doing: str) -> tuple[RayppError, Witness] | None:
        """Return the error of a call that has ended, and how well it is known; None when it ended well."""
        name, stage_index = name_process(index, self._num_members)
        try:
            ray.get(ref)
        except ray.exceptions.RayTaskError as failure:
            cause = failure.cause
            named, is_cause = name_failure(index, self._num_members, cause)
            # While it starts, an error keeps its class: a model that cannot be read is the user's affair, not a death.
            error = cause if isinstance(cause, RayppError) else named
            return error, Witness.OWN_FAILURE if is_cause else Witness.NEIGHBOUR
        except ray.exceptions.RayError as death:
            return StageDiedError(f"{name} died {doing}", stage_index=stage_index, got=in_short(death)), Witness.DEATH
        return None

    def _watch(self, on_failure: Callable[[RayppError, Witness], None]) -> None:
        running = list(self._runs)
        while running and not self._is_ending.is_set():
            ended, running = ray.wait(running, num_returns=1, timeout=_WATCH_S)
            for ref in ended:
                failure = self._failure_of(self._runs.index(ref), ref, "running")
                if failure is not None and not self._is_ending.is_set():
                    on_failure(*failure)
