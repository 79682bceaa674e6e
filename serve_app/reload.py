"""`raypp serve` reads its configuration again, and has every replica's engine follow, under its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from raypp.config.engine_config import EngineConfig, changed_settings
from raypp.errors import RayppError

ENGINE = "engine"
"""The deployment whose replicas own engines."""

_ANSWER_S = 60.0  # for a replica to answer beside what its engine may take to start


class _Messenger:
    """Speaks to replicas, in a process of its own: Serve's handles listen to its controller until their process ends.

    Ray would tell of that as a failure when the server stops.
    """

    def restart(self, app_name: str, config: EngineConfig, timeout_s: float) -> list[str]:
        """Have all engines follow a configuration; return what kept some from it."""
        handle = serve.get_deployment_handle(ENGINE, app_name)
        answers = handle.broadcast("restart", config).results(timeout_s=timeout_s, return_exceptions=True)
        return [str(answer) for answer in answers if answer is not None]


class Reload:
    """Knows which configuration the engines follow."""

    def __init__(self, config: EngineConfig, read_again: Callable[[], EngineConfig], app_name: str) -> None:
        """Begin with a configuration.

        Args:
            config: The first one.
            read_again: Returns what is configured now.
            app_name: Of the application.
        """
        self._config = config
        self._read_again = read_again
        self._app_name = app_name

    def run(self) -> str:
        """Have the engines follow what is configured now; return what came of it, in words. Blocks while they start."""
        try:
            config = self._read_again()
        except RayppError as error:
            return f"the configuration cannot be read again: {error}"
        changes = changed_settings(self._config, config)
        if not changes:
            return "the configuration is what it was"
        timeout_s = config.faults.start_timeout_s + config.faults.restart_wait_s + _ANSWER_S
        messenger: Any = ray.remote(_Messenger).options(num_cpus=0).remote()
        try:
            failures = ray.get(messenger.restart.remote(self._app_name, config, timeout_s), timeout=timeout_s)
        except (TimeoutError, RuntimeError, ray.exceptions.RayError) as error:
            return f"the replicas did not answer: {error}"
        finally:
            ray.kill(messenger)
        if failures:
            return f"the engine goes on as it was: {failures[0]}"
        self._config = config
        return "the engine runs with " + ", ".join(f"{name} = {new!r}" for name, (_, new) in changes.items())
