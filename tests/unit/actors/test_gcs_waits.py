"""Ray's waits for its gcs_server: other threads run meanwhile, and they end when nobody wants the start any more."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import node
from ray.exceptions import RpcError
from ray.experimental import internal_kv

from raypp.actors.cluster import _UnwantedError, gcs_waits_can_end

WAIT_S = 20.0
NODE_ID = ray.NodeID.from_random().hex()

pytestmark = pytest.mark.skipif(not hasattr(node, "wait_for_persisted_port"), reason="this Ray waits in another way")


def wait_for_port(folder: Path, timeout_ms: int) -> int:
    """As Ray does it."""
    return int(node.wait_for_persisted_port(str(folder), NODE_ID, node.GCS_SERVER_PORT_NAME, timeout_ms=timeout_ms))


def port_file(folder: Path) -> Path:
    return folder / str(node.get_port_filename(NODE_ID, node.GCS_SERVER_PORT_NAME))


def test_a_port_that_comes_is_found_by_a_thread_that_lets_others_run(tmp_path: Path) -> None:
    """Ray's own wait would let the timer go on only when it has waited in vain."""
    with gcs_waits_can_end(lambda: True):
        threading.Timer(0.2, port_file(tmp_path).write_text, ["6379"]).start()
        assert wait_for_port(tmp_path, 5000) == 6379


def test_a_port_that_does_not_come_is_waited_for_as_long_as_ray_says(tmp_path: Path) -> None:
    with gcs_waits_can_end(lambda: True), pytest.raises(RuntimeError, match="Timed out"):
        wait_for_port(tmp_path, 100)


def test_an_unwanted_wait_for_the_port_ends(tmp_path: Path) -> None:
    unwanted = threading.Event()
    begun_s = time.monotonic()
    threading.Timer(0.2, unwanted.set).start()
    with gcs_waits_can_end(lambda: not unwanted.is_set()), pytest.raises(_UnwantedError):
        wait_for_port(tmp_path, 30_000)
    assert time.monotonic() - begun_s < 5.0


class FakeClient:
    """A client of a gcs_server that answers from the third time on, or never."""

    def __init__(self, num_failures: float) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._num_failures = num_failures

    def internal_kv_get(self, key: bytes, namespace: bytes | None, timeout: float | None = None) -> bytes:
        assert timeout is not None, "without one, Ray ends the process"
        self.asked.append((key, namespace))
        if len(self.asked) <= self._num_failures:
            raise RpcError("Timed out while waiting for GCS to become available.")
        return b"value"


def test_a_gcs_that_answers_late_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(num_failures=2)
    monkeypatch.setattr(internal_kv, "global_gcs_client", client)
    with gcs_waits_can_end(lambda: True):
        assert internal_kv._internal_kv_get("dashboard", namespace=b"of it") == b"value"
    assert client.asked == [(b"dashboard", b"of it")] * 3


def test_an_unwanted_question_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(num_failures=float("inf"))
    monkeypatch.setattr(internal_kv, "global_gcs_client", client)
    with gcs_waits_can_end(lambda: len(client.asked) < 2), pytest.raises(_UnwantedError):
        internal_kv._internal_kv_get("dashboard")


def test_ray_has_its_own_again_afterwards() -> None:
    own = (node.wait_for_persisted_port, internal_kv._internal_kv_get)
    with gcs_waits_can_end(lambda: False):
        assert not {node.wait_for_persisted_port, internal_kv._internal_kv_get} & {*own}
        with pytest.raises(_UnwantedError):
            internal_kv._internal_kv_get("dashboard")
    assert (node.wait_for_persisted_port, internal_kv._internal_kv_get) == own
