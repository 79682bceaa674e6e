"""Starts and ends Ray in a thread of its own, and keeps track of the processes that Ray started.

A thread of its own, for three reasons. Ray's servers die with the thread that started them (PR_SET_PDEATHSIG), which
may be a short-lived one of the user's. Ray waits for servers that have died or stand still, for half a minute or for
ever: the caller of the start or the end gets an error instead and goes on. And the servers are found as children.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raypp.actors.processes import LocalProcess, await_end, children_of, with_descendants
from raypp.errors import EngineDeadError, ResourceError

_VITAL = ("gcs_server", "raylet")  # without these nothing goes on; by the names of their programs
_POLL_S = 0.05
_NOTICE_S = 0.5
_ALONE_S = 10.0  # after a server's death, for the engines to be closed; Ray ends the whole process after 60 s
_KILLED_S = 5.0  # for the kernel to take killed processes away
_AFTER_KILL_S = 30.0  # for Ray to notice

_LOG_FOLDER = re.compile(r" --log_dir=(\S+)")
_SEVERE = re.compile(r"^\[[-\d :,]+ [EFC] [^\]]*\] (?:\(\w+\) )?(.+)", re.MULTILINE)  # error, fatal or critical
_LOG_END_BYTES = 1 << 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Server:
    """One of Ray's servers that was started here."""

    name: str
    log_folder: Path | None

    @classmethod
    def of(cls, child: LocalProcess) -> _Server:
        found = _LOG_FOLDER.search(child.command())
        return cls(child.name, None if found is None else Path(found[1]))

    def last_error(self) -> str | None:
        """Return the last error of its log; None: there is none."""
        if self.log_folder is None:
            return None
        try:
            with (self.log_folder / f"{self.name}.out").open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - _LOG_END_BYTES, 0))
                errors = _SEVERE.findall(file.read().decode(errors="replace"))
        except OSError:
            return None
        return errors[-1] if errors else None

    def logs(self) -> str:
        """Return where its logs are."""
        return f"{self.name}.out and {self.name}.err in {self.log_folder or 'logs/ of the session folder of Ray'}"


class RayThread:
    """One connection to Ray, from its start to its end."""

    def __init__(
        self,
        connect: Callable[[Callable[[], bool]], str],
        disconnect: Callable[[str], object],
        is_server: Callable[[LocalProcess], bool],
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
        self._earlier = set(children_of(os.getpid()))
        self._vital: dict[LocalProcess, _Server] = {}
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
                if (dead := self._dead_server()) is not None:
                    raise ResourceError(
                        f"Ray cannot start: its {dead.name} died",
                        got=dead.last_error() or "no error in its log",
                        hint=f"see {dead.logs()}; frequent causes: no memory left, a killed process, "
                        "a machine so busy that the servers of Ray wait for each other too long",
                    )
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

    def death(self) -> EngineDeadError | None:
        """Return the error of a server that was started here and has died; None: there is none."""
        if (dead := self._dead_server()) is None:
            return None
        return EngineDeadError(
            f"Ray's {dead.name} died, and the engine with it",
            got=dead.last_error(),
            hint=f"start a new engine: it starts another Ray; the cause may be in {dead.logs()}",
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
        """Wait until Ray is no longer needed, or one of its servers has died."""
        while not self._leaving.wait(_NOTICE_S):
            if self._dead_server() is not None:
                self._find_started()
                self._leaving.wait(_ALONE_S)
                return

    def _find_vital(self) -> None:
        for child in self._new_children():
            if child.name in _VITAL and child not in self._vital:
                self._vital[child] = _Server.of(child)

    def _dead_server(self) -> _Server | None:
        if self._leaving.is_set():
            return None
        return next((server for process, server in self._vital.items() if not process.is_alive()), None)

    def _find_started(self) -> None:
        self._started.update(with_descendants([child for child in self._new_children() if self._is_server(child)]))

    def _kill_started(self) -> None:
        self._find_started()
        for process in self._started:
            process.kill()
        await_end(self._started, _KILLED_S)

    def _new_children(self) -> list[LocalProcess]:
        return [child for child in children_of(os.getpid()) if child not in self._earlier]
