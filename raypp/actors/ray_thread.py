"""Starts and ends Ray in a thread of its own, and keeps track of the processes that Ray started.

A thread of its own, for three reasons. Ray's servers die with the thread that started them (PR_SET_PDEATHSIG), which
may be a short-lived one of the user's. Ray waits for servers that have died or stand still, for half a minute or for
ever: whoever asked for the start or the end is then told, and goes on. And the servers are found as children.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from raypp.actors.local_process import Child, LocalProcess, await_end, children_of, with_descendants
from raypp.errors import EngineDeadError, ResourceError

_VITAL = ("gcs_server", "raylet")  # without these nothing goes on; by the names of their programs
_POLL_S = 0.05
_NOTICE_S = 0.5
_ALONE_S = 10.0  # after a server's death, for the engines to be closed; Ray ends the whole process after 60 s
_KILLED_S = 5.0  # for the kernel to take killed processes away
_AFTER_KILL_S = 30.0  # for Ray to notice

logger = logging.getLogger(__name__)


class RayThread:
    """One connection to Ray, from its start to its end."""

    def __init__(
        self,
        connect: Callable[[Callable[[], bool]], str],
        disconnect: Callable[[str], object],
        is_server: Callable[[Child], bool],
    ) -> None:
        """Know what to do.

        Args:
            connect: Connects to Ray, and returns the connection's name; may start servers, as children of this process.
                It is given what says whether the connection is still wanted: where it is not, it may raise anything.
            disconnect: Ends the connection of that name, and the servers.
            is_server: Whether a new child is one of the servers.
        """
        self._connect = connect
        self._disconnect = disconnect
        self._is_server = is_server
        self.name = ""  # of the connection, once there is one
        self._earlier = {child.process for child in children_of(os.getpid())}
        self._vital: dict[LocalProcess, str] = {}
        self._started: set[LocalProcess] = set()  # servers and what descends from them, also when these are orphans
        self._error: BaseException | None = None
        self._tried, self._leaving, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="raypp-ray", daemon=True)

    def start(self) -> None:
        """Connect.

        Raises:
            ResourceError: a server has died meanwhile.
            Exception: whatever connecting raises. In either case nothing is left, now or when Ray has given up.
        """
        self._thread.start()
        try:
            while not self._tried.wait(_POLL_S):
                self._find_vital()
                if (name := self._dead_server()) is not None:
                    raise ResourceError("Ray cannot start", got=f"its {name} died", expected="that it goes on running")
        except BaseException:
            self._leaving.set()
            raise
        if self._error is not None:
            raise self._error
        self._find_vital()
        self._find_started()

    def is_useful(self) -> bool:
        """Return whether there is a connection, and no server has died."""
        return bool(self.name) and not self._leaving.is_set() and self._dead_server() is None

    def check(self) -> None:
        """Look after the servers that were started here.

        Raises:
            EngineDeadError: one has died.
        """
        if (name := self._dead_server()) is not None:
            raise EngineDeadError(
                f"Ray's {name} died, and the engine with it", hint="start a new engine: it starts another Ray"
            )

    def stop(self, timeout_s: float) -> bool:
        """Disconnect; servers that do not let go are killed. Return whether the connection has ended.

        Args:
            timeout_s: How long the servers get.
        """
        self._leaving.set()
        if self._ended.wait(timeout_s):
            return True
        logger.warning("Ray does not end within %g s; its processes, if they were started here, are killed", timeout_s)
        self._kill_started()
        return bool(self._started) and self._ended.wait(_AFTER_KILL_S)

    def _run(self) -> None:
        try:
            self.name = self._connect(lambda: not self._leaving.is_set())
        except BaseException as error:
            self._error = error
            self._kill_started()
        self._tried.set()
        if self._error is None:
            self._attend()
            self._find_started()
            try:
                self._disconnect(self.name)
            except Exception as error:
                logger.warning("Ray did not end in order: %s", error)
            self._kill_started()  # orphans of a server that died before its time stay for a minute
        self._ended.set()

    def _attend(self) -> None:
        """Wait until nobody needs Ray any more, or it is of no use."""
        while not self._leaving.wait(_NOTICE_S):
            if self._dead_server() is not None:
                self._find_started()
                self._leaving.wait(_ALONE_S)
                return

    def _find_vital(self) -> None:
        for child in self._new_children():
            if child.name in _VITAL:
                self._vital.setdefault(child.process, child.name)

    def _dead_server(self) -> str | None:
        if self._leaving.is_set():
            return None
        return next((name for process, name in self._vital.items() if not process.is_alive()), None)

    def _find_started(self) -> None:
        servers = [child.process for child in self._new_children() if self._is_server(child)]
        self._started.update(with_descendants(servers))

    def _kill_started(self) -> None:
        self._find_started()
        for process in self._started:
            process.kill()
        await_end(self._started, _KILLED_S)

    def _new_children(self) -> list[Child]:
        return [child for child in children_of(os.getpid()) if child.process not in self._earlier]
