"""The processes of an engine: what an actor does in its own, and how those that are left over are ended.

Ray ends an engine's actors when their owner or their node is gone, but it asks the kernel whether a process is there,
and a zombie is: in a container without an init that takes minutes. So each actor watches its owner itself. Ray asks a
process to end, which has no effect on a stopped one, and a new engine must find the old one's memory free: so closing
an engine waits for its processes and kills those that stay.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.driver.stage_health import AwakeClock

_AWAIT_POLL_S = 0.01
_NODES_POLL_S = 0.2
_OWNER_POLL_S = 0.5
_PATIENCE = 0.5  # the share of the time that processes get to end by themselves

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalProcess:
    """A process of this machine, as /proc shows it. A zombie counts as ended.

    The start time tells it from another one that gets its number later, also where the clock is set meanwhile.
    """

    pid: int
    start_time: int  # clock ticks from the machine's start to the process's; 0 when it had ended already
    name: str = field(default="", compare=False)  # of its program, cut off after 15 characters
    parent_pid: int = field(default=0, compare=False)
    state: str = field(default="X", compare=False)  # when it was read, see proc(5)

    @classmethod
    def of_pid(cls, pid: int) -> LocalProcess:
        """Return the process that has this number now."""
        found = _read(pid)
        return cls(pid, 0) if found is None or found.state in "ZX" else found

    @classmethod
    def of_this_process(cls) -> LocalProcess:
        """Return the calling process."""
        return cls.of_pid(os.getpid())

    def is_alive(self) -> bool:
        """Return whether it still runs."""
        return self.start_time != 0 and LocalProcess.of_pid(self.pid) == self

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped it."""
        found = _read(self.pid)
        return found == self and found.state in "Tt"

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def command(self) -> str:
        """Return its command line; empty of a zombie."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""


def children_of(pid: int) -> list[LocalProcess]:
    """Return the processes whose parent this one is, zombies too."""
    return [process for process in _all() if process.parent_pid == pid]


def with_descendants(processes: Sequence[LocalProcess]) -> list[LocalProcess]:
    """Return processes and everything that descends from them, parents first."""
    children: defaultdict[int, list[LocalProcess]] = defaultdict(list)
    for process in _all():
        children[process.parent_pid].append(process)
    found = list(processes)
    for process in found:  # which grows
        found += children[process.pid]
    return list(dict.fromkeys(found))


def await_end(processes: Iterable[LocalProcess], timeout_s: float) -> list[LocalProcess]:
    """Wait until processes have ended; return those that still run after `timeout_s`."""
    left, ends_s = list(processes), time.monotonic() + timeout_s
    while (left := [process for process in left if process.is_alive()]) and time.monotonic() < ends_s:
        time.sleep(_AWAIT_POLL_S)
    return left


def _all() -> Iterator[LocalProcess]:
    for folder in Path("/proc").glob("[0-9]*"):
        if (process := _read(int(folder.name))) is not None:
            yield process


def _read(pid: int) -> LocalProcess | None:
    """Return what the process table says of a process; None when it is not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    return LocalProcess(pid, int(fields[19]), name, int(fields[1]), fields[0])


@dataclass(frozen=True)
class ActorProcess:
    """A process of an engine, on whatever node."""

    node_id: str
    process: LocalProcess

    @classmethod
    def of_this_process(cls) -> ActorProcess:
        """Return the calling process, which must be connected to Ray."""
        return cls(ray.get_runtime_context().get_node_id(), LocalProcess.of_this_process())

    @property
    def pid(self) -> int:
        """Its number on its node."""
        return self.process.pid


def live_with(owner: ActorProcess) -> ActorProcess:
    """End this actor's process as soon as its owner ends, if that is on this node, or its raylet; return the process.

    Args:
        owner: The process that made this actor.
    """
    here = ActorProcess.of_this_process()
    raylet = LocalProcess.of_pid(os.getppid())
    end_with([raylet, owner.process] if owner.node_id == here.node_id else [raylet])
    return here


def end_with(
    processes: Sequence[LocalProcess], end: Callable[[int], object] = os._exit, poll_s: float = _OWNER_POLL_S
) -> None:
    """End this process, without cleaning up, as soon as one of the others has ended. Watched from a thread.

    Args:
        processes: The others. Those that cannot be seen, because they are in another container, are left out.
        end: What ends this one.
        poll_s: How often they are looked for.
    """
    seen = [process for process in processes if process.is_alive()]

    def watch() -> None:
        while all(process.is_alive() for process in seen):
            time.sleep(poll_s)
        end(1)

    if seen:
        threading.Thread(target=watch, name="lifeline", daemon=True).start()


def local_device(device: str) -> str:
    """Return the torch device of this process, which sees all GPUs: the one that Ray gave it unless a plan names one.

    A plan does where GPUs differ, and the engine has all of them: so what Ray counts as taken is the same.
    """
    if device != "cuda":
        return device
    assigned = str(ray.get_gpu_ids()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"cuda:{visible.split(',').index(assigned) if visible else assigned}"


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which reads modules that stay again and again: torch imports 0.2 s faster."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StoppedProcesses:
    """Finds processes of one engine that a signal has stopped while they start. For one thread.

    A process that loads is silent for minutes, so silence shows nothing; the kernel's state of it does, on this node.
    """

    def __init__(self, node_id: str, patience_s: float) -> None:
        """Begin with none.

        Args:
            node_id: Of this machine; nothing is known of processes elsewhere.
            patience_s: How long a process may be stopped, e.g. by a debugger.
        """
        self._node_id = node_id
        self._patience_s = patience_s
        self._clock = AwakeClock()
        self._since_s: dict[ActorProcess, float] = {}

    def first_of(self, processes: Iterable[ActorProcess]) -> tuple[ActorProcess, float] | None:
        """Return one that has been stopped for too long, if there is one, and for how many seconds.

        Must be called every few seconds: what happened between two calls is not known.
        """
        now_s = self._clock()
        stopped = [p for p in processes if p.node_id == self._node_id and p.process.is_stopped()]
        self._since_s = {process: self._since_s.get(process, now_s) for process in stopped}
        for process, since_s in self._since_s.items():
            if now_s - since_s > self._patience_s:
                return process, now_s - since_s
        return None


def end_processes(processes: Iterable[ActorProcess], timeout_s: float, patience_s: float | None = None) -> None:
    """Wait until the processes have ended; kill those that take too long, on whatever node they are.

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
    elsewhere: dict[str, ray.ObjectRef[None]] = {}
    for node_id, of_node in by_node.items():
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(end_here).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
        elsewhere[node_id] = task.remote(of_node, timeout_s, patience_s)
    end_here(here, timeout_s, patience_s)
    for ref in _answered(elsewhere, timeout_s):
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            logger.warning("a node did not say whether the engine's processes have ended: %s", error)


def _answered(on_nodes: Mapping[str, ray.ObjectRef[None]], timeout_s: float) -> list[ray.ObjectRef[None]]:
    """Wait for the nodes' answers; not for nodes that are lost: what ran there is gone, or ends with its raylet."""
    waiting, answered = dict(on_nodes), list[ray.ObjectRef[None]]()
    ends_s = time.monotonic() + timeout_s
    while waiting and time.monotonic() < ends_s:
        ended, _ = ray.wait(list(waiting.values()), timeout=_NODES_POLL_S)
        answered += ended
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        waiting = {node_id: ref for node_id, ref in waiting.items() if node_id in alive and ref not in ended}
    for node_id in waiting:
        logger.warning("node %s did not say whether the engine's processes have ended", node_id)
    return answered


def end_here(processes: Sequence[LocalProcess], timeout_s: float, patience_s: float) -> None:
    """Wait until processes of this machine have ended; kill those that take too long. They were told to end already."""
    left = await_end(processes, patience_s)
    for process in left:
        logger.warning("process %d of an engine did not exit when asked to, and is killed", process.pid)
        process.kill()
    await_end(left, timeout_s - patience_s)
