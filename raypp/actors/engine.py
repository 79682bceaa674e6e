"""Starting and ending an engine: from a configuration to a driver that clients can talk to."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypp.actors.cluster import Cluster, reserve_on_this_node
from raypp.actors.driver_actor import DriverActor
from raypp.actors.remote_errors import raypp_errors
from raypp.config.engine import EngineConfig
from raypp.driver.engine_plan import EnginePlan, plan_engine
from raypp.driver.hardware import Hardware
from raypp.errors import ConfigError, EngineDeadError, RayppError
from raypp.tracing import write_chrome_trace

if TYPE_CHECKING:
    from raypp.stage.build import StageFactory

_DRIVER_NUM_CPUS = 0.01

logger = logging.getLogger(__name__)


def describe_engine(config: EngineConfig) -> dict[str, Any]:
    """Return the resolved configuration, the plan of layers and memory, and the hardware. Starts nothing.

    Raises:
        ConfigError, ModelLoadError, ResourceError: it could not run.
    """
    hardware = Hardware.of_this_machine()
    plan = plan_engine(config, hardware)
    return {
        "config": plan.resolved_config().model_dump(mode="json"),
        "plan": plan.describe(),
        "hardware": asdict(hardware),
    }


def launch_engine(config: EngineConfig, *, stage_factory: StageFactory | None = None) -> EngineHandle:
    """Place and start an engine; return when all stages are ready.

    Raises:
        ConfigError, ModelLoadError, ResourceError, DeadlineError, EngineDeadError: it cannot start. Nothing is left.
    """
    plan = plan_engine(config, Hardware.of_this_machine())
    _check_trace_folder(config.observability.trace)
    cluster = Cluster.connect()
    handle = EngineHandle(plan, cluster)
    try:
        handle._start(stage_factory)
    except BaseException:
        handle.close()
        raise
    return handle


class EngineHandle:
    """A running engine, owned by this process.

    Attributes:
        client_address: The driver's zmq address for clients.
        model_info: What clients must know of the model: model_path, vocab_size, max_model_len, eos_token_ids.
    """

    client_address: str

    def __init__(self, plan: EnginePlan, cluster: Cluster) -> None:
        self._plan = plan
        self._cluster = cluster
        self._group: PlacementGroup | None = None
        self._driver: Any = None
        self._run: Any = None
        # Only until all have connected: sockets stay connected when their files are gone; see docs/design/0004.
        self._meeting_place = tempfile.mkdtemp(prefix="raypp-")
        self._processes: dict[str, Any] = {"driver": None, "stages": [], "encoders": []}
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self.model_info = {
            "model_path": plan.model_path,
            "vocab_size": plan.model.vocab_size,
            "max_model_len": plan.max_model_len,
            "eos_token_ids": sorted(plan.model.eos_token_ids),
        }

    def plan(self) -> dict[str, Any]:
        """Return layers, bytes and blocks per stage."""
        return self._plan.describe()

    def processes(self) -> dict[str, Any]:
        """Return {"driver": pid, "stages": [pid, ...], "encoders": [...]}."""
        return dict(self._processes)

    def watch(self, callback: Callable[[RayppError], None]) -> None:
        """Call back, from another thread, when the driver ends without having been told to."""

        def watch() -> None:
            while not self._closing.is_set():
                ended, _ = ray.wait([self._run], timeout=1.0)
                if ended and not self._closing.is_set():
                    callback(_death_of(self._run))
                    return

        threading.Thread(target=watch, name="driver-watcher", daemon=True).start()

    def close(self) -> None:
        """End the engine and everything it started. May be called again, and from any thread."""
        with self._close_lock:
            if self._closing.is_set():
                return
            self._closing.set()
            shutil.rmtree(self._meeting_place, ignore_errors=True)
            if ray.is_initialized():
                try:
                    self._end_actors()
                finally:
                    self._cluster.disconnect()

    def _start(self, stage_factory: StageFactory | None) -> None:
        faults = self._plan.config.faults
        bundles = [{"CPU": _DRIVER_NUM_CPUS}] + [self._plan.stage_resources() for _ in self._plan.stages]
        self._group = reserve_on_this_node(bundles, faults.start_timeout_s)
        self._driver = (
            ray.remote(DriverActor)
            .options(
                num_cpus=_DRIVER_NUM_CPUS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0),
                max_concurrency=4,  # run, and stop, trace beside it
                max_restarts=0,
            )
            .remote(self._plan, stage_factory, self._meeting_place)
        )
        with raypp_errors():
            started = ray.get(self._driver.start.remote(self._group), timeout=faults.start_timeout_s)
        self.client_address = started["client_address"]
        self._processes.update(started["processes"])
        self._run = self._driver.run.remote()

    def _end_actors(self) -> None:
        timeout_s = self._plan.config.faults.close_timeout_s
        try:
            if self._run is not None and not ray.wait([self._run], timeout=0)[0]:
                self._write_trace(timeout_s)
                self._driver.stop.remote()
                ray.wait([self._run], timeout=timeout_s)
        finally:
            if self._driver is not None:
                ray.kill(self._driver)
            if self._group is not None:
                remove_placement_group(self._group)
            self._wait_until_gone(timeout_s)

    def _write_trace(self, timeout_s: float) -> None:
        path = self._plan.config.observability.trace
        if path is not None:
            try:
                with raypp_errors():
                    write_chrome_trace(path, ray.get(self._driver.trace.remote(), timeout=timeout_s))
            except (OSError, RayppError) as error:  # what was generated is not worth less for it
                logger.warning("no trace was written to %s: %s", path, error)

    def _wait_until_gone(self, timeout_s: float) -> None:
        """Wait for the processes to end, so that a new engine finds their memory free."""
        pids = [pid for pid in (self._processes["driver"], *self._processes["stages"]) if pid is not None]
        deadline = time.monotonic() + timeout_s
        while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)


def _death_of(run: Any) -> RayppError:
    try:
        with raypp_errors():
            ray.get(run)
    except RayppError as error:
        return error
    return EngineDeadError("the driver ended by itself")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's: it lives
        return True
    return True


def _check_trace_folder(path: str | None) -> None:
    folder = Path(path).absolute().parent if path is not None else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            "the trace cannot be written where it is wanted", got=path, expected="a file in a folder that exists"
        )
