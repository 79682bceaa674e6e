"""The short way to a server: `raypp serve` deploys the application on Ray, and waits for a signal to stop.

SIGINT and SIGTERM are granted in time: a stopped Ray job has three seconds. SIGHUP asks to read the configuration again
and to have every engine follow it, under its requests, unless the terminal is gone: then it is a request to stop, too.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import ray
from ray import serve
from ray.exceptions import RayError

from raypp.actors.cluster import Cluster, hide_log_lines
from raypp.actors.deadline import in_short
from raypp.api.launch import load_tokenizer
from raypp.config.engine_config import EngineConfig, changed_settings
from raypp.config.http_settings import HttpAddress, HttpSettings
from raypp.errors import ConfigError, EngineDeadError, RayppError
from raypp.openai_api.syntaxes import check_parsers
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from serve_app.app import ENGINE, build_application, end_timeout_s
from serve_app.running_serve import (
    RunningServe,
    delete_application,
    end_serve,
    hide_noise,
    serve_environment,
    start_serve,
    wait_for_proxies,
)

STOP_TIMEOUT_S = 2.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Notes the first signal; the second one ends the process. To be entered in the main thread.

    A thread of its own acts: Python's handlers run in the main thread, which does not run them while it waits in C, or
    where a signal comes just before it begins to wait.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.is_connected = False
        """Whether there is anything to take down; without, the process ends at once."""
        self.has_started = False
        """Whether something is served: its end may take the time that it takes, while what starts is not waited for."""
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wants_reload = False
        self._had_terminal = _has_terminal()
        self._timer: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._fd_before = -1
        self._reading, self._written = socket.socketpair()
        self._written.setblocking(False)

    def listen(self) -> None:
        """Take the signals, again if other code took them meanwhile."""
        for number in (*_SIGNALS, signal.SIGHUP):
            signal.signal(number, _leave_to_the_thread)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)

    def take_reload(self) -> bool:
        """Return whether the configuration is to be read again, since the last call."""
        wanted, self._wants_reload = self._wants_reload, False
        return wanted

    def wait(self, timeout_s: float | None = None) -> None:
        """Return after a signal, and when another thread calls `wake`. Look for what has changed after every return.

        Args:
            timeout_s: The longest to wait; None: for ever.
        """
        with contextlib.suppress(queue.Empty):
            self._changes.get(timeout=timeout_s)

    def wake(self) -> None:
        """Have the waiting thread look."""
        self._changes.put(None)

    def exit(self) -> NoReturn:
        """End the process with the signal's exit code, 130 or 143."""
        assert self.received is not None
        _exit_now(self.received)

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGHUP)}
        self._fd_before = signal.set_wakeup_fd(-1)
        threading.Thread(target=self._act, name="signals", daemon=True).start()
        self.listen()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._written.close()  # ends the thread

    def _act(self) -> None:
        with self._reading:
            while numbers := self._reading.recv(64):
                for number in numbers:
                    if number == signal.SIGHUP:
                        self._on_hangup()
                    elif number in _SIGNALS:
                        self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if self.received is not None or not self.is_connected:
            _exit_now(number)
        self.received = signal.Signals(number)
        if not self.has_started:  # what starts may hang: it is not waited for
            self._timer = threading.Timer(STOP_TIMEOUT_S, _exit_now, [number])
            self._timer.daemon = True
            self._timer.start()
        self._changes.put(None)

    def _on_hangup(self) -> None:
        if self._had_terminal and not _has_terminal():
            self._on_signal(signal.SIGHUP)
            return
        self._wants_reload = True
        self._changes.put(None)


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: without a handler a signal would not be written to `signal.set_wakeup_fd`."""


def _has_terminal() -> bool:
    """Return whether this process has a terminal that signals can come from."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _exit_now(number: int) -> NoReturn:
    """End without ado; a local Ray ends with this process."""
    print(f"raypp: stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


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


_LOOK_S = 1.0
_NOTICE_S = 0.1
_DELETE_S = 10.0
"""For Serve to notice that an application's replicas have ended."""


def run_server(
    config: EngineConfig,
    settings: HttpSettings,
    *,
    address: HttpAddress,
    on_ready: Callable[[str], None],
    read_again: Callable[[], EngineConfig],
) -> None:
    """Serve until SIGINT or SIGTERM; then take down what was started. To be called in the main thread.

    After SIGHUP the engine goes on under the configuration as it is then.

    A signal that comes before it serves ends the process, with exit code 130 or 143.

    Args:
        config: Of the engine.
        settings: Of the server.
        address: Where to serve.
        on_ready: Called with the server's address once it can be used.
        read_again: Returns the configuration as it is now.

    Raises:
        ConfigError: settings that cannot be, a port that is taken, or a name or path on the cluster that is.
        ModelLoadError, ResourceError: the engine could not run.
        EngineDeadError: it did not start.
    """
    # What is wrong with it is said now, not by replicas that try again and again.
    starts_ray = not ray.is_initialized() and not os.environ.get("RAY_ADDRESS")
    if starts_ray:  # else a Serve of the cluster's may have the port, and take the application
        _check_port(address.host, address.port)
    settings.keys()
    plan_engine(config, Hardware.of_this_machine())
    load_tokenizer(config)
    check_parsers(config.model.tool_call_parser, config.model.reasoning_parser)
    with StopSignals() as stop:
        if starts_ray:
            # Ray's processes inherit it; a value of the user's own counts.
            os.environ.update(serve_environment(config.faults.start_timeout_s) | os.environ)
        cluster = Cluster.connect(shows_logs=True)
        try:
            stop.is_connected = True
            stop.listen()  # again: Ray's core takes SIGTERM for itself
            hide_noise()
            reload = Reload(config, read_again, address.app_name)
            _serve(config, settings, address, stop, on_ready, cluster, reload, started_ray=starts_ray)
        finally:
            cluster.disconnect()
        _say("stopped")


def _serve(
    config: EngineConfig,
    settings: HttpSettings,
    address: HttpAddress,
    stop: StopSignals,
    on_ready: Callable[[str], None],
    cluster: Cluster,
    reload: Reload,
    *,
    started_ray: bool,
) -> None:
    running = RunningServe.of_this_cluster()
    if running is None:
        _check_port(address.host, address.port)
    else:
        running.check_place(address.host, address.port, address.app_name, address.route_prefix)
        running.check_options(address.of_serve)
    timeout_s = config.faults.start_timeout_s
    start = (
        partial(wait_for_proxies, timeout_s)
        if running
        else partial(
            start_serve,
            address.host,
            address.port,
            timeout_s=timeout_s,
            has_environment=started_ray,
            **address.of_serve,
        )
    )
    # Ray Serve waits for minutes and takes no signals meanwhile.
    starting = _begun("raypp-serve", partial(_start, config, settings, address, stop, start))
    starting.add_done_callback(lambda _: stop.wake())
    try:
        while stop.received is None and not starting.done():
            stop.wait()
        if stop.received is None:
            _check_started(starting, address.app_name)
            stop.has_started = True
            on_ready(address.url)
        health = _Health(address.app_name)
        while stop.received is None:
            stop.wait(_LOOK_S)
            if stop.take_reload() and stop.received is None:
                _say("SIGHUP: the configuration is read again")
                _say(reload.run())
            if stop.received is None:
                health.look(RunningServe.of_this_cluster())
    finally:
        end_s = end_timeout_s(config, settings) if stop.has_started else 0.0
        if stop.received is not None:
            hide_log_lines()  # what its engine says of processes that are ended now would look like failures
        if end_s and stop.received is not None:
            _say(f"stopping: running requests have at most {end_s:g} s; Ctrl-C again stops at once")
        _while_useful(cluster, partial(_take_down, address.app_name, started_serve=running is None, timeout_s=end_s))
        if not stop.has_started and stop.received is not None:
            stop.exit()  # the thread may wait for minutes; a Ray that was started here ends with this process


class _Health:
    """Says when the application stops serving as it should, and when it does so again."""

    def __init__(self, app_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._app_name = app_name
        self._clock = clock
        self._since_s: float | None = None  # it does not serve as it should

    def look(self, running: RunningServe | None) -> None:
        """Take in what Serve says now; None: there is no Serve."""
        if running is None or self._app_name in running.troubles:
            if self._since_s is None:
                self._since_s = self._clock()
                _say("a replica does not serve; Ray Serve replaces it")
        elif self._since_s is not None:
            _say(f"serving again after {self._clock() - self._since_s:.0f} s")
            self._since_s = None


def _begun(name: str, work: Callable[[], None]) -> Future[None]:
    """Do something in a thread of its own, for whose end neither signals nor the process's end wait."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            work()
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def _start(
    config: EngineConfig,
    settings: HttpSettings,
    address: HttpAddress,
    stop: StopSignals,
    start_serve: Callable[[], None],
) -> None:
    start_serve()
    if stop.received is None:
        serve.run(build_application(config, settings), name=address.app_name, route_prefix=address.route_prefix)


def _check_started(starting: Future[None], app_name: str) -> None:
    """Raise what kept the application from starting."""
    try:
        starting.result()
    except (RuntimeError, TimeoutError, RayError) as error:
        running, node = RunningServe.of_this_cluster(), ray._private.worker._global_node
        logs = "logs/ in Ray's session folder" if node is None else node.get_logs_dir_path()
        said = "" if running is None else running.troubles.get(app_name, "")
        raise EngineDeadError(
            "Ray Serve could not deploy the application",
            got=cause_of(said) or in_short(error),
            hint=f"logs: {logs}; a machine that is only slow needs a larger start_timeout_s",
        ) from error


def cause_of(said: str) -> str | None:
    """Return the exception in what Serve says of a replica that does not start; None: there is none."""
    found = re.findall(r"^(?:ray\.exceptions\.)?[\w.]*(?:Error|Exception)\b: .*", said, re.MULTILINE)
    return None if not found else str(found[-1])


def _say(text: str) -> None:
    print(f"raypp: {text}", file=sys.stderr, flush=True)


def _while_useful(cluster: Cluster, action: Callable[[], None]) -> None:
    """Do something with Ray, and leave it when Ray dies: a signal to the whole process group ends its servers, too.

    Raises:
        Exception: whatever the action raises while Ray lives.
    """
    acting = _begun("raypp-take-down", action)  # Ray may keep it for half a minute
    while not acting.done() and cluster.is_useful():
        wait([acting], _NOTICE_S)
    if acting.done() and cluster.is_useful():
        acting.result()


def _take_down(app_name: str, *, started_serve: bool, timeout_s: float) -> None:
    """Remove the application, and Ray Serve if it was started for it and serves nothing else by now.

    Args:
        app_name: The application.
        started_serve: Whether Serve was started for it.
        timeout_s: How long running requests and the replicas may take; 0 for an application that never served.
    """
    running = RunningServe.of_this_cluster()
    if running is None:
        return
    ends_serve = started_serve and set(running.apps) <= {app_name}
    if timeout_s or not ends_serve:
        # Serve's own end kills its proxies first, and with them the connections of running requests.
        delete_application(app_name, timeout_s + _DELETE_S)
    if ends_serve:
        end_serve()


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "the port cannot be used", got=f"{host}:{port}: {error}", hint="choose another with --port"
            ) from error
