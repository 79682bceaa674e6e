"""Places an engine's stages and encoders on the cluster's nodes, by one placement group.

    nodes      |  node A  |     node B     |  node C  |
    bundles    |   2   0  |     1    3     |   4   5  |    as Ray placed them; the last ones are the encoders'
    stages     |   0   1  |     2    3     |   4      |    in node order: at most nodes - 1 forward links cross
    encoders   |          |                |       0  |

The driver is in no bundle: it takes no resources and belongs on the node of its client, see docs/design/0020.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypp.actors.deadline import Deadline
from raypp.config.env import passed_on
from raypp.config.sections import Placement as PlacementStrategy
from raypp.errors import ResourceError

_LOOPBACK = "127.0.0.1"
_NODE_ID_LABEL = "ray.io/node-id"
_OWN_NODE_PATIENCE_S = 1.0
_POLL_S = 1.0  # Ray waits whole seconds
_NOTICE_S = 5.0  # after this long, say what is being waited for
_ANY_NUMBER = 1 << 20
_ROUNDING = 1e-6  # Ray counts resources in ten-thousandths

logger = logging.getLogger(__name__)

_ON_GPU = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_worker_niceness": "0",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""For actors on GPUs: they map the memory of their neighbours' GPUs, and run at the priority of other processes (15 is
what a cluster gives them; a Ray of raypp's own gives all actors 0). They number GPUs as plans and `nvidia-smi` do."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster."""

    node_id: str
    host: str  # its address
    resources: Mapping[str, float]  # all there are, free or not

    def capacity(self, bundle: Mapping[str, float]) -> int:
        """Return how many such bundles the node could hold if nothing else ran there."""
        counts = (self.resources.get(name, 0.0) / amount for name, amount in bundle.items() if amount)
        return min((int(count + _ROUNDING) for count in counts), default=_ANY_NUMBER)


@dataclass(frozen=True)
class BundlePlace:
    """Where one stage, or one encoder, runs."""

    bundle_index: int
    node_id: str


@dataclass(frozen=True)
class Placement:
    """Where an engine runs."""

    group: PlacementGroup
    driver_node_id: str
    stages: tuple[BundlePlace, ...]  # by stage index
    encoders: tuple[BundlePlace, ...]  # by encoder index
    hosts: Mapping[str, str]  # the address of each node, as the others know it

    @property
    def is_on_one_node(self) -> bool:
        """Whether driver, stages and encoders are all on the same node."""
        return self.node_ids <= {self.driver_node_id}

    @property
    def node_ids(self) -> set[str]:
        """The nodes of stages and encoders."""
        return {place.node_id for place in (*self.stages, *self.encoders)}

    def arranged(self, node_ids: Sequence[str]) -> Placement:
        """Return the same bundles with those of the stages on given nodes; an empty id is the driver's.

        Raises:
            ResourceError: the bundles lie on other nodes.
        """
        wanted, free = [node_id or self.driver_node_id for node_id in node_ids], list(self.stages)
        if Counter(wanted) != Counter(place.node_id for place in free):
            raise ResourceError(
                "stages were placed on other machines than on those with the GPUs that they are planned for",
                got=f"nodes {', '.join(place.node_id for place in free)}",
                expected=f"nodes {', '.join(wanted)}, whose GPUs differ",
                hint="start again, or take machines whose GPUs are alike",
            )
        return replace(self, stages=tuple(_take(free, node_id) for node_id in wanted))

    def options_of(
        self, place: BundlePlace, resources: Mapping[str, float], *, max_concurrency: int, max_restarts: int = 0
    ) -> dict[str, Any]:
        """Return Ray's options for an actor in a bundle that reserves `resources`."""
        return {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=place.bundle_index
            ),
            "max_concurrency": max_concurrency,
            "max_restarts": max_restarts,
            **actor_environment(on_gpu="GPU" in resources),
        }

    def host_of(self, node_id: str) -> str:
        """Return the address at which an engine's processes on a node are reached: loopback when all are there."""
        return _LOOPBACK if self.is_on_one_node else self.hosts[node_id]


def reserve(
    bundles: Sequence[Mapping[str, float]],
    num_stages: int,
    strategy: PlacementStrategy,
    deadline: Deadline,
    check: Callable[[], object] = lambda: None,
) -> Placement:
    """Reserve a bundle for each stage and each encoder. Waits while others hold what would suffice.

    Args:
        bundles: What they ask Ray for, the stages first.
        num_stages: P; the other bundles are the encoders'.
        strategy: See `ParallelSection.placement`.
        deadline: How long others may take to free it.
        check: Called every second meanwhile; what it raises ends the wait.

    Raises:
        ResourceError: the cluster can never hold them (at once), or did not in time.
    """
    nodes = alive_nodes()
    # A bundle must ask for something.
    bundles = [{name: amount for name, amount in one.items() if amount} or {"memory": 1.0} for one in bundles]
    check_capacity(nodes, bundles, strategy)
    here = ray.get_runtime_context().get_node_id()
    group = None
    if len(nodes) > 1 and strategy in ("pack", "strict_pack"):
        group = _reserve_on_node(here, nodes, bundles, deadline)
    if group is None:
        group = _reserve_anywhere(bundles, strategy, deadline, check)
    node_of_bundle: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    stage_bundles = {index: node_of_bundle[index] for index in range(num_stages)}
    return Placement(
        group,
        here,
        stages=order_stages(stage_bundles, here),
        encoders=tuple(BundlePlace(index, node_of_bundle[index]) for index in range(num_stages, len(bundles))),
        hosts={node.node_id: node.host for node in nodes},
    )


def reserve_when_there_is_room(
    bundles: Sequence[Mapping[str, float]],
    num_stages: int,
    strategy: PlacementStrategy,
    deadline: Deadline,
    check: Callable[[], object],
) -> Placement:
    """Reserve bundles as `reserve` does, but wait for nodes, too, where the cluster could never hold them as it is.

    Raises:
        ResourceError: until the deadline there was no room; it says what is lacking.
    """
    is_noticed = False
    while True:
        try:
            return reserve(bundles, num_stages, strategy, deadline, check)
        except ResourceError as error:
            if not deadline.remaining_s:
                raise
            if not is_noticed:
                logger.warning("waiting up to %.0f s for nodes: %s", deadline.remaining_s, error)
            is_noticed = True
        check()
        time.sleep(min(_POLL_S, deadline.remaining_s))


def alive_nodes() -> list[Node]:
    """Return the cluster's nodes."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def check_capacity(nodes: Sequence[Node], bundles: Sequence[Mapping[str, float]], strategy: PlacementStrategy) -> None:
    """Refuse what the cluster could not hold even if nothing else ran on it.

    Raises:
        ResourceError: it says what is lacking.
    """
    wanted = _sum(bundles)
    total = {name: sum(node.resources.get(name, 0.0) for node in nodes) for name in wanted}
    lacking = {name: amount for name, amount in wanted.items() if amount > total[name] + _ROUNDING}
    hint = (
        "add nodes, or ask for less: num_stages, stage_num_gpus, num_encoders (0 if all prompts are text), "
        "encoder_num_gpus, placement"
    )
    if lacking:
        raise ResourceError(
            "the Ray cluster lacks resources for the engine",
            got={name: total[name] for name in lacking},
            expected=lacking,
            hint=hint,
        )
    # Each kind by itself: whether all fit together, only Ray can say.
    for kind in {tuple(sorted(bundle.items())) for bundle in bundles}:
        bundle, count = dict(kind), sum(tuple(sorted(other.items())) == kind for other in bundles)
        capacities = [node.capacity(bundle) for node in nodes]
        room = {
            "pack": sum(capacities),
            "spread": sum(capacities),
            "strict_pack": max(capacities),
            "strict_spread": sum(capacity > 0 for capacity in capacities),
        }[strategy]
        if room < count:
            per_node = ", ".join(f"{node.host}: {capacity}" for node, capacity in zip(nodes, capacities, strict=True))
            raise ResourceError(
                "the nodes of the Ray cluster have no room for the engine",
                got=f"room for {room} with placement={strategy} ({per_node})",
                expected=f"room for {count} times {bundle}",
                hint=hint,
            )
    has_room = {
        "strict_pack": any(node.capacity(wanted) for node in nodes),
        "strict_spread": len(bundles) <= len(nodes),
    }
    if not has_room.get(strategy, True):
        raise ResourceError(
            "the nodes of the Ray cluster have no room for the engine",
            got=f"{len(nodes)} nodes ({', '.join(node.host for node in nodes)}) with placement={strategy}",
            expected=_in_words(bundles),
            hint=hint,
        )


def order_stages(node_of_bundle: Mapping[int, str], first_node_id: str) -> tuple[BundlePlace, ...]:
    """Return the stages' places: the bundles of one node side by side, those of `first_node_id` at the front."""
    nodes = list(dict.fromkeys(node_of_bundle[index] for index in sorted(node_of_bundle)))
    nodes.sort(key=lambda node_id: node_id != first_node_id)  # stable
    bundles = sorted(node_of_bundle, key=lambda index: (nodes.index(node_of_bundle[index]), index))
    return tuple(BundlePlace(index, node_of_bundle[index]) for index in bundles)


def _reserve_on_node(
    node_id: str, nodes: Sequence[Node], bundles: Sequence[Mapping[str, float]], deadline: Deadline
) -> PlacementGroup | None:
    """Return a group on this node, whose stages need no network; None when it has no room now."""
    if not any(node.node_id == node_id and node.capacity(_sum(bundles)) for node in nodes):
        return None
    group: PlacementGroup = placement_group(
        [dict(bundle) for bundle in bundles],
        strategy="STRICT_PACK",
        bundle_label_selector=[{_NODE_ID_LABEL: node_id}] * len(bundles),
    )
    with _removed_on_error(group):
        if _is_ready(group, min(_OWN_NODE_PATIENCE_S, deadline.remaining_s)):
            return group
    remove_placement_group(group)
    return None


def _reserve_anywhere(
    bundles: Sequence[Mapping[str, float]],
    strategy: PlacementStrategy,
    deadline: Deadline,
    check: Callable[[], object],
) -> PlacementGroup:
    wanted = _in_words(bundles)
    group: PlacementGroup = placement_group([dict(bundle) for bundle in bundles], strategy=strategy.upper())
    with _removed_on_error(group):
        is_noticed, notice = False, Deadline(_NOTICE_S)
        while not _is_ready(group, min(_POLL_S, deadline.remaining_s)):
            check()
            check_capacity(alive_nodes(), bundles, strategy)  # a node may be lost meanwhile
            if not deadline.remaining_s:
                break
            if not is_noticed and not notice.remaining_s:
                is_noticed = True
                logger.warning("waiting for others to free resources of the Ray cluster: %s; free: %s", wanted, _free())
        else:
            return group
        raise ResourceError(
            f"the Ray cluster did not free the engine's resources within {deadline.seconds:g} s",
            got=f"free: {_free()}",
            expected=wanted,
            hint="wait for other work to end, or ask for less",
        )


def _take(places: list[BundlePlace], node_id: str) -> BundlePlace:
    """Remove and return the first place on a node."""
    return places.pop(next(index for index, place in enumerate(places) if place.node_id == node_id))


def _sum(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what all bundles ask for together."""
    names = {name for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in sorted(names)}


def _in_words(bundles: Sequence[Mapping[str, float]]) -> str:
    kinds = Counter(str(dict(bundle)) for bundle in bundles)
    return " and ".join(f"{count} times {bundle}" for bundle, count in kinds.items())


def _is_ready(group: PlacementGroup, timeout_s: float) -> bool:
    return group.wait(math.ceil(timeout_s))  # Ray cuts fractions of a second off


@contextmanager
def _removed_on_error(group: PlacementGroup) -> Iterator[None]:
    try:
        yield
    except BaseException:
        remove_placement_group(group)
        raise


def _free() -> dict[str, Any]:
    free: dict[str, Any] = ray.available_resources()  # type: ignore[no-untyped-call]
    return {name: amount for name, amount in free.items() if not name.startswith("node:")}


def actor_environment(*, on_gpu: bool = False) -> dict[str, Any]:
    """Return options of an actor; none where nothing is set, so that a process that Ray keeps ready can be used."""
    variables = passed_on() | (_ON_GPU if on_gpu else {})
    return {"runtime_env": {"env_vars": variables}} if variables else {}
