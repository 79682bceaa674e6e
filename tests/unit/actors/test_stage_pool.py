"""Which stages the next life of an engine gets, with doubles in place of Ray and its actors."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raypp.actors import deadline, stage_pool
from raypp.actors.placement import BundlePlace, Placement
from raypp.actors.processes import ActorProcess
from raypp.actors.stage_pool import StagePool
from raypp.config.engine_config import EngineConfig
from raypp.errors import ResourceError
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Gpu, Hardware, Machine, described_hardware

BUNDLES = [{"CPU": 0.01}] * 3


class FakeActor:
    """Answers whether it can stand by; None: it never does."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answer: bool | None = True
        self.stand_by = SimpleNamespace(remote=lambda timeout_s: self)


class FakeRay:
    """Knows its nodes, its actors, and what was killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.killed: list[int] = []
        self.made: list[FakeActor] = []
        self.ended: list[Any] = []
        self.removed: list[Any] = []
        self.nodes = {"here", "there"}
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.stopped: list[str] = []
        monkeypatch.setattr(stage_pool, "_is_stopped", lambda pooled: pooled.process in self.stopped)
        for module in (deadline, stage_pool):
            monkeypatch.setattr(module, "ray", self)
        monkeypatch.setattr(stage_pool, "_make_actor", self.make)
        monkeypatch.setattr(stage_pool, "alive_nodes", lambda: [SimpleNamespace(node_id=n) for n in self.nodes])
        monkeypatch.setattr(stage_pool, "end_processes", lambda processes, *_: self.ended.extend(processes))
        monkeypatch.setattr(stage_pool, "remove_placement_group", self.removed.append)

    def make(self, *_: object) -> FakeActor:
        self.made.append(FakeActor(len(self.made)))
        return self.made[-1]

    def kill(self, actor: FakeActor) -> None:
        self.killed.append(actor.number)

    def wait(self, refs: Sequence[FakeActor], **_: object) -> tuple[list[FakeActor], list[FakeActor]]:
        return [ref for ref in refs if ref.answer is not None], [ref for ref in refs if ref.answer is None]

    def get(self, ref: FakeActor) -> bool:
        if ref.number in self.killed:
            raise RuntimeError("it is dead")
        return bool(ref.answer)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


def plan(**settings: object) -> EnginePlan:
    return plan_engine(EngineConfig.from_flat("tiny", num_kv_blocks=50, **settings), Hardware(4))


def placement(*node_ids: str) -> Placement:
    places = tuple(BundlePlace(index, node_id) for index, node_id in enumerate(node_ids))
    return Placement(cast(Any, "group"), "here", places, (), {})


def filled(three: EnginePlan) -> StagePool:
    pool = StagePool(None)
    assert pool.placement_of(BUNDLES) is None
    pool.place(placement("here", "here", "there"), BUNDLES)
    pool.make(three)
    pool.note_processes([cast(ActorProcess, f"process {index}") for index in range(3)])
    return pool


def test_stages_that_stand_by_serve_again_and_others_are_replaced(ray: FakeRay) -> None:
    three = plan(num_stages=3)
    pool = filled(three)
    ray.made[0].answer, ray.made[2].answer = None, False  # one stands still, one has failed
    pool.stand_by(1.0)
    assert sorted(ray.killed) == [0, 2]
    assert sorted(ray.ended) == ["process 0", "process 2"]
    assert pool.placement_of(BUNDLES) is not None
    pool.make(three)
    assert [actor.number for actor in pool.actors] == [3, 1, 4]
    assert pool.num_kept == 1
    assert pool.processes == {1: "process 1"}


def test_stages_planned_for_gpus_that_differ_are_made_where_these_are(ray: FakeRay) -> None:
    small, large = Gpu(24 << 30), Gpu(48 << 30)
    machines = Machine((small, large), node_id="there"), Machine((large,))  # the driver's
    unlike = plan_engine(EngineConfig.from_flat("tiny", num_stages=3), described_hardware(machines))
    pool = StagePool(None)
    pool.place(placement("here", "there", "there"), BUNDLES)
    made = pool.make(unlike)
    assert [(place.bundle_index, place.node_id) for place in made.stages] == [(1, "there"), (2, "there"), (0, "here")]
    assert [spec.device for spec in unlike.stage_specs()] == ["cuda:0", "cuda:1", "cuda:0"]
    assert pool.placement_of(BUNDLES) is made
    pool.place(placement("here", "here", "there"), BUNDLES)
    with pytest.raises(ResourceError, match="placed on other machines"):
        pool.make(unlike)


def test_a_stopped_stage_is_not_asked(ray: FakeRay) -> None:
    pool = filled(plan(num_stages=3))
    ray.stopped = ["process 1"]
    ray.made[1].stand_by = None  # asking would fail
    pool.stand_by(1.0)
    assert ray.killed == [1]
    assert [actor.number for actor in pool.actors] == [0, 2]


def test_a_stage_of_other_layers_is_another_stage(ray: FakeRay) -> None:
    pool = filled(plan(num_stages=3, layer_partition=[2, 2, 2]))
    pool.stand_by(1.0)
    pool.make(plan(num_stages=3, layer_partition=[2, 3, 1]))
    assert [actor.number for actor in pool.actors] == [0, 3, 4]
    assert sorted(ray.killed) == [1, 2]


@pytest.mark.parametrize("change", ["a node is lost", "other bundles"])
def test_a_place_that_cannot_be_had_again_is_given_up(ray: FakeRay, change: str) -> None:
    pool = filled(plan(num_stages=3))
    pool.stand_by(1.0)
    if change == "a node is lost":
        ray.nodes.remove("there")
    assert pool.placement_of(BUNDLES if change == "a node is lost" else BUNDLES[:2]) is None
    assert set(ray.killed) == {0, 1, 2}
    assert ray.removed == ["group"]
    assert not pool.actors


def test_without_a_ray_nobody_is_asked(ray: FakeRay) -> None:
    pool = filled(plan(num_stages=3))
    pool.end(1.0, has_ray=False)
    pool.end(1.0)
    assert not ray.killed
    assert not ray.removed
