"""The part of an engine's handle about its lives: the present one, restarts, watchers."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic

from raypp.config.engine_config import EngineConfig, check_change
from raypp.errors import ConfigError, RayppError
from raypp.plan.engine_plan import EnginePlan
from raypp.supervision.supervisor import LifeT, Supervisor

logger = logging.getLogger(__name__)


class SupervisedEngine(ABC, Generic[LifeT]):
    """An `EngineHandle` but for processes and its end.

    Attributes:
        model_info: What clients must know of the model.
    """

    def __init__(
        self,
        plan: EnginePlan,
        first: LifeT,
        *,
        obstacle: Callable[[], RayppError | None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with an engine that runs.

        Args:
            plan: Of its first life.
            first: That life.
            obstacle: See `Supervisor`.
            on_end: See there, too.
        """
        self.model_info = plan.model_info()
        self._plan = plan
        self._asked: EnginePlan | None = None  # of the next life, by `restart`
        self._refusal: RayppError | None = None  # why it could not start under that
        self._restart_lock = threading.Lock()
        self._supervisor = Supervisor(first, self._start_next, plan.config.faults, obstacle=obstacle, on_end=on_end)
        self.watch, self.report_death = self._supervisor.watch, self._supervisor.report_death
        self.excuse_restarts, self.recoveries = self._supervisor.excuse_restarts, self._supervisor.recoveries

    @property
    def client_address(self) -> str:
        """The zmq address that clients connect to, of the present life."""
        return self._supervisor.life.client_address

    @property
    def config(self) -> EngineConfig:
        """The configuration of the present life."""
        return self._plan.asked

    def plan(self) -> dict[str, Any]:
        """Return layers, bytes and blocks per stage."""
        return self._plan.describe()

    def restart(self, config: EngineConfig) -> None:
        """Start the engine again as configured, under its requests; see `raypp.api.launch.EngineHandle`."""
        with self._restart_lock:
            check_change(self._plan.asked, config)
            plan = self._make_plan(config)
            if (room := _longest_request(plan)) < (wanted := _longest_request(self._plan)):
                raise ConfigError(
                    "the KV cache would be too small for requests that the engine has taken",
                    got=f"{room} tokens of one request",
                    expected=f"at least {wanted}",
                    hint="more memory for the KV cache (kv_cache_bytes, num_kv_blocks, gpu_memory_utilization)",
                )
            self._asked, self._refusal = plan, None
            self._supervisor.restart()
            if self._refusal is not None:
                raise self._refusal

    @abstractmethod
    def _make_plan(self, config: EngineConfig) -> EnginePlan:
        """Return the plan for another configuration on the hardware that there is.

        Raises:
            ConfigError, ResourceError: it could not run.
        """

    @abstractmethod
    def _start_life(self) -> LifeT:
        """Start the next life, under the present plan; see `Supervisor`."""

    def _start_next(self) -> LifeT:
        asked, self._asked = self._asked, None
        if asked is not None:
            before, self._plan = self._plan, asked
            try:
                return self._start_life()
            except RayppError as error:
                if self._supervisor.is_closing.is_set():
                    raise
                logger.warning("the engine does not start as asked, and goes on as before: %s", error)
                self._refusal, self._plan = error, before
        return self._start_life()


def _longest_request(plan: EnginePlan) -> int:
    """Return the most tokens that a request can have."""
    limits = plan.scheduler_limits()
    return min(limits.max_model_len, limits.max_request_tokens)
