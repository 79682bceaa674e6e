"""Starting and ending Ray, with sleeping processes in place of its servers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raypp.actors import ray_thread
from raypp.actors.processes import LocalProcess
from raypp.actors.ray_thread import RayThread
from raypp.errors import EngineDeadError, ResourceError

WAIT_S = 20.0


class FakeRay:
    """A Ray whose only server sleeps. It is told what to do when it starts and when it ends."""

    def __init__(self, program: Path) -> None:
        self.may_connect, self.may_disconnect = threading.Event(), threading.Event()
        self.is_serving = threading.Event()
        self.may_connect.set()
        self.may_disconnect.set()
        self.threads: list[threading.Thread] = []
        self.error: Exception | None = None
        self._program = program
        self.thread = RayThread(self.connect, self.disconnect, lambda child: child.name == program.name)

    def connect(self, is_wanted: Callable[[], bool]) -> str:
        self.is_wanted = is_wanted
        self.threads.append(threading.current_thread())
        waits = [self._program, "-c", "read -t 1000", "server", f"--log_dir={self._program.parent}"]
        self.server = subprocess.Popen(waits, stdin=subprocess.PIPE)
        self.is_serving.set()
        assert self.may_connect.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return "a session"

    def disconnect(self, name: str) -> None:
        assert name == "a session"
        assert self.may_disconnect.wait(WAIT_S) or self.server.poll() is not None
        self.server.kill()
        self.server.wait()

    def disconnect_when_dead(self, _: str) -> None:
        assert self.server.wait(WAIT_S)


@pytest.fixture
def make_ray(tmp_path: Path) -> Iterator[Callable[[str], FakeRay]]:
    made: list[FakeRay] = []

    def make(name: str = "raylet") -> FakeRay:
        shell = shutil.which("bash")
        assert shell is not None
        shutil.copy(shell, tmp_path / name)
        made.append(FakeRay(tmp_path / name))
        return made[-1]

    yield make
    for ray in made:
        ray.may_connect.set()
        ray.may_disconnect.set()
        assert ray.thread.stop(WAIT_S)
        ray.server.communicate(timeout=WAIT_S)  # closes its pipe, too


def test_the_thread_that_starts_the_servers_lives_as_long(make_ray: Callable[..., FakeRay]) -> None:
    """A server dies with the thread that started it."""
    ray = make_ray()
    user = threading.Thread(target=ray.thread.start)
    user.start()
    user.join(WAIT_S)
    assert ray.thread.is_useful()
    assert ray.thread.name == "a session"
    assert ray.threads[0] is not user
    assert ray.threads[0].is_alive()
    assert ray.thread.death() is None
    assert ray.thread.stop(WAIT_S)
    assert not ray.thread.is_useful()


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_server_that_dies_during_the_start_is_named_at_once(make_ray: Callable[..., FakeRay], name: str) -> None:
    ray = make_ray(name)
    ray.may_connect.clear()

    def kill() -> None:
        assert ray.is_serving.wait(WAIT_S)
        assert ray.is_wanted()
        ray.server.kill()

    threading.Thread(target=kill).start()
    with pytest.raises(ResourceError, match=f"Ray cannot start.*its {name} died"):
        ray.thread.start()
    assert not ray.may_connect.is_set(), "Ray itself still waits for it"
    assert not ray.is_wanted(), "and is told that it need not"


LOG = """\
[2026-11-25 15:46:18,123 I 7100 7100] (raylet) main.cc:240: Setting cluster ID
[2026-11-25 15:47:58,456 E 7100 7131] (raylet) runtime_env_agent_client.cc:313: the runtime env agent timed out
[2026-11-25 15:47:58,460 I 7100 7100] (raylet) node_manager.cc:99: Raylet received SIGTERM
"""


def test_why_a_server_died_is_looked_up_in_its_log(make_ray: Callable[..., FakeRay], tmp_path: Path) -> None:
    (tmp_path / "raylet.out").write_text(LOG)
    ray = make_ray()
    ray.thread.start()
    ray.server.kill()
    os.waitid(os.P_PID, ray.server.pid, os.WEXITED | os.WNOWAIT)
    death = ray.thread.death()
    assert isinstance(death, EngineDeadError)
    assert "the runtime env agent timed out" in str(death)
    assert f"raylet.out and raylet.err in {tmp_path}" in str(death.hint)
    assert "SIGTERM" not in str(death), "no error"


@pytest.mark.parametrize("written", [LOG, None])
def test_a_start_that_fails_says_why_and_where_more_is(
    make_ray: Callable[..., FakeRay], tmp_path: Path, written: str | None
) -> None:
    if written is not None:
        (tmp_path / "raylet.out").write_text(written)
    ray = make_ray()
    ray.may_connect.clear()

    def kill() -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not ray.thread._vital and time.monotonic() < deadline_s:
            time.sleep(0.01)
        ray.server.kill()

    threading.Thread(target=kill).start()
    with pytest.raises(ResourceError, match="its raylet died") as raised:
        ray.thread.start()
    assert raised.value.got == (
        "runtime_env_agent_client.cc:313: the runtime env agent timed out" if written else "no error in its log"
    )
    assert str(tmp_path) in str(raised.value.hint)


def test_what_connecting_raises_is_raised_and_no_server_is_left(make_ray: Callable[..., FakeRay]) -> None:
    ray = make_ray("log_monitor")
    ray.error = Exception("the current node timed out during startup")
    with pytest.raises(Exception, match="timed out"):
        ray.thread.start()
    assert ray.server.wait(WAIT_S)


def test_a_server_that_dies_later_is_told_of(make_ray: Callable[..., FakeRay]) -> None:
    ray = make_ray("gcs_server")
    ray.thread.start()
    assert ray.thread.death() is None
    ray.server.kill()
    os.waitid(os.P_PID, ray.server.pid, os.WEXITED | os.WNOWAIT)  # a zombie now: nobody has collected it
    assert "gcs_server died" in str(ray.thread.death())
    assert not ray.thread.is_useful()


def test_servers_that_do_not_let_go_are_killed(make_ray: Callable[..., FakeRay]) -> None:
    ray = make_ray()
    ray.thread._disconnect = ray.disconnect_when_dead  # as ray.shutdown() waits for a frozen raylet
    ray.thread.start()
    assert ray.thread.stop(timeout_s=0.1)
    assert ray.server.returncode == -9


def test_a_cluster_that_stands_still_is_left(make_ray: Callable[..., FakeRay]) -> None:
    """Its servers are not ours to kill, and killing is all that could help."""
    ray = make_ray()
    ray.thread._is_server = lambda _: False
    ray.may_disconnect.clear()
    ray.thread.start()
    assert not ray.thread.stop(timeout_s=0.1)
    assert ray.server.poll() is None


def test_a_ray_that_died_is_left_before_it_ends_this_process(
    make_ray: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_thread, "_NOTICE_S", 0.01)
    monkeypatch.setattr(ray_thread, "_ALONE_S", 0.01)
    ray = make_ray("gcs_server")
    ray.thread.start()
    ray.server.kill()
    ray.threads[0].join(WAIT_S)
    assert not ray.threads[0].is_alive()
    assert "gcs_server died" in str(ray.thread.death())


def test_what_the_servers_have_started_ends_too() -> None:
    script = "import subprocess; p = subprocess.Popen(['sleep', '1000'], stdout=-3); print(p.pid, flush=True); p.wait()"
    started: list[LocalProcess] = []

    def connect(_: Callable[[], bool]) -> str:
        server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        servers.append(server)
        assert server.stdout is not None
        started.append(LocalProcess.of_pid(int(server.stdout.readline())))
        return "a session"

    def disconnect(_: str) -> None:
        servers[0].kill()  # it has no time to end what it has started
        servers[0].communicate()
        assert started[0].is_alive()

    servers: list[subprocess.Popen[str]] = []
    thread = RayThread(connect, disconnect, lambda child: script in child.command())
    thread.start()
    assert started[0].is_alive()
    assert thread.stop(WAIT_S)
    assert not started[0].is_alive()
