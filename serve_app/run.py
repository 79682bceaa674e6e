"""The short way to a server: `raypp serve` deploys the application on Ray, and waits until it is told to stop."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable

from ray import serve
from ray.serve.config import HTTPOptions

from raypp.actors.cluster import Cluster
from raypp.actors.engine import describe_engine
from raypp.config.engine import EngineConfig
from raypp.errors import ConfigError, EngineDeadError
from serve_app.app import build_application
from serve_app.settings import ServeSettings

APP_NAME = "raypp"

logger = logging.getLogger(__name__)


def run_server(
    config: EngineConfig,
    settings: ServeSettings,
    *,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; then take down what was started.

    Args:
        config: Of the engine.
        settings: Of the door.
        host: The address to listen at.
        port: Its port.
        on_ready: Called with the server's address once it can be used.

    Raises:
        ConfigError: settings that cannot be, or a port that is taken.
        ModelLoadError, ResourceError: the engine could not run.
        EngineDeadError: it did not start.
    """
    describe_engine(config)  # what is wrong with it is said now, not by replicas that try again and again
    stop = threading.Event()
    cluster = Cluster.connect()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        was_running = bool(serve.status().proxies)
        if was_running:
            logger.warning("Ray Serve runs already: it keeps its own host and port")
        else:
            _check_port(host, port)
            serve.start(http_options=HTTPOptions(host=host, port=port))
        try:
            _deploy(config, settings, stop, lambda: on_ready(f"http://{host}:{port}"))
        finally:
            if was_running:
                serve.delete(APP_NAME)
            else:
                serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        cluster.disconnect()
        for number, handler in before.items():
            signal.signal(number, handler)


def _deploy(config: EngineConfig, settings: ServeSettings, stop: threading.Event, on_ready: Callable[[], None]) -> None:
    try:
        serve.run(build_application(config, settings), name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        raise EngineDeadError(
            "Ray Serve could not deploy the application",
            got=str(error).strip().splitlines()[0],
            hint="the replica's log in Ray's session folder says more",
        ) from error
    if not stop.is_set():
        on_ready()
    stop.wait()


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "the port cannot be used", got=f"{host}:{port}: {error}", hint="choose another with --port"
            ) from error
