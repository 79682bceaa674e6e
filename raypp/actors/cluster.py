"""The Ray that the engine runs on: one that is there already, or a local one that it starts and stops."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raypp.errors import ResourceError

_REACH_TIMEOUT_S = 5.0
_LOCAL_OBJECT_STORE_BYTES = 80 << 20  # nothing large travels through it; Ray refuses much less


@dataclass
class Cluster:
    """A connection to Ray.

    Attributes:
        owned: Whether this connection was made here; only then does `disconnect` end it. That stops a Ray that was
            started for it, and only leaves a cluster that was there.
    """

    owned: bool

    @classmethod
    def connect(cls) -> Cluster:
        """Use the Ray of this process, else the cluster of RAY_ADDRESS, else start a local one.

        Raises:
            ResourceError: the cluster cannot be reached, or Ray cannot start.
        """
        if ray.is_initialized():
            return cls(owned=False)
        address = os.environ.get("RAY_ADDRESS") or "local"
        _check_reachable(address)
        local: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _LOCAL_OBJECT_STORE_BYTES}
        try:
            with _own_sigterm_handler():
                ray.init(
                    address=address,
                    log_to_driver=False,
                    configure_logging=False,
                    **(local if address == "local" else {}),
                )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ResourceError(
                "no connection to Ray", got=f"RAY_ADDRESS={address}: {error}", hint="is the cluster up?"
            ) from error
        return cls(owned=True)

    def disconnect(self) -> None:
        """End the connection, if it was made here."""
        if self.owned and ray.is_initialized():
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Look whether anyone listens at a cluster's address: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ResourceError(
            "the Ray cluster of RAY_ADDRESS cannot be reached",
            got=f"{address}: {error}",
            expected="host:port of a running cluster",
            hint="start it, correct RAY_ADDRESS, or unset it to use a local Ray",
        ) from error


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keep the process's answer to SIGTERM, which `ray.init` replaces by an abort.

    A process that had none exits in an orderly way instead, so that engines are closed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, _exit if before in (signal.SIG_DFL, None) else before)


def _exit(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)


def reserve_on_this_node(bundles: list[dict[str, float]], timeout_s: float) -> PlacementGroup:
    """Return a placement group that holds the bundles on the node of this process, to whose sockets all connect.

    Raises:
        ResourceError: the cluster cannot hold them, or does not within the time.
    """
    here = f"node:{ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
    bundles = [{name: amount for name, amount in {**b, here: 0.001}.items() if amount} for b in bundles]
    wanted: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            wanted[name] = wanted.get(name, 0.0) + amount
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    lacking = {name: amount for name, amount in wanted.items() if amount > total.get(name, 0.0)}
    if lacking:
        raise ResourceError(
            "the Ray cluster lacks resources for the engine",
            got={name: total.get(name, 0.0) for name in lacking},
            expected=lacking,
            hint="add nodes, or ask for less (num_stages, stage_num_cpus)",
        )
    group: PlacementGroup = placement_group(bundles, strategy="STRICT_PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        raise ResourceError(
            f"the Ray cluster did not free the engine's resources within {timeout_s:g} s",
            got=f"free: {free}",
            expected=wanted,
            hint="wait for other work to end, or ask for less",
        )
    return group
