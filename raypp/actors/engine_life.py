"""One life of an engine on Ray: starts its actors, notices when they die, and leaves none of them behind."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.actors.cluster import Cluster
from raypp.actors.deadline import Deadline, raypp_errors
from raypp.actors.driver_actor import DriverActor
from raypp.actors.placement import Placement, actor_environment, alive_nodes, reserve, reserve_when_there_is_room
from raypp.actors.processes import ActorProcess, StoppedProcesses, end_here, end_processes
from raypp.actors.stage_pool import StagePool
from raypp.errors import EngineDeadError, RayppError, StageDiedError, name_process
from raypp.plan.engine_plan import EnginePlan
from raypp.supervision.supervisor import StartTimes
from raypp.tracing import write_chrome_trace

_ANSWER_S = 2.0
_WATCH_S = 1.0
_POLL_S = 0.1
_NOTED_S = 60.0
_SLOW_START = (
    "the engine has been starting for {:.0f} s, and may for {:.0f} more (start_timeout_s): stages read weights, and "
    "compile what no start on this machine has compiled yet; `raypp compile MODEL` does that before"
)
_STAND_BY_S = 2.0  # for a stage's loop and device to end what they are at
_PATIENCE_S = 0.5  # for processes to go when Ray ends them at once
_LAST_TRACE_S = 2.0  # of a life that has died; all requests wait meanwhile

logger = logging.getLogger(__name__)


class EngineLife:
    """The actors of an engine, from one start to their end; a `raypp.supervision.supervisor.Life`.

    Attributes:
        client_address: The driver's zmq address for clients, once it has started.
    """

    client_address: str

    def __init__(
        self,
        plan: EnginePlan,
        cluster: Cluster,
        pool: StagePool,
        is_wanted: Callable[[], bool] = lambda: True,
        number: int = 1,
        *,
        may_be_last: bool = True,
    ) -> None:
        """Know what to start.

        Args:
            plan: Of the engine.
            cluster: Where it runs.
            pool: Makes its stages, and keeps them for the next one.
            is_wanted: Called repeatedly while it starts. Once it returns False, the start ends with EngineDeadError.
            number: Which of the engine's lives it is.
            may_be_last: Whether no other one will follow.
        """
        self._plan = plan
        self._cluster = cluster
        self._pool = pool
        self._is_wanted = is_wanted
        self._number = number
        self._may_be_last = may_be_last
        self._placement: Placement | None = None
        self._driver: Any = None
        self._run: Any = None
        # Only until all have connected: sockets stay connected when their files are gone; see docs/design/0004.
        self._meeting_place = tempfile.mkdtemp(prefix="raypp-")
        self._driver_process: ActorProcess | None = None
        self._stage_processes: list[ActorProcess] = []  # as they were at the start
        self._encoder_processes: list[ActorProcess] = []
        self._stopped: StoppedProcesses | None = None  # once there are processes
        self.start_times = StartTimes()
        self._watchers: list[threading.Thread] = []
        self._ending = threading.Event()
        self._end_lock = threading.Lock()

    def start(self, deadline: Deadline) -> None:
        """Place and start the actors; return when all stages are ready. If that fails, what there is must be ended.

        Raises:
            ConfigError, ModelLoadError, ResourceError, DeadlineError, EngineDeadError: it cannot start.
        """
        self._place(deadline, partial(reserve, deadline=deadline))
        self._start_actors(deadline)

    def start_again(self, deadline: Deadline, plan_anew: Callable[[Deadline], EnginePlan | None]) -> None:
        """Do the same where an engine ran before. Waits `restart_wait_s` for room, for nodes to come back, too.

        Args:
            deadline: For all of it.
            plan_anew: Returns the plan for what the nodes have now; None: the plan holds.
        """
        room = Deadline(min(self._plan.config.faults.restart_wait_s, deadline.remaining_s))
        self._place(deadline, partial(reserve_when_there_is_room, deadline=room))
        self._plan = plan_anew(deadline) or self._plan
        self._start_actors(deadline)

    def _place(self, deadline: Deadline, reserve_bundles: Callable[..., Placement]) -> None:
        plan = self._plan
        num_stages, num_encoders = len(plan.stages), plan.encoders.num_encoders
        bundles = [plan.stage_resources()] * num_stages + [plan.encoders.resources] * num_encoders
        if (kept := self._pool.placement_of(bundles)) is not None:
            self._placement = kept
            return
        with raypp_errors(f"start_timeout_s={deadline.seconds:g}"):
            self._check()
            self._placement = reserve_bundles(bundles, num_stages, plan.config.parallel.placement, check=self._check)
        self._pool.place(self._placement, bundles)

    def _start_actors(self, deadline: Deadline) -> None:
        self._placement = self._pool.make(self._plan)
        self._driver = (
            ray.remote(DriverActor)
            .options(
                num_cpus=0,
                # On this node, whose sockets and folders the client shares.
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._placement.driver_node_id, soft=False),
                max_concurrency=6,  # run, and stop, trace and questions about encoders beside it
                max_restarts=0,
                **actor_environment(),
            )
            .remote(
                self._plan,
                self._placement,
                self._meeting_place,
                may_be_replaced=not self._may_be_last,
            )
        )
        owner = ActorProcess.of_this_process()
        self._stopped = StoppedProcesses(owner.node_id, self._plan.config.faults.silence_timeout_s)
        self._driver_process = self._ask("process", deadline, owner)
        self._stage_processes = self._ask("place", deadline, self._pool.actors, owner, deadline.remaining_s)
        self._pool.note_processes(self._stage_processes)
        self._encoder_processes = self._ask("encoder_processes", deadline)
        self.client_address, times = self._ask("start", deadline, deadline.remaining_s)
        self.start_times = replace(times, num_kept_stages=self._pool.num_kept)
        self._run = self._driver.run.remote()

    def watch(self, on_death: Callable[[RayppError], None]) -> None:
        """Call back, from another thread, when the driver, or the Ray that it runs on, ends without being told to."""

        def watch() -> None:
            while not self._ending.is_set():
                ended, _ = ray.wait([self._run], timeout=_WATCH_S)
                if not self._ending.is_set() and (error := self._death(bool(ended))) is not None:
                    on_death(error)
                    return

        watcher = threading.Thread(target=watch, name="driver-watcher", daemon=True)
        self._watchers.append(watcher)
        watcher.start()

    def processes(self) -> dict[str, Any]:
        """Return {"driver": pid, "stages": [pid, ...], "encoders": [...]}."""
        assert self._driver_process is not None, "the engine was not started"
        return {
            "driver": self._driver_process.pid,
            "stages": [process.pid for process in self._stage_processes],
            "encoders": [process.pid for process in self._current_encoders()],
        }

    def num_lost_nodes(self) -> int:
        """Return how many of the nodes that it was started on are gone by now."""
        if self._placement is None or not self._cluster.is_useful():
            return 0
        return len(self._placement.node_ids - {node.node_id for node in alive_nodes()})

    def encoder_actors(self) -> list[Any]:
        """Return the encoder actors; none of a model that reads text alone.

        Raises:
            EngineDeadError, DeadlineError: the driver does not answer.
        """
        return list(self._ask("encoder_actors", Deadline(_ANSWER_S)))

    def end(self, *, in_order: bool = False) -> None:
        """End everything but stages that the next life can have, which stand by. May be called again, from any thread.

        Args:
            in_order: Have the driver and the stages end by themselves, and the trace written, as far as they still can.
        """
        with self._end_lock:
            if self._ending.is_set():
                return
            self._ending.set()
            shutil.rmtree(self._meeting_place, ignore_errors=True)
            try:
                if self._cluster.is_useful():
                    self._end_actors(in_order=in_order)
                self._end_processes(in_order=in_order)
            finally:  # a watcher that asked Ray for the driver after the end would start another Ray
                for watcher in self._watchers:
                    if watcher is not threading.current_thread():
                        watcher.join(_WATCH_S + _ANSWER_S)

    def _current_encoders(self) -> list[ActorProcess]:
        """Return the encoders' processes: those of now, if the driver still answers."""
        if self._encoder_processes:
            try:
                self._encoder_processes = self._ask("encoder_processes", Deadline(0.0))
            except RayppError as error:
                logger.debug("the driver does not say which encoders there are: %s", error)
        return self._encoder_processes

    def _ask(self, method: str, deadline: Deadline, *args: object) -> Any:
        """Call the driver. It knows the same deadline, and gets a moment longer to say what ran out of time."""
        self._check()  # without a Ray the call would start one
        ends = Deadline(deadline.remaining_s + _ANSWER_S)
        with _errors_of_the_driver(f"start_timeout_s={deadline.seconds:g}"):
            answer, began, noted_s = getattr(self._driver, method).remote(*args), time.monotonic(), 0.0
            while not ray.wait([answer], timeout=min(_POLL_S, ends.remaining_s))[0] and ends.remaining_s:
                self._check()
                if self._plan.device == "cuda" and time.monotonic() - began > noted_s + _NOTED_S:
                    noted_s += _NOTED_S
                    logger.warning("%s", _SLOW_START.format(noted_s, deadline.remaining_s))
            return ray.get(answer, timeout=0)

    def _check(self) -> None:
        if (error := self._cluster.death()) is not None:
            raise error
        if not self._is_wanted():
            raise EngineDeadError("the engine was closed", hint="start a new engine")
        self._check_stopped()

    def _check_stopped(self) -> None:
        """Raise for a stage or a driver that starts and stands still; one that runs is watched by others."""
        if self._stopped is None or self._run is not None:
            return
        stages = self._pool.processes
        driver = [] if self._driver_process is None else [self._driver_process]
        if (found := self._stopped.first_of([*driver, *stages.values()])) is None:
            return
        process, stopped_s = found
        said: dict[str, Any] = {
            "got": f"process {process.pid} has been stopped for {stopped_s:.1f} s",
            "expected": f"no process that is stopped for more than {self._plan.config.faults.silence_timeout_s:g} s",
            "hint": "a signal stopped it (SIGSTOP, a debugger)",
            "silent_s": stopped_s,
        }
        for index, of_stage in stages.items():
            if of_stage == process:
                name, stage_index = name_process(index, self._plan.num_members)
                raise StageDiedError(f"{name} is frozen while it starts", stage_index=stage_index, **said)
        raise EngineDeadError("the driver is frozen while it starts", **said)

    def _end_actors(self, *, in_order: bool) -> None:
        timeout_s = self._plan.config.faults.close_timeout_s
        try:
            self._current_encoders()  # all are waited for: the next life needs their memory
            if self._run is not None:
                self._write_trace(Deadline(timeout_s if in_order else _LAST_TRACE_S), was_closed=in_order)
                if in_order:
                    self._driver.stop.remote()
                    ray.wait([self._run], timeout=timeout_s)
        finally:
            if self._driver is not None:
                ray.kill(self._driver)

    def _end_processes(self, *, in_order: bool) -> None:
        """Make sure that the engine's processes are gone: without a Ray, those on this node, which Ray did not end."""
        timeout_s = self._plan.config.faults.close_timeout_s
        driver = [self._driver_process] if self._driver_process is not None else []
        processes = [*driver, *self._encoder_processes]
        if self._cluster.is_useful():
            end_processes(processes, timeout_s, None if in_order else min(_PATIENCE_S, timeout_s))
            if not in_order:
                self._pool.stand_by(min(_STAND_BY_S, timeout_s))
        else:
            processes += self._stage_processes
            here = [process.process for process in processes if process.node_id == driver[0].node_id]
            end_here(here, 0.0, 0.0)

    def _death(self, has_driver_ended: bool) -> RayppError | None:
        """Return what the engine died of, if it did."""
        if (error := self._cluster.death()) is not None or not has_driver_ended:
            return error
        try:
            with _errors_of_the_driver("its end"):
                ray.get(self._run)
        except RayppError as error:
            return error
        return EngineDeadError("the driver ended by itself")

    def _write_trace(self, deadline: Deadline, *, was_closed: bool) -> None:
        """Have the trace written, as far as it still can be: of a life that has died, to a file with its number."""
        if (given := self._plan.config.observability.trace) is None:
            return
        path = Path(given) if was_closed else numbered(Path(given), self._number)
        try:
            with raypp_errors(f"{deadline.seconds:g} s"):
                write_chrome_trace(path, ray.get(self._driver.trace.remote(), timeout=deadline.remaining_s))
        except (OSError, RayppError) as error:  # what was generated is not worth less for it
            logger.warning("no trace was written to %s: %s", path, error)


def numbered(path: Path, number: int) -> Path:
    """Return the path of one of several files: trace.json becomes trace-2.json."""
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


@contextmanager
def _errors_of_the_driver(limit: str) -> Iterator[None]:
    """Raise what the driver raises, and say of its death that it is the driver's."""
    try:
        with raypp_errors(limit):
            yield
    except EngineDeadError as error:
        if isinstance(error.__cause__, ray.exceptions.RayActorError):
            raise EngineDeadError("the driver died", got=error.got) from error
        raise
