"""The Ray that the engine runs on: one that is there already, or a local one that it starts and stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raypp.errors import ResourceError

_LOCAL_OBJECT_STORE_BYTES = 80 << 20  # nothing large travels through it; Ray refuses much less


@dataclass
class Cluster:
    """A connection to Ray.

    Attributes:
        owned: Whether this connection started Ray; only then does `disconnect` stop it.
    """

    owned: bool

    @classmethod
    def connect(cls) -> Cluster:
        """Use the Ray of this process, else the cluster of RAY_ADDRESS, else start a local one."""
        if ray.is_initialized():
            return cls(owned=False)
        address = os.environ.get("RAY_ADDRESS")
        with _own_sigterm_handler():
            if address:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            else:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    object_store_memory=_LOCAL_OBJECT_STORE_BYTES,
                )
        return cls(owned=not address)

    def disconnect(self) -> None:
        """Stop Ray, if it was started here."""
        if self.owned and ray.is_initialized():
            ray.shutdown()


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


def reserve(bundles: list[dict[str, float]], strategy: str, timeout_s: float) -> PlacementGroup:
    """Return a placement group that holds the bundles.

    Raises:
        ResourceError: the cluster cannot hold them, or does not within the time.
    """
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
    group: PlacementGroup = placement_group(bundles, strategy=strategy)
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
