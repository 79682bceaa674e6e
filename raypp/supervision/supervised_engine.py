"""What every engine's handle says of its lives."""

from __future__ import annotations

from typing import Generic

from raypp.errors import RayppError
from raypp.supervision.recovery import EngineWatcher, Recovery
from raypp.supervision.supervisor import LifeT, Supervisor


class SupervisedEngine(Generic[LifeT]):
    """The part of an `EngineHandle` that a supervisor answers for."""

    def __init__(self, supervisor: Supervisor[LifeT]) -> None:
        self._supervisor = supervisor

    @property
    def client_address(self) -> str:
        """The zmq address that clients connect to, of the present life."""
        return self._supervisor.life.client_address

    def watch(self, watcher: EngineWatcher) -> None:
        """Tell somebody, from another thread, what becomes of the engine from now on."""
        self._supervisor.watch(watcher)

    def report_death(self, error: RayppError, client_address: str, *, silent_s: float = 0.0) -> None:
        """Take in that the engine at an address has died, from a client that found it out. From any thread."""
        self._supervisor.report_death(error, client_address, silent_s=silent_s)

    def excuse_restarts(self, count: int) -> None:
        """Count the latest restarts no longer: what caused them will not come again."""
        self._supervisor.excuse_restarts(count)

    def recoveries(self) -> list[Recovery]:
        """Return the engine's pauses, oldest first."""
        return self._supervisor.recoveries()
