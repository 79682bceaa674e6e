"""What a running Ray cluster has, and what of it is free, for `raypp doctor`."""

from __future__ import annotations

import os

import ray

from raypp.actors.cluster import Cluster, check_reachable, ray_folder
from raypp.actors.placement import alive_nodes
from raypp.errors import ResourceError

_LOOK_TIMEOUT_S = 1.0


def named_cluster() -> tuple[int, dict[str, float], dict[str, float]]:
    """Connect to the cluster that RAY_ADDRESS names, look, and leave.

    Returns:
        The number of its nodes; its resources by name; those that nobody has reserved.

    Raises:
        ResourceError: it cannot be reached.
    """
    assert os.environ.get("RAY_ADDRESS"), "without it a Ray would be started"
    cluster = Cluster.connect()
    try:
        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return len(alive_nodes()), total, free
    finally:
        cluster.disconnect()


def local_cluster() -> str | None:
    """Return the address of the cluster that `ray start` started on this machine, if it still answers."""
    try:
        address = (ray_folder() / "ray" / "ray_current_cluster").read_text().strip()
        check_reachable(address, _LOOK_TIMEOUT_S)
    except (OSError, ResourceError):
        return None
    return address or None
