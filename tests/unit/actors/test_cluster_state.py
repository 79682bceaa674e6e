"""What `raypp doctor` learns of Ray clusters, and that it leaves none behind."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from raypp.actors import cluster
from raypp.actors.cluster import local_cluster, named_cluster

_SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # with which who speaks HTTP/2 answers


class _Connection:
    def __init__(self) -> None:
        self.num_disconnects = 0

    def connect(self) -> _Connection:
        return self

    def disconnect(self) -> None:
        self.num_disconnects += 1


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> _Connection:
    made = _Connection()
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(cluster, "Cluster", made)
    monkeypatch.setattr(cluster, "alive_nodes", lambda: [1, 2])
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"GPU": 4.0})
    monkeypatch.setattr(cluster.ray, "available_resources", lambda: {"GPU": 1.0})
    return made


def test_a_clusters_nodes_and_resources(connection: _Connection) -> None:
    assert named_cluster() == (2, {"GPU": 4.0}, {"GPU": 1.0})
    assert connection.num_disconnects == 1


def test_the_connection_is_left_when_ray_fails(connection: _Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(cluster.ray, "cluster_resources", fail)
    with pytest.raises(RuntimeError, match="gone"):
        named_cluster()
    assert connection.num_disconnects == 1


def test_the_cluster_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert local_cluster() is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{address}\n")

        def answer() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.sendall(_SETTINGS_FRAME)
                accepted.recv(1024)

        thread = threading.Thread(target=answer)
        thread.start()
        assert local_cluster() == address
        thread.join(10)
    assert local_cluster() is None, "the file of a cluster that has ended"
