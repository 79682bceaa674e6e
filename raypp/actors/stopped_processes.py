"""Finds processes that were stopped by a signal and not told to go on, while nothing can be heard of them.

A process that starts says nothing for minutes while it loads: silence shows nothing then. What the kernel says of it
does, on this machine: one that is stopped does not load.
"""

from __future__ import annotations

from collections.abc import Iterable

from raypp.actors.processes import ActorProcess
from raypp.driver.stage_health import AwakeClock


class StoppedProcesses:
    """What is known of the processes of one engine. One thread's."""

    def __init__(self, node_id: str, patience_s: float) -> None:
        """Know none.

        Args:
            node_id: Of this machine; nothing is known of processes elsewhere.
            patience_s: How long a process may be stopped, by somebody who looks into it.
        """
        self._node_id = node_id
        self._patience_s = patience_s
        self._clock = AwakeClock()
        self._since_s: dict[ActorProcess, float] = {}

    def first_of(self, processes: Iterable[ActorProcess]) -> tuple[ActorProcess, float] | None:
        """Return one that has been stopped for too long, if there is one, and for how many seconds.

        To be asked every few seconds at least: what happened meanwhile is not known.
        """
        now_s = self._clock()
        stopped = [p for p in processes if p.node_id == self._node_id and p.process.is_stopped()]
        self._since_s = {process: self._since_s.get(process, now_s) for process in stopped}
        for process, since_s in self._since_s.items():
            if now_s - since_s > self._patience_s:
                return process, now_s - since_s
        return None
