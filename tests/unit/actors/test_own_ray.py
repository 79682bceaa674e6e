"""The Ray that is started here: what it needs, what it says, and what a forked child has of it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raypp.actors import cluster
from raypp.actors.cluster import Cluster, check_disk, ray_folder
from raypp.errors import ResourceError


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))


def test_a_full_disk_is_named_before_ray_tries(full_disk: None, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"the disk with Ray's files is full.*4,096 bytes free.*RAY_TMPDIR"):
        check_disk(tmp_path / "not" / "there" / "yet")


def test_a_disk_with_room(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "there" / "yet")


@pytest.mark.parametrize(
    ("variables", "folder"),
    [({"RAY_TMPDIR": "/a", "TMPDIR": "/b"}, "/a"), ({"TMPDIR": "/b"}, "/b"), ({}, "/tmp")],
)
def test_where_ray_keeps_its_files(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str) -> None:
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ray_folder() == Path(folder)


def _fail_to_start(**_: Any) -> None:
    raise Exception("The current node timed out during startup.")  # as Ray does


def test_whatever_ray_raises_at_its_start_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", _fail_to_start)
    with pytest.raises(ResourceError, match=r"no connection to Ray.*timed out during startup"):
        cluster._connect("local", False, bool)


def test_a_disk_that_fills_up_meanwhile_is_named(monkeypatch: pytest.MonkeyPatch, full_disk: None) -> None:
    monkeypatch.setattr(ray, "init", _fail_to_start)
    with pytest.raises(ResourceError, match="the disk with Ray's files is full"):
        cluster._connect("local", False, bool)


def test_what_ray_tells_of_its_own_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = ray._private.worker
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    for _ in range(2):  # as often as there is a connection
        cluster._print_errors_to_stderr()
    message = {"lines": ["A worker died or was killed"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(message, ignore_prefix=False)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("A worker died or was killed") == 1


def test_a_forked_child_has_no_ray_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[object] = []
    monkeypatch.setattr(cluster, "atexit", SimpleNamespace(unregister=removed.append))
    monkeypatch.setattr(Cluster, "_own", SimpleNamespace())
    connection = Cluster(Cluster._own)
    pid = os.fork()
    if pid == 0:
        connection.disconnect()
        os._exit(0 if Cluster._own is None and removed == [ray.shutdown] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert Cluster._own is not None
    assert not removed
