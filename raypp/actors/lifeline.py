"""Ends a process when the processes that it works for have ended.

Ray ends an engine's actors when their owner or their node is gone. It asks the kernel whether a process is there, and a
zombie is: where nobody collects zombies, in a container without an init, that takes minutes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from raypp.actors.local_process import LocalProcess
from raypp.actors.processes import ActorProcess

_POLL_S = 0.5


def live_with(owner: ActorProcess) -> ActorProcess:
    """End this actor's process as soon as its owner ends, if that is on this node, or its raylet; return the process.

    Args:
        owner: Whose actor this is.
    """
    here = ActorProcess.of_this_process()
    raylet = LocalProcess.of_pid(os.getppid())
    end_with([raylet, owner.process] if owner.node_id == here.node_id else [raylet])
    return here


def end_with(
    processes: Sequence[LocalProcess], end: Callable[[int], object] = os._exit, poll_s: float = _POLL_S
) -> None:
    """End this process, without ado, as soon as one of the others has ended. Watched from a thread.

    Args:
        processes: The others. Those that cannot be seen, because they are in another container, are left out.
        end: What ends this one.
        poll_s: How often they are looked for.
    """
    seen = [process for process in processes if process.is_alive()]
    if seen:
        threading.Thread(target=_watch, args=(seen, end, poll_s), name="lifeline", daemon=True).start()


def _watch(processes: Sequence[LocalProcess], end: Callable[[int], object], poll_s: float) -> None:
    while all(process.is_alive() for process in processes):
        time.sleep(poll_s)
    end(1)
