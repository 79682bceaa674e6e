"""Reads the hardware of the nodes that stages will run on, where that is not this machine."""

from __future__ import annotations

import os
from dataclasses import replace

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.actors.deadline import Deadline
from raypp.actors.placement import alive_nodes
from raypp.actors.remote_errors import raypp_errors
from raypp.config.engine_config import EngineConfig
from raypp.plan.hardware import Hardware


def may_be_elsewhere(config: EngineConfig, here: Hardware) -> bool:
    """Return whether stages may want GPUs that this machine lacks and a running cluster could have."""
    has_cluster = ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS"))
    return has_cluster and config.parallel.device != "cpu" and not here.num_gpus


def hardware_of_stages(here: Hardware, deadline: Deadline) -> Hardware:
    """Return the GPUs of the cluster's nodes, all of them and the memory of the smallest; `here` if there are none.

    Raises:
        DeadlineError, EngineDeadError: a node does not say.
    """
    with_gpus = [node.node_id for node in alive_nodes() if node.resources.get("GPU")]
    # Nothing is asked of Ray but the place: GPUs that are busy can be looked at, too.
    asked = [
        ray.remote(Hardware.of_this_machine)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote()
        for node_id in with_gpus
    ]
    with raypp_errors(f"start_timeout_s={deadline.seconds:g}"):
        nodes: list[Hardware] = ray.get(asked, timeout=deadline.remaining_s)
    usable = smallest_of([node for node in nodes if node.num_gpus])
    return usable or replace(here, num_unusable_gpus=max(node.num_unusable_gpus for node in [here, *nodes]))


def smallest_of(nodes: list[Hardware]) -> Hardware | None:
    """Return what can be counted on wherever a stage comes to lie: all GPUs, but the smallest memory and capability."""
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
    )
