"""One local Ray per module: an engine start costs seconds, Ray's own start more."""

from __future__ import annotations

import pytest
import ray


@pytest.fixture(scope="module")
def local_ray():
    """Start Ray for the tests of a module, and stop it."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    yield
    ray.shutdown()
