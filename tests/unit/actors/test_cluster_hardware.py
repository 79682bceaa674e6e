"""Hardware that others have."""

from __future__ import annotations

from raypp.actors.engine_actors import may_be_elsewhere, smallest_of
from raypp.config.engine_config import EngineConfig
from raypp.plan.hardware import Gpu, Hardware, Machine


def test_all_gpus_count_and_what_the_weakest_has():
    large, small = Machine((Gpu(140 << 30),) * 8, node_id="a"), Machine((Gpu(24 << 30),), node_id="b")
    nodes = [
        Hardware(64, 512 << 30, 8, "large", 140 << 30, (9, 0), machines=(large,)),
        Hardware(16, 128 << 30, 1, "small", 24 << 30, (8, 6), machines=(small,)),
    ]
    both = Hardware(16, 128 << 30, 9, "small", 24 << 30, (8, 6), num_machines=2, machines=(large, small))
    assert smallest_of(nodes) == both
    assert smallest_of([]) is None


def test_stages_may_be_elsewhere_where_there_is_a_cluster(monkeypatch):
    any_device = EngineConfig.from_flat("tiny")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert may_be_elsewhere(any_device)
    assert not may_be_elsewhere(EngineConfig.from_flat("tiny", device="cpu"))
    monkeypatch.delenv("RAY_ADDRESS")
    assert not may_be_elsewhere(any_device)
