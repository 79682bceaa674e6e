"""Who sits where, and what is refused, without a cluster."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from raypp.actors import placement
from raypp.actors.deadline import Deadline
from raypp.actors.placement import Node, Placement, check_capacity, order_stages
from raypp.errors import EngineDeadError, ResourceError


def _nodes(*num_gpus: float) -> list[Node]:
    return [Node(f"n{i}", f"host{i}", {"CPU": 4.0, "GPU": gpus}) for i, gpus in enumerate(num_gpus)]


def test_stages_of_one_node_sit_side_by_side_and_the_drivers_node_comes_first():
    places = order_stages({0: "b", 1: "a", 2: "b", 3: "c", 4: "a"}, "a")
    assert [(place.bundle_index, place.node_id) for place in places] == [
        (1, "a"),
        (4, "a"),
        (0, "b"),
        (2, "b"),
        (3, "c"),
    ]


def test_links_cross_nodes_as_seldom_as_can_be():
    places = order_stages({index: "abc"[index % 3] for index in range(12)}, "b")
    nodes = [place.node_id for place in places]
    assert sum(a != b for a, b in itertools.pairwise(nodes)) == 2
    assert nodes[0] == "b"


def test_stages_are_on_the_nodes_whose_gpus_they_were_planned_for():
    places = order_stages({0: "b", 1: "a", 2: "b"}, "a")
    found = Placement(cast(Any, "group"), "a", places, (), {})
    arranged = found.arranged(["b", "", "b"])  # the driver's has no name where no other is known
    assert [(place.bundle_index, place.node_id) for place in arranged.stages] == [(0, "b"), (1, "a"), (2, "b")]
    with pytest.raises(ResourceError, match="placed on other machines") as caught:
        found.arranged(["a", "a", "b"])
    assert caught.value.got == "nodes a, b, b"


@pytest.mark.parametrize("strategy", ["pack", "spread", "strict_pack", "strict_spread"])
def test_what_fits_is_let_through(strategy):
    check_capacity(_nodes(2, 2), [{"GPU": 1.0, "CPU": 0.01}] * 2, strategy)
    check_capacity(_nodes(1), [{"GPU": 0.5}], strategy)
    encoder = {"GPU": 0.25, "CPU": 0.01}
    check_capacity(_nodes(2, 2, 2), [{"GPU": 0.5}, {"GPU": 0.5}, encoder], strategy)


@pytest.mark.parametrize(
    ("num_gpus", "bundle", "num_stages", "strategy", "words"),
    [
        ((0, 0), {"GPU": 1.0}, 2, "pack", "lacks resources"),
        ((1, 1), {"TPU": 1.0}, 1, "pack", "lacks resources"),
        ((1, 1, 1), {"GPU": 1.5}, 2, "pack", "no room"),
        ((2, 2), {"GPU": 1.0}, 3, "strict_pack", "no room"),
        ((4, 0), {"GPU": 1.0}, 2, "strict_spread", "no room"),
        ((0.5, 0.5), {"GPU": 1.0}, 1, "spread", "no room"),
    ],
)
def test_what_can_never_fit_is_refused_with_what_is_lacking(num_gpus, bundle, num_stages, strategy, words):
    with pytest.raises(ResourceError, match=words) as caught:
        check_capacity(_nodes(*num_gpus), [bundle] * num_stages, strategy)
    error = caught.value
    assert error.got is not None
    assert error.expected is not None
    assert error.hint is not None
    if words == "no room":
        assert "host0" in str(error.got)


@pytest.mark.parametrize(
    ("num_gpus", "strategy"), [((2,), "pack"), ((2, 2), "strict_pack"), ((2, 2), "strict_spread"), ((1, 1), "spread")]
)
def test_encoders_need_room_too(num_gpus, strategy):
    with pytest.raises(ResourceError) as caught:
        check_capacity(_nodes(*num_gpus), [{"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 0.5, "CPU": 0.01}], strategy)
    assert "num_encoders" in caught.value.hint


class ChangingCluster:
    """A cluster that has room only at a later try."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room_at_try: int | None) -> None:
        self.num_tries, self._room_at_try = 0, room_at_try
        monkeypatch.setattr(placement, "reserve", self.reserve)
        monkeypatch.setattr(placement, "_POLL_S", 0.01)

    def reserve(self, *_: object) -> str:
        self.num_tries += 1
        if self.num_tries != self._room_at_try:
            raise ResourceError("no room", expected="2 nodes")
        return "a placement"


def test_a_restart_waits_for_a_node_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ChangingCluster(monkeypatch, room_at_try=3)
    found: object = placement.reserve_when_there_is_room([{}], 1, "pack", Deadline(20.0), lambda: None)
    assert found == "a placement"


def test_a_restart_that_waits_in_vain_says_what_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    ChangingCluster(monkeypatch, room_at_try=None)
    with pytest.raises(ResourceError, match="2 nodes"):
        placement.reserve_when_there_is_room([{}], 1, "pack", Deadline(0.05), lambda: None)


def test_a_wait_for_nodes_ends_when_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ChangingCluster(monkeypatch, room_at_try=None)

    def check() -> None:
        raise EngineDeadError("the engine was closed")

    with pytest.raises(EngineDeadError):
        placement.reserve_when_there_is_room([{}], 1, "pack", Deadline(20.0), check)
