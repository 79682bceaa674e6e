"""Gives the agents of a Ray that is started here their ports.

A raylet (Ray 2.60.0) starts its agents and waits for the ports that they choose: 15 s for each, without a setting, and
then it ends. Agents are programs in Python; on a busy machine their imports take longer. A port that is given is not
waited for, but `ray.init` takes one of four, and of the others one reaches its agent and not the raylet.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

from ray._private import parameter, ray_constants, services

_PORTS = range(20_000, 32_768)
"""Below those that Linux gives to connections; above those that Ray gives to workers."""
_OF_THE_DASHBOARD = "dashboard_agent_listen_port"
_AGENT_PORTS = ("metrics_agent_port", "runtime_env_agent_port", _OF_THE_DASHBOARD)


@contextmanager
def given_agent_ports() -> Iterator[int]:
    """Have Ray start with given ports for its agents while this is entered; yields one more, for `ray.init`."""
    *given, of_metrics = _free_ports(len(_AGENT_PORTS) + 1)
    ports: dict[str, Any] = dict(zip(_AGENT_PORTS, given, strict=True))
    start_process: Callable[..., Any] = services.start_ray_process

    def start(command: list[str], process_type: str, *args: Any, **options: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = [*command, f"--{_OF_THE_DASHBOARD}={ports[_OF_THE_DASHBOARD]}"]
        return start_process(command, process_type, *args, **options)

    with (
        patch.object(parameter, "RayParams", partial(parameter.RayParams, **ports)),
        patch.object(services, "start_ray_process", start),
    ):
        yield of_metrics


def _free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens at the moment."""
    with ExitStack() as probes:
        found: list[int] = []
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            probe = probes.enter_context(socket.socket())
            with suppress(OSError):  # taken
                probe.bind(("", port))
                found.append(port)
                if len(found) == count:
                    return found
    raise OSError(f"no {count} free ports from {_PORTS.start} to {_PORTS.stop - 1}")
