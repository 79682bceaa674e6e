"""One local Ray for all modules that need no other: its start and end cost seconds each time."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from leftovers import raypp_processes, wait_until_gone

from raypp.actors.cluster import quick_start

_HERE = Path(__file__).parent
_LAST_ACTORS_S = 120.0


def _stop_ray() -> None:
    if ray.is_initialized():
        if (serving := sys.modules.get("serving")) is not None:
            serving.end_serving()
        ray.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put those that need a Ray of their own last: each time they end the shared one, another has to be started."""
    here = [index for index, item in enumerate(items) if item.path.parent == _HERE]
    ours = sorted((items[index] for index in here), key=lambda item: "no_ray" in getattr(item, "fixturenames", ()))
    for index, item in zip(here, ours, strict=True):
        items[index] = item


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End Ray with the last test of this folder."""
    if nextitem is None or nextitem.path.parent != _HERE:
        _stop_ray()


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Have this process connected to a local Ray without engines; modules share it."""
    if not ray.is_initialized():
        with quick_start(shows_logs=False) as port:
            ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=80 << 20,
                _metrics_export_port=port,
                _system_config={"metrics_report_interval_ms": 2000},  # a test waits for metrics
            )
    yield
    if left := wait_until_gone(raypp_processes(), _LAST_ACTORS_S):
        _stop_ray()  # else the next module would find them
        pytest.fail(f"the module's engines are not gone: {left}")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder for an engine's temporary files: those of pytest are too long for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def no_ray() -> None:
    """Have this process connected to no Ray, and none running that it has started."""
    _stop_ray()
