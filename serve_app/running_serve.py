"""The Ray Serve of a cluster: there is one, with one address, for all applications."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError
from ray.serve._private import api as _api
from ray.serve._private import client as _client
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve.config import ControllerOptions, HTTPOptions
from ray.serve.context import _get_global_client, _set_global_client
from ray.serve.schema import ApplicationStatus, ServeInstanceDetails

from raypp.config.sections import FaultsSection
from raypp.errors import ConfigError
from serve_app.proxy_answers import ENVIRONMENT

_START_S = FaultsSection().start_timeout_s
_END_S = 30.0  # as Ray's own
_POLL_S = 0.1
_ENDED = (ApplicationStatus.NOT_STARTED, ApplicationStatus.DEPLOY_FAILED)

logger = logging.getLogger(__name__)
_SERVES_NOISE = ("Connecting to existing Serve app", "Deleting app ", "Application '")
"""What Serve says of what `raypp serve` does by itself, and tells in its own words."""


def hide_noise() -> None:
    """Keep out of this process's stderr what Serve says of each start and end."""
    logging.getLogger(SERVE_LOGGER_NAME).addFilter(lambda record: not record.getMessage().startswith(_SERVES_NOISE))


def serve_environment(timeout_s: float) -> dict[str, str]:
    """Return what Serve's processes must find in their environment when they start.

    Args:
        timeout_s: How long a proxy may take to start. By itself Serve ends one that takes more than 5 s.
    """
    return {**ENVIRONMENT, "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{_bounded(timeout_s):g}"}


def start_serve(
    host: str, port: int, *, timeout_s: float = _START_S, has_environment: bool = False, **options: Any
) -> None:
    """Start the cluster's Serve, whose proxies answer for replicas that do not.

    Args:
        host: Where it listens.
        port: There.
        timeout_s: How long its proxies may take to start.
        has_environment: Whether Ray itself was started with `serve_environment`. One that is given to Serve alone,
            whose proxies inherit it, costs 40 MiB and 3 s of a CPU: the workers that Ray keeps ready cannot be used.
        options: Others of Serve's `HTTPOptions`.

    Raises:
        TimeoutError, RayError: it does not start.
    """
    wait_for_proxies(timeout_s)
    environment = None if has_environment else {"env_vars": serve_environment(timeout_s)}
    of_controller = ControllerOptions(runtime_env=environment)
    serve.start(http_options=HTTPOptions(host=host, port=port, **options), controller_options=of_controller)


def wait_for_proxies(timeout_s: float) -> None:
    """Set how long this process waits for Serve's proxies: to start, and to know an application.

    Serve (2.60.0) has no setting for it: it waits for a minute.
    """
    for module in (_api, _client):
        setattr(module, "HTTP_PROXY_TIMEOUT", math.ceil(_bounded(timeout_s)))  # noqa: B010, it is not exported


def _bounded(timeout_s: float) -> float:
    """Return a limit that Ray can count in milliseconds: a setting may be infinite."""
    return min(timeout_s, threading.TIMEOUT_MAX)


def end_serve(timeout_s: float = _END_S) -> None:
    """End the cluster's Serve, if there is one, with all that it serves.

    Ray's own `serve.shutdown()` asks the controller for its end and waits for the answer, which the controller's death
    is. As its tasks are retried without limit, Ray then prints that this one failed: here it is asked without retries.

    Args:
        timeout_s: How long it may take; then it is left as it is, and a warning says so.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    client.shutdown_cached_handles()  # type: ignore[no-untyped-call]
    try:
        ray.get(client._controller.graceful_shutdown.options(max_task_retries=0).remote(), timeout=timeout_s)
    except RayActorError:
        pass  # it has ended
    except GetTimeoutError:
        logger.warning("Ray Serve does not end within %g s", timeout_s)
    _set_global_client(None)  # type: ignore[no-untyped-call]


def delete_application(name: str, timeout_s: float) -> None:
    """Remove an application once its answers have ended, which the proxies carry meanwhile.

    Args:
        name: Of the application.
        timeout_s: How long that may take; then it is left to end by itself, and a warning says so.
    """
    serve.delete(name, _blocking=False)
    deadline_s = time.monotonic() + timeout_s
    while (running := RunningServe.of_this_cluster()) is not None and name in running.apps:
        if time.monotonic() > deadline_s:
            logger.warning("the application %s does not end within %g s", name, timeout_s)
            return
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class RunningServe:
    """Where it listens, and what it serves."""

    host: str
    port: int
    apps: Mapping[str, str]
    """Route prefixes by the names of the applications."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """Of applications that do not run as they should, what Serve says of their deployments."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The others of its options of HTTP."""

    @classmethod
    def of_this_cluster(cls) -> Self | None:
        """Return the one that runs; None without one."""
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            return None
        details = ServeInstanceDetails(**client.get_serve_details())
        apps = {name: app.route_prefix or "" for name, app in details.applications.items() if app.status not in _ENDED}
        troubles = {
            name: "\n".join(deployment.message for deployment in app.deployments.values() if deployment.message)
            for name, app in details.applications.items()
            if app.status != ApplicationStatus.RUNNING
        }
        http = details.http_options
        assert http is not None
        return cls(http.host, http.port, apps, troubles, http.model_dump())

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse options that it does not have: they hold from its start.

        Raises:
            ConfigError: the first of them.
        """
        for name, value in options.items():
            if (own := self.options.get(name)) != value:
                raise ConfigError(
                    f"Ray Serve runs on this cluster already, with another {name}",
                    got=repr(value),
                    expected=repr(own),
                    hint=f"give it {name} where Serve is started, or use another cluster",
                )

    def check_place(self, host: str, port: int, app_name: str, route_prefix: str) -> None:
        """Refuse a place that another application has: deploying there would replace what is served.

        Raises:
            ConfigError: the name or the prefix is taken, or Serve listens somewhere else.
        """
        scheme = "https" if self.options.get("ssl_certfile") else "http"
        if app_name in self.apps:
            raise ConfigError(
                "an application of this name is served on this cluster already",
                got=f"{app_name} at {scheme}://{self.host}:{self.port}{self.apps[app_name]}",
                hint="--app-name NAME --route-prefix /NAME serves another one beside it; "
                f"ray.serve.delete({app_name!r}) removes one whose command was killed",
            )
        other = next((name for name, prefix in self.apps.items() if prefix == route_prefix), None)
        if other is not None:
            raise ConfigError(
                "this path is another application's on this cluster",
                got=f"--route-prefix {route_prefix}, which is {other}'s",
                hint="choose another with --route-prefix",
            )
        if (host, port) != (self.host, self.port):
            raise ConfigError(
                "Ray Serve runs on this cluster already, and has one address",
                got=f"{host}:{port}",
                expected=f"{self.host}:{self.port}",
                hint=f"--host {self.host} --port {self.port}, or another cluster",
            )
