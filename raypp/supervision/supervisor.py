"""Decides whether an engine that has died is started again, has that done, and notifies its watchers.

    running --a death is reported--> restarting --it has started--> running, in its next life
                |                      |    ^
                |                      +----+ dies while it starts
                +---> dead <-----------+      restarts are used up, or it cannot start

Each life has another address, so that reports about an earlier life are recognized.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from raypp.config.sections import FaultsSection
from raypp.errors import DeadlineError, EngineDeadError, RayppError


@dataclass(frozen=True)
class StartTimes:
    """What the last start of an engine took, by part.

    Attributes:
        num_kept_stages: Stages that kept their process and their weights.
        weights_s: Until all stages had their weights. Seconds.
        links_and_graphs_s: Until they were linked, had warmed up and captured their graphs. Seconds.
    """

    num_kept_stages: int = 0
    weights_s: float = 0.0
    links_and_graphs_s: float = 0.0


@dataclass(frozen=True)
class Recovery:
    """One pause of an engine: parts of it died, and it was started again.

    Attributes:
        died: Which part died and why: the error of the first death; or that it was restarted on purpose.
        notice_s: From the last sign of life, as far as the reporter of the death knows it, to the decision. Seconds.
        end_s: Until nothing was left of the old engine. Seconds.
        start_s: Until a new one could be used, waiting for room and starts that failed included. Seconds.
        num_starts: How many starts it took.
        num_lost_nodes: How many of the machines that it ran on were gone then.
        last_start: Parts of the last one.
    """

    died: str
    notice_s: float
    end_s: float
    start_s: float
    num_starts: int = 1
    num_lost_nodes: int = 0
    last_start: StartTimes = StartTimes()

    @property
    def total_s(self) -> float:
        """All of the pause, without what clients need to hand their requests over. Seconds."""
        return self.notice_s + self.end_s + self.start_s


class EngineWatcher(Protocol):
    """Is notified when an engine dies and comes back.

    Called from threads of the engine's owner, one call at a time; must return soon.
    """

    def engine_lost(self, error: RayppError | None) -> None:
        """A part died. The engine is being started again: `engine_back` or `engine_dead` follows.

        Args:
            error: What it died of; None: it is replaced on purpose.
        """

    def engine_back(self, client_address: str, *, is_explained: bool) -> None:
        """It runs again, at this address.

        Args:
            client_address: Of its driver.
            is_explained: Whether it is known that it died of no request: it was replaced on purpose, or lost a node.
        """

    def engine_dead(self, error: RayppError) -> None:
        """It is gone for good: its restarts are used up, or it cannot start. Nothing follows."""


logger = logging.getLogger(__name__)


class Life(Protocol):
    """An engine from one start to its end."""

    @property
    def client_address(self) -> str:
        """The zmq address of its driver. No other life has the same."""

    @property
    def start_times(self) -> StartTimes:
        """How long its start took, by part."""

    def num_lost_nodes(self) -> int:
        """Return how many of the machines that it was started on are gone by now."""

    def watch(self, on_death: Callable[[RayppError], None]) -> None:
        """Call back, from another thread, when it dies; also if it has died already."""

    def end(self) -> None:
        """End what is left of it, at once. Doing so twice does nothing."""


LifeT = TypeVar("LifeT", bound=Life)


@dataclass(frozen=True)
class _Death:
    error: RayppError | None  # None: it is replaced on purpose
    last_sign_s: float  # when the dead one was last known to live, by the clock

    def __str__(self) -> str:
        return "it was restarted on purpose" if self.error is None else str(self.error)


class Supervisor(Generic[LifeT]):
    """Restarts one engine when it dies, from its own thread."""

    def __init__(
        self,
        first: LifeT,
        start_next: Callable[[], LifeT],
        faults: FaultsSection,
        *,
        obstacle: Callable[[], RayppError | None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with an engine that runs.

        Args:
            first: Its first life.
            start_next: Starts the next one and returns it. What it raises leaves nothing behind: EngineDeadError and
                DeadlineError say that the new engine died as it started, everything else that it cannot start. It
                raises soon once `is_closing` is set.
            faults: How many restarts there may be.
            obstacle: Returns why no restart can help, whatever it was that died; None while one can.
            on_end: Called when the engine has died for good: nothing that was kept for another life is wanted.
            clock: In seconds.
        """
        self.is_closing = threading.Event()
        self._life = first
        self._start_next = start_next
        self._faults = faults
        self._obstacle = obstacle
        self._on_end = on_end
        self._clock = clock
        self._lock = threading.RLock()  # of all that follows; held while watchers are notified, which keeps the order
        self._reported = threading.Condition(self._lock)
        self._watchers: list[EngineWatcher] = []
        self._death: _Death | None = None  # of the present life, while nothing has come of it
        self._final: RayppError | None = None
        self._restarts: deque[float] = deque()  # when each that counts began
        self._recoveries: list[Recovery] = []
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)
        self._thread.start()
        self._watch(first)

    @property
    def life(self) -> LifeT:
        """The present life; while the engine restarts, the one that has ended."""
        with self._lock:
            return self._life

    @property
    def is_running(self) -> bool:
        """Whether the present life is not known to have died."""
        with self._lock:
            return self._death is None

    @property
    def num_restarts_left(self) -> int:
        """How many more there may be now."""
        with self._lock:
            while self._restarts and self._clock() - self._restarts[0] > self._faults.restart_window_s:
                self._restarts.popleft()
            return self._faults.max_engine_restarts - len(self._restarts)

    def recoveries(self) -> list[Recovery]:
        """Return the engine's pauses, oldest first."""
        with self._lock:
            return list(self._recoveries)

    def watch(self, watcher: EngineWatcher) -> None:
        """Notify a watcher from now on; if the engine does not run now, before this returns."""
        with self._lock:
            self._watchers.append(watcher)
            if self._final is not None:
                watcher.engine_dead(self._final)
            elif self._death is not None:
                watcher.engine_lost(self._death.error)

    def report_death(self, error: RayppError, client_address: str) -> None:
        """Take in a report that a life has died; see `raypp.api.launch.EngineHandle`."""
        with self._lock:
            if self._death is None and client_address == self._life.client_address and not self.is_closing.is_set():
                silent_s = error.silent_s if isinstance(error, EngineDeadError) else 0.0
                self._death = _Death(error, self._clock() - silent_s)
                self._reported.notify_all()

    def restart(self) -> None:
        """Replace the present life by the next, which is not counted; return when that runs.

        Raises:
            EngineDeadError: the engine died for good, or was closed.
        """
        with self._lock:
            self._await_life()
            self._death = _Death(None, self._clock())
            self._reported.notify_all()
            self._await_life()

    def excuse_restarts(self, count: int) -> None:
        """Count the latest restarts no longer; see `raypp.api.launch.EngineHandle`."""
        with self._lock:
            for _ in range(min(count, len(self._restarts))):
                self._restarts.pop()

    def stop(self, timeout_s: float) -> bool:
        """Start no life and notify no watcher any more; return whether what was under way has ended.

        Args:
            timeout_s: How long it is waited for.
        """
        with self._lock:
            self.is_closing.set()
            self._reported.notify_all()
        if threading.current_thread() is self._thread:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _await_life(self) -> None:
        """Wait until the engine runs."""
        while self._death is not None and self._final is None and not self.is_closing.is_set():
            self._reported.wait()
        if self._final is not None:
            raise self._final
        if self.is_closing.is_set():
            raise EngineDeadError("the engine was closed", hint="start a new engine")

    def _run(self) -> None:
        while (death := self._next_death()) is not None:
            try:
                final = None if death.error is None else self._reason_to_give_up(death.error)
                final = final or self._recover(death)
            except Exception as error:  # watchers that wait for the engine must be notified
                logger.exception("the engine cannot be started again")
                final = _cannot_start(death, error)
            if final is not None:
                self._give_up(final)
                if not self.is_closing.is_set():
                    self._on_end()
                return

    def _next_death(self) -> _Death | None:
        """Wait for one; None when the engine is closed."""
        with self._lock:
            while self._death is None and not self.is_closing.is_set():
                self._reported.wait()
            return None if self.is_closing.is_set() else self._death

    def _reason_to_give_up(self, error: RayppError) -> RayppError | None:
        """Return the error to end with; None if there is to be a restart, which is then counted."""
        if (obstacle := self._obstacle()) is not None:
            return obstacle
        with self._lock:
            if not self.num_restarts_left:
                return error
            faults = self._faults
            self._restarts.append(self._clock())
            count = len(self._restarts)
        logger.warning(
            "%s; the engine is started again (%d of max_engine_restarts=%d within %g s)",
            error,
            count,
            faults.max_engine_restarts,
            faults.restart_window_s,
        )
        return None

    def _recover(self, death: _Death) -> RayppError | None:
        """Replace the life that has died; return the error to end with if that is impossible."""
        self._tell(lambda watcher: watcher.engine_lost(death.error))
        noticed_s = self._clock()
        self._life.end()
        ended_s = self._clock()
        num_starts = 0
        while not self.is_closing.is_set():
            num_starts += 1
            try:
                life = self._start_next()
            except Exception as error:
                if self.is_closing.is_set():
                    return None
                if not isinstance(error, EngineDeadError | DeadlineError):
                    return _cannot_start(death, error)
                if (final := self._reason_to_give_up(error)) is not None:
                    return final
                continue
            started_s = self._clock()
            self._go_on(
                life,
                death,
                Recovery(
                    str(death),
                    num_lost_nodes=self._life.num_lost_nodes(),
                    notice_s=noticed_s - death.last_sign_s,
                    end_s=ended_s - noticed_s,
                    start_s=started_s - ended_s,
                    num_starts=num_starts,
                    last_start=life.start_times,
                ),
            )
            return None
        return None

    def _go_on(self, life: LifeT, death: _Death, recovery: Recovery) -> None:
        is_explained = death.error is None or recovery.num_lost_nodes > 0
        with self._lock:
            is_wanted = not self.is_closing.is_set()
            if is_wanted:
                self._life, self._death = life, None
                self._recoveries.append(recovery)
                logger.warning(
                    "the engine runs again after %.1f s (notice %.1f s, end %.1f s, start %.1f s, starts: %d, "
                    "stages that kept their weights: %d, "
                    "lost nodes: %d): %s",
                    recovery.total_s,
                    recovery.notice_s,
                    recovery.end_s,
                    recovery.start_s,
                    recovery.num_starts,
                    recovery.last_start.num_kept_stages,
                    recovery.num_lost_nodes,
                    recovery.died,
                )
                self._tell(lambda watcher: watcher.engine_back(life.client_address, is_explained=is_explained))
                self._reported.notify_all()
        if is_wanted:
            self._watch(life)
        else:
            life.end()

    def _give_up(self, error: RayppError) -> None:
        with self._lock:
            self._final = error
            self._reported.notify_all()
            self._tell(lambda watcher: watcher.engine_dead(error))

    def _watch(self, life: LifeT) -> None:
        life.watch(lambda error: self.report_death(error, life.client_address))

    def _tell(self, call: Callable[[EngineWatcher], None]) -> None:
        with self._lock:
            if self.is_closing.is_set():
                return
            for watcher in self._watchers:
                try:
                    call(watcher)
                except Exception:  # of a user's: the engine and the others go on
                    logger.exception("a watcher of the engine failed")


def _cannot_start(death: _Death, error: Exception) -> EngineDeadError:
    said = str(error) if isinstance(error, RayppError) else repr(error)
    return EngineDeadError(
        f"the engine cannot be started again after its end: {said}",
        got=f"its end: {death}",
        hint="make what is missing available, and start a new engine",
    )
