"""Which link joins two stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch

from raypp.config.sections import LinkKind, TransportKind
from raypp.errors import ConfigError
from raypp.transport.edges import Edge
from raypp.transport.link_choice import StagePlace, resolve_link

EDGE = Edge("forward 0", 0, 1, 3, 64)
CPU = StagePlace("node a", "process 1", None)
ON_X = StagePlace("node a", "process 1", "x", ("x", "y"))
ON_Y = StagePlace("node a", "process 2", "y", ("y", "x"))
Case = tuple[StagePlace, StagePlace, LinkKind]

CASES: dict[str, Case] = {
    "cpus": (CPU, replace(CPU, process="process 2"), "gloo"),
    "cpus of two nodes": (CPU, replace(CPU, node="node b"), "gloo"),
    "peers": (ON_X, ON_Y, "ipc"),
    "one gpu, two processes": (ON_X, replace(ON_X, process="process 2"), "ipc"),
    "one way only": (ON_X, replace(ON_Y, reachable_gpus=("y",)), "nccl"),
    "the other way only": (replace(ON_X, reachable_gpus=("x",)), ON_Y, "nccl"),
    "two nodes": (ON_X, replace(ON_Y, node="node b"), "nccl"),
    "one process, two gpus": (ON_X, replace(ON_Y, process="process 1"), "nccl"),
    "one process, one gpu": (ON_X, ON_X, "gloo"),
    "one gpu, two containers": (ON_X, replace(ON_X, node="node b", process="process 2"), "gloo"),
    "a gpu and a cpu": (ON_X, replace(CPU, process="process 2"), "gloo"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_auto_takes_the_best_that_can(case: Case) -> None:
    sender, receiver, expected = case
    assert resolve_link("auto", EDGE, sender, receiver) == expected
    assert resolve_link("auto", EDGE, receiver, sender) == expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("asked", ["ipc", "nccl"])
def test_what_is_asked_for_is_given_or_refused(asked: Literal["ipc", "nccl"], case: Case) -> None:
    sender, receiver, best = case
    possible = {"ipc": best == "ipc", "nccl": None not in (sender.gpu, receiver.gpu) and sender.gpu != receiver.gpu}
    if possible[asked]:
        assert resolve_link(asked, EDGE, sender, receiver) == asked
    else:
        with pytest.raises(ConfigError, match=f"{asked} links cannot join stage 0 and stage 1"):
            resolve_link(asked, EDGE, sender, receiver)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("asked", ["gloo", "ray_collective"])
def test_links_between_host_memories_can_always_be_had(asked: Literal["gloo", "ray_collective"], case: Case) -> None:
    assert resolve_link(asked, EDGE, case[0], case[1]) == asked


def test_refusals_say_why() -> None:
    with pytest.raises(ConfigError, match="two ranks on one GPU"):
        resolve_link("nccl", EDGE, ON_X, replace(ON_X, process="process 2"))
    with pytest.raises(ConfigError, match="GPU y does not reach GPU x"):
        resolve_link("ipc", EDGE, ON_X, replace(ON_Y, reachable_gpus=("y",)))
    with pytest.raises(ConfigError, match="one process"):
        resolve_link("ipc", EDGE, ON_X, ON_X)
    with pytest.raises(ConfigError, match="without a GPU"):
        resolve_link("ipc", EDGE, CPU, ON_X)
    with pytest.raises(ConfigError, match="no process to share"):
        resolve_link("local", EDGE, ON_X, ON_Y)


def test_a_place_travels_as_text() -> None:
    here = StagePlace.here(torch.device("cpu"))
    assert here.gpu is None
    assert StagePlace.from_json(here.to_json()) == here
    assert StagePlace.from_json(ON_X.to_json()) == ON_X


def test_every_link_can_be_asked_for() -> None:
    assert set(get_args(TransportKind)) == {"auto", *get_args(LinkKind)}
