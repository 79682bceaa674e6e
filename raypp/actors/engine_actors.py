"""Starts and ends an engine: from a configuration to a driver that clients can talk to."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.actors.cluster import Cluster
from raypp.actors.deadline import Deadline, raypp_errors
from raypp.actors.engine_life import EngineLife
from raypp.actors.placement import alive_nodes, check_capacity
from raypp.actors.stage_pool import StagePool
from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.graph_plan import max_step_rows
from raypp.plan.hardware import Hardware
from raypp.plan.layer_partition import prompt_tokens_of_step
from raypp.plan.tried_cut import require_tried
from raypp.sampling_params import SamplingParams
from raypp.supervision.supervised_engine import SupervisedEngine

if TYPE_CHECKING:
    from raypp.plan.measure import Tuning
    from raypp.stage.build_stage import StageFactory

_RESTART_END_S = 5.0  # for a restart to notice that the engine is being closed, besides what it ends

logger = logging.getLogger(__name__)


def launch_engine(config: EngineConfig, *, stage_factory: StageFactory | None = None) -> EngineHandle:
    """Place and start an engine; return when all stages are ready.

    Raises:
        ConfigError, ModelLoadError, ResourceError, DeadlineError, EngineDeadError: it cannot start. Nothing is left.
    """
    config.observability.check_trace_folder()
    deadline = Deadline(config.faults.start_timeout_s)
    plan, hardware, cluster = connect_and_plan(config, deadline)
    try:
        factory = None if stage_factory is None else cloudpickle.dumps(stage_factory)  # type: ignore[no-untyped-call]
        pool = StagePool(factory)
        life = EngineLife(plan, cluster, pool, may_be_last=not config.faults.max_engine_restarts)
        try:
            with _ended_on_error(life):
                life.start(deadline)
            return EngineHandle(plan, hardware, cluster, pool, life)
        except BaseException:
            pool.end(config.faults.close_timeout_s, has_ray=cluster.is_useful())
            raise
    except BaseException:
        cluster.disconnect()
        raise


def connect_and_plan(config: EngineConfig, deadline: Deadline) -> tuple[EnginePlan, Hardware, Cluster]:
    """Return the plan for the machines that stages will run on, what these have, and the connection to them.

    Raises:
        ConfigError, ModelLoadError, ResourceError: it cannot run; if possible, said before Ray is started.
    """
    here = Hardware.of_this_machine()
    if not may_be_elsewhere(config):
        _warn_of_unusable_gpus(config, here)
        plan = plan_engine(config, here)
        require_tried(plan)
        return plan, here, Cluster.connect()
    cluster = Cluster.connect()
    try:
        hardware = hardware_of_stages(here, deadline)
        _warn_of_unusable_gpus(config, hardware)
        plan = plan_engine(config, hardware)
        require_tried(plan)
        return plan, hardware, cluster
    except BaseException:
        cluster.disconnect()
        raise


def _warn_of_unusable_gpus(config: EngineConfig, hardware: Hardware) -> None:
    if hardware.complaint is not None and config.parallel.device == "auto":
        logger.warning("stages compute on CPUs: %s", hardware.complaint)


class EngineHandle(SupervisedEngine[EngineLife]):
    """A running engine, owned by this process; see `raypp.api.launch.EngineHandle`."""

    def __init__(
        self, plan: EnginePlan, hardware: Hardware, cluster: Cluster, pool: StagePool, life: EngineLife
    ) -> None:
        self._hardware = hardware  # that the plan was made for
        self._num_lives = 1
        self._cluster = cluster
        self._pool = pool
        self._close_lock = threading.Lock()
        self._is_closed = False
        super().__init__(plan, life, obstacle=cluster.death, on_end=self._end_all)

    def processes(self) -> dict[str, Any]:
        """Return {"driver": pid, "stages": [pid, ...], "encoders": [...]}; of the last life while none runs."""
        return self._supervisor.life.processes()

    def encoder_actors(self) -> list[Any]:
        """Return the encoder actors; none of a model that reads text alone.

        Raises:
            EngineDeadError, DeadlineError: the driver does not answer.
        """
        return self._supervisor.life.encoder_actors()

    def close(self) -> None:
        """End the engine and everything it started. May be called again, and from any thread."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                if not self._supervisor.stop(_RESTART_END_S + self._plan.config.faults.close_timeout_s):
                    logger.warning("a restart of the engine does not end")
                self._supervisor.life.end(in_order=True)
                self._end_stages()
            finally:
                self._cluster.disconnect()

    def _make_plan(self, config: EngineConfig) -> EnginePlan:
        plan = plan_engine(config, self._hardware)
        require_tried(plan)
        return plan

    def _start_life(self) -> EngineLife:
        is_closing = self._supervisor.is_closing
        self._num_lives += 1
        life = EngineLife(
            self._plan,
            self._cluster,
            self._pool,
            lambda: not is_closing.is_set(),
            self._num_lives,
            may_be_last=not self._supervisor.num_restarts_left,
        )
        with _ended_on_error(life):
            life.start_again(Deadline(self._plan.config.faults.start_timeout_s), self._plan_anew)
        return life

    def _end_all(self) -> None:
        """End what is left of an engine that has died for good."""
        self._supervisor.life.end(in_order=True)
        self._end_stages()

    def _end_stages(self) -> None:
        self._pool.end(self._plan.config.faults.close_timeout_s, has_ray=self._cluster.is_useful())

    def _plan_anew(self, deadline: Deadline) -> EnginePlan | None:
        """Return the plan for the GPUs of other machines that there are now; None if the one that there is holds."""
        config, here = self._plan.asked, Hardware.of_this_machine()
        if not may_be_elsewhere(config):
            return None
        hardware = hardware_of_stages(here, deadline)
        if hardware == self._hardware or not hardware.num_gpus:
            return None
        self._plan, self._hardware = plan_engine(config, hardware), hardware
        return self._plan


@contextmanager
def _ended_on_error(life: EngineLife) -> Iterator[None]:
    """End what there is of a life that fails to start, but for stages that may stand by."""
    try:
        yield
    except BaseException:
        life.end()
        raise


def may_be_elsewhere(config: EngineConfig) -> bool:
    """Return whether stages may get GPUs of other machines than this one: those of a running cluster."""
    return config.parallel.device != "cpu" and (ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS")))


def hardware_of_stages(here: Hardware, deadline: Deadline) -> Hardware:
    """Return the GPUs of the cluster's nodes, this one's first; `here` if there are none.

    Raises:
        DeadlineError, EngineDeadError: a node does not say.
    """
    own_id = ray.get_runtime_context().get_node_id()
    with_gpus = [node.node_id for node in alive_nodes() if node.resources.get("GPU")]
    own = [here] if here.num_gpus and own_id in with_gpus else []
    with_gpus.sort(key=lambda node_id: node_id != own_id)  # stable
    # The tasks reserve nothing, so that GPUs that are busy are read, too.
    asked = [
        ray.remote(_hardware_there)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote()
        for node_id in with_gpus[len(own) :]
    ]
    with raypp_errors(f"start_timeout_s={deadline.seconds:g}"):
        nodes: list[Hardware] = own + ray.get(asked, timeout=deadline.remaining_s)
    usable = smallest_of([_on_node(node, id_) for node, id_ in zip(nodes, with_gpus, strict=True) if node.num_gpus])
    return usable or replace(here, num_unusable_gpus=max(node.num_unusable_gpus for node in [here, *nodes]))


def _hardware_there() -> Hardware:
    """A function, as Ray wants it."""
    return Hardware.of_this_machine()


def _on_node(hardware: Hardware, node_id: str) -> Hardware:
    return replace(hardware, machines=tuple(replace(machine, node_id=node_id) for machine in hardware.machines))


def smallest_of(nodes: list[Hardware]) -> Hardware | None:
    """Return what can be counted on wherever a stage comes to lie, and which GPUs each node has."""
    if not nodes:
        return None
    weakest = min(nodes, key=lambda node: node.gpu_memory_bytes)
    return Hardware(
        num_cpu_cores=min(node.num_cpu_cores for node in nodes),
        memory_bytes=min(node.memory_bytes for node in nodes),
        num_gpus=sum(node.num_gpus for node in nodes),
        gpu_name=weakest.gpu_name,
        gpu_memory_bytes=weakest.gpu_memory_bytes,
        gpu_capability=min(node.gpu_capability for node in nodes),
        num_machines=len(nodes),
        machines=tuple(machine for node in nodes for machine in node.machines),
    )


def tune_engine(
    config: EngineConfig, *, num_rows: int | None = None, context_len: int | None = None, temperature: float = 1.0
) -> Tuning:
    """Measure the configured model on one stage's device, in a process that Ray places like a stage; cut its layers.

    Of a stage's members one is measured, without the others; on GPUs their sums are estimated.

    Args:
        config: Which model, how many stages, what a stage asks Ray for, and how many prompt tokens there are for every
            token of an answer: as many are computed in each step.
        num_rows: Of a decode step; None: the most that a step of this configuration holds.
        context_len: Tokens of each row; None: what they have when the KV cache is half full.
        temperature: Of the sampling; 0 is greedy.

    Raises:
        ConfigError, ModelLoadError, ResourceError: it cannot run, or not at this size.
        DeadlineError: it took longer than start_timeout_s.
    """
    from raypp.plan.measure import default_context_len, measure_costs, tune_partition  # with torch

    deadline = Deadline(config.faults.start_timeout_s)
    plan, _, cluster = connect_and_plan(config, deadline)
    try:
        num_rows = num_rows or max_step_rows(plan.config)
        context_len = context_len or default_context_len(plan, num_rows)
        if min(num_rows, context_len) < 1:
            raise ConfigError("nothing can be measured", got=f"{num_rows} rows of {context_len} tokens")
        resources = plan.member_resources()
        check_capacity(alive_nodes(), [resources], "pack")
        measure: Any = measure_costs  # Ray's types know no keywords
        task = ray.remote(measure).options(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), max_retries=0)
        with raypp_errors(f"start_timeout_s={deadline.seconds:g}"):
            measuring = task.remote(
                plan,
                num_rows=num_rows,
                context_len=context_len,
                params=SamplingParams(temperature=temperature),
                num_prompt_tokens=prompt_tokens_of_step(config, num_rows),
            )
            measured = ray.get(measuring, timeout=deadline.remaining_s)
    finally:
        cluster.disconnect()
    return tune_partition(plan, measured)
