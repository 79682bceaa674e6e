"""Waits until the processes of an engine's actors are gone, and ends those that stay.

Ray asks a process to end, which a stopped one does not hear. A new engine must find the memory of the old one free, so
whoever closes an engine sees to it that its processes are gone.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.actors.local_process import LocalProcess, await_end

_POLL_S = 0.2
_PATIENCE = 0.5  # the share of the time that processes get to end by themselves

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActorProcess:
    """A process of an engine, on whatever node."""

    node_id: str
    process: LocalProcess

    @classmethod
    def of_this_process(cls) -> ActorProcess:
        """Return the process that asks. One that is connected to Ray."""
        return cls(ray.get_runtime_context().get_node_id(), LocalProcess.of_this_process())

    @property
    def pid(self) -> int:
        """Its number on its node."""
        return self.process.pid


def end_processes(processes: Iterable[ActorProcess], timeout_s: float, patience_s: float | None = None) -> None:
    """Wait until the processes have ended; end those that take too long, on whatever node they are.

    Args:
        processes: Which were told to end already.
        timeout_s: For all of it. A node that does not answer is left alone.
        patience_s: How long processes get to end by themselves. None: half of the time.
    """
    patience_s = timeout_s * _PATIENCE if patience_s is None else patience_s
    by_node: defaultdict[str, list[LocalProcess]] = defaultdict(list)
    for process in processes:
        by_node[process.node_id].append(process.process)
    here = by_node.pop(ray.get_runtime_context().get_node_id(), [])
    elsewhere = {node_id: _end_on_node(node_id, of_node, timeout_s, patience_s) for node_id, of_node in by_node.items()}
    end_here(here, timeout_s, patience_s)
    for ref in _answered(elsewhere, timeout_s):
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            logger.warning("a node did not say whether the engine's processes have ended: %s", error)


def _answered(on_nodes: Mapping[str, ray.ObjectRef[None]], timeout_s: float) -> list[ray.ObjectRef[None]]:
    """Wait for what nodes are asked; not for nodes that are lost: what ran there is gone, or ends with its raylet."""
    waiting, answered = dict(on_nodes), list[ray.ObjectRef[None]]()
    ends_s = time.monotonic() + timeout_s
    while waiting and time.monotonic() < ends_s:
        ended, _ = ray.wait(list(waiting.values()), timeout=_POLL_S)
        answered += ended
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        waiting = {node_id: ref for node_id, ref in waiting.items() if node_id in alive and ref not in ended}
    for node_id in waiting:
        logger.warning("node %s did not say whether the engine's processes have ended", node_id)
    return answered


def _end_on_node(
    node_id: str, processes: Sequence[LocalProcess], timeout_s: float, patience_s: float
) -> ray.ObjectRef[None]:
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(end_here).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
    ref: ray.ObjectRef[None] = task.remote(processes, timeout_s, patience_s)
    return ref


def end_here(processes: Sequence[LocalProcess], timeout_s: float, patience_s: float) -> None:
    """Wait until processes of this machine have ended; end those that take too long. They were told to end already."""
    left = await_end(processes, patience_s)
    for process in left:
        logger.warning("process %d of an engine did not exit when asked to, and is killed", process.pid)
        process.kill()
    await_end(left, timeout_s - patience_s)
