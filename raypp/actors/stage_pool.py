"""The stage actors of an engine, on its owner's side: they outlive a driver, and those that are sound serve the next.

    a life dies     a stage whose loop ends in time and that did not fail stands by, with process, GPU and weights;
                    all others are killed
    the next one    gets those that stand by, where plan and place are the same, and new ones for the others

The bundles are kept, too, as long as all their nodes live.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from raypp.actors.deadline import in_time, value_of
from raypp.actors.node_share import NodeShare, files_of, versions_here
from raypp.actors.placement import BundlePlace, Placement, alive_nodes
from raypp.actors.processes import ActorProcess, end_processes
from raypp.actors.stage_actor import StageActor
from raypp.plan.engine_plan import EnginePlan
from raypp.stage.stage_spec import StageSpec

_END_S = 3.0  # for stages that are replaced
_PATIENCE_S = 0.5  # for processes to go when Ray ends them at once
_ANSWER_S = 1.0  # for a stage to answer beside what it is given to end its loop

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Pooled:
    """A stage actor, and what it was made for."""

    actor: Any
    spec: StageSpec
    place: BundlePlace
    process: ActorProcess | None = None


class StagePool:
    """Makes, keeps and ends the stages of an engine. One thread's at a time."""

    def __init__(self, factory: bytes | None) -> None:
        """Begin empty.

        Args:
            factory: Makes the stages' models, pickled; None: the checkpoint does.
        """
        self._factory = factory
        self._placement: Placement | None = None
        self._bundles: list[Mapping[str, float]] = []
        self._pooled: list[_Pooled] = []
        self.num_kept = 0
        """Of the stages that `actors` returned last, how many had stood by."""

    @property
    def actors(self) -> list[Any]:
        """The actors of the stages' members, those of a stage one after the other."""
        return [pooled.actor for pooled in self._pooled]

    @property
    def processes(self) -> dict[int, ActorProcess]:
        """Those that are known, by the member's index among all."""
        return {pooled.spec.process_index: pooled.process for pooled in self._pooled if pooled.process is not None}

    def placement_of(self, bundles: Sequence[Mapping[str, float]]) -> Placement | None:
        """Return where the engine ran, if it can run there again; else give the place up."""
        placement = self._placement
        if placement is None:
            return None
        if list(bundles) == self._bundles and placement.node_ids <= {node.node_id for node in alive_nodes()}:
            return placement
        self.end(_END_S)
        return None

    def place(self, placement: Placement, bundles: Sequence[Mapping[str, float]]) -> None:
        """Take over the place that was reserved for an engine."""
        self._placement, self._bundles = placement, list(bundles)

    def make(self, plan: EnginePlan) -> Placement:
        """Make the actors that lack, and return where they run; their processes start. Does not wait for them.

        Raises:
            ResourceError: it was planned for other GPUs than there are at the place.
        """
        standing_by = {pooled.spec.process_index: pooled for pooled in self._pooled}
        assert self._placement is not None
        if any(gpus.indices for gpus in plan.gpus):
            self._placement = self._placement.arranged([gpus.node_id for gpus in plan.gpus])
        placement = self._placement
        wanted = [(spec, placement.stages[spec.stage_index]) for spec in plan.stage_specs()]
        kept = {
            spec.process_index: standing_by.pop(spec.process_index)
            for spec, place in wanted
            if (found := standing_by.get(spec.process_index)) is not None and (found.spec, found.place) == (spec, place)
        }
        _end(standing_by.values(), _END_S)  # their memory is needed
        self.num_kept = len(kept)
        shares: dict[BundlePlace, NodeShare] = {}
        if not placement.is_on_one_node:
            versions, files = versions_here(), files_of(Path(wanted[0][0].model_path))
            shares = {place: _node_share(plan, placement, place, versions, files) for _, place in wanted}
        self._pooled = [
            kept.get(spec.process_index)
            or _Pooled(_make_actor(plan, placement, place, spec, self._factory, shares.get(place)), spec, place)
            for spec, place in wanted
        ]
        return placement

    def note_processes(self, processes: Sequence[ActorProcess]) -> None:
        """Take in which processes the stages have, by index."""
        for pooled, process in zip(self._pooled, processes, strict=True):
            pooled.process = process

    def stand_by(self, timeout_s: float) -> None:
        """Have the stages end their loops, once their driver is gone; kill those that cannot serve another one.

        Args:
            timeout_s: How long a loop may take to end.
        """
        stopped = [pooled for pooled in self._pooled if _is_stopped(pooled)]
        _end(stopped, timeout_s)  # first: the others cannot give back memory that a frozen process has mapped
        awake = [pooled for pooled in self._pooled if pooled not in stopped]
        asked = {pooled.actor.stand_by.remote(timeout_s): pooled for pooled in awake}
        answered = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s + _ANSWER_S)[0] if asked else []
        kept = [asked[ref] for ref in answered if value_of(ref)]
        _end([pooled for pooled in awake if pooled not in kept], timeout_s)
        self._pooled = kept

    def end(self, timeout_s: float, *, has_ray: bool = True) -> None:
        """Kill all stages, and give the place up.

        Args:
            timeout_s: For Ray to confirm that.
            has_ray: Whether Ray can be asked for anything.
        """
        pooled, self._pooled = self._pooled, []
        placement, self._placement = self._placement, None
        if not has_ray:
            return
        for one in pooled:
            ray.kill(one.actor)
        if placement is not None and not in_time(partial(remove_placement_group, placement.group), timeout_s):
            logger.warning("Ray did not confirm that the engine's resources are free again")
        _end(pooled, timeout_s)


def _end(pooled: Collection[_Pooled], timeout_s: float) -> None:
    for one in pooled:
        ray.kill(one.actor)
    end_processes([one.process for one in pooled if one.process is not None], timeout_s, min(_PATIENCE_S, timeout_s))


def _is_stopped(pooled: _Pooled) -> bool:
    """Return whether it is known that a stage cannot answer; of those on other nodes it is not."""
    process = pooled.process
    is_here = process is not None and process.node_id == ray.get_runtime_context().get_node_id()
    return process is not None and is_here and process.process.is_stopped()


def _make_actor(
    plan: EnginePlan,
    placement: Placement,
    place: BundlePlace,
    spec: StageSpec,
    factory: bytes | None,
    share: NodeShare | None,
) -> Any:
    # run, trace, to stand by, one to spare, and what encoders bring
    max_concurrency = 4 + plan.encoders.num_encoders
    options = placement.options_of(place, plan.member_resources(), max_concurrency=max_concurrency)
    # Under a name with the stage's index, which `ps` and Ray's tools show.
    rank = f"_{spec.rank}" if spec.num_members > 1 else ""
    named = type(f"{StageActor.__name__}{spec.stage_index}{rank}", (StageActor,), {})
    return ray.remote(named).options(**options).remote(spec, plan.model, factory, share)


def _node_share(
    plan: EnginePlan, placement: Placement, place: BundlePlace, versions: Mapping[str, str], files: Mapping[str, str]
) -> NodeShare:
    """Return what a stage decides on its node, which may be another than the one that the plan was made for."""
    parallel = plan.config.parallel
    neighbours = plan.num_members * sum(other.node_id == place.node_id for other in placement.stages)
    model = plan.config.model
    num_stages = neighbours if parallel.stage_num_threads is None else None
    return NodeShare(model.model, model.revision, num_stages, versions, files)
