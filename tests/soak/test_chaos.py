"""Ray's own servers die or stand still, zombies stay, children are forked: errors are typed, and nothing is left.

Each case is a program in a process of its own, for minutes: `make soak`, not `make test`. Where pytest is process 1,
the deaths of raylets cannot be tested: Ray ends a process whose parent is process 1 when its raylet is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raypp.actors.processes import LocalProcess, with_descendants

pytestmark = pytest.mark.part("chaos")

USER = Path(__file__).with_name("chaos_user.py")
WAIT_S = 170.0
SOON_S = 5.0
ACTOR = "Acto"  # the kernel keeps 15 characters of "ray::DriverActor"


def run(*args: str, **variables: str) -> tuple[list[dict[str, Any]], str]:
    """Run the user's program; return what it said on stdout, and stderr."""
    done = subprocess.run(
        [sys.executable, USER, *args], capture_output=True, text=True, timeout=WAIT_S, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def seconds_between(said: list[dict[str, Any]], first: str, second: str) -> float:
    return float(next(s for s in said if second in s)["at_s"] - next(s for s in said if first in s)["at_s"])


@pytest.mark.parametrize(
    ("name", "after"), [("raylet", "raylet"), ("gcs_server", "gcs_server"), ("gcs_server", "raylet")]
)
def test_a_server_of_ray_that_dies_while_it_starts(name: str, after: str) -> None:
    """Not here: a gcs that dies once the raylet is registered, as `ray.init` connects. No engine follows.

    Ray 2.60.0 asks it for a job id without a limit (worker.connect > GlobalStateAccessor::GetNextJobID > futex), and
    its library ends the process after 60 s ("Failed to connect to GCS within 60 seconds. The program will terminate.").
    """
    said, _ = run("start_hit", name, after)
    assert {s["error"] for s in said if "error" in s} == {"ResourceError"}
    assert name in next(s["message"] for s in said if "error" in s)
    assert seconds_between(said, "hit", "error") < SOON_S
    assert said[-1]["ended"] == "again", "a new engine works in the same process"


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_server_of_ray_that_dies_later(name: str) -> None:
    said, _ = run("run_hit", name)
    assert {s["error"] for s in said if "error" in s} == {"EngineDeadError"}
    assert said[-1]["ended"] == "again"


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_an_engine_whose_ray_stands_still_can_be_closed(name: str) -> None:
    said, _ = run("close_frozen", name)
    assert seconds_between(said, "hit", "ended") < 60.0
    assert said[-1]["ended"] == "again"


def test_forked_children_end_and_disturb_nobody() -> None:
    said, _ = run("fork")
    assert [s["child"] for s in said if "child" in s] == [0, 0]
    assert [s["tokens"] for s in said if "tokens" in s] == [2]


def test_an_engine_outlives_the_thread_that_opened_it() -> None:
    said, _ = run("thread")
    assert [s["tokens"] for s in said if "tokens" in s] == [2]


def test_what_ray_tells_is_not_in_the_users_output() -> None:
    said, errors = run("kill_stage")  # each line of stdout was JSON
    assert said[-1]["ended"] == "kill_stage"
    assert "A worker died" in errors


def test_a_full_disk_is_named_at_once(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no right to mount a small disk")
    try:
        said, _ = run("fork", RAY_TMPDIR=str(tmp_path))
        assert "the disk with Ray's files is full" in said[0]["message"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.fixture
def orphan() -> Iterator[subprocess.Popen[str]]:
    """Start a user in a space of processes whose first one collects no zombies, as a container without an init."""
    sleeper = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, {str(USER)!r}, 'orphan']); time.sleep(600)"
    )
    space = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*space, "true"], capture_output=True).returncode != 0:
        pytest.skip("no right to make a space of processes")
    with subprocess.Popen([*space, sys.executable, "-c", sleeper], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def _running(first: int) -> dict[str, int]:
    """Return the processes below one that are no zombies: names of Ray's actors and of Python, and their numbers."""
    below = with_descendants([LocalProcess.of_pid(first)])
    return {f"{process.name} {process.pid}": process.pid for process in below if process.state not in "ZX"}


def test_where_nobody_collects_zombies_the_actors_of_a_killed_user_end_too(orphan: subprocess.Popen[str]) -> None:
    assert orphan.stdout is not None
    assert "pids" in json.loads(orphan.stdout.readline())
    user = max(int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _is_orphan(path))
    assert len([name for name in _running(orphan.pid) if ACTOR in name]) == 3
    os.kill(user, signal.SIGKILL)
    ends_s = time.monotonic() + SOON_S
    while left := [name for name in _running(orphan.pid) if ACTOR in name]:
        assert time.monotonic() < ends_s, left
        time.sleep(0.05)


def _is_orphan(cmdline: Path) -> bool:
    try:
        return cmdline.read_bytes().split(b"\0")[1:3] == [str(USER).encode(), b"orphan"]
    except OSError:
        return False
