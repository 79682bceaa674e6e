"""Ray's own collectives under GPU tensors, between actors that share a GPU."""

from __future__ import annotations

import os
import sys
from typing import Any

import link_programs as programs
import pytest
import ray
import torch
from stage_processes import LinkedStage, close_links, open_links

from raypp.transport.rendezvous import Rendezvous, RendezvousServer

FORWARD_BYTES, FEEDBACK_BYTES = 1 << 16, 1 << 12


@ray.remote(num_cpus=0.01, num_gpus=0.4)
class LinkedActor:
    """One stage."""

    def __init__(self) -> None:
        self._stage = LinkedStage()

    def open(self, index: int, rendezvous: Rendezvous) -> list[str]:
        sizes = (FORWARD_BYTES, FEEDBACK_BYTES)
        return open_links(self._stage, "ray_collective", index, 2, "cuda:0", rendezvous, *sizes)

    def run(self) -> int:
        with torch.inference_mode():
            return programs.run_ring(self._stage, 200, FORWARD_BYTES, FEEDBACK_BYTES)

    def close(self) -> None:
        close_links(self._stage)


@pytest.fixture
def actors() -> Any:
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=1,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}},
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    yield [LinkedActor.remote() for _ in range(2)]
    ray.shutdown()


@pytest.mark.ray
def test_ray_collective_under_gpu_tensors(actors: list[Any]) -> None:
    server = RendezvousServer()
    kinds = ray.get([actor.open.remote(index, server.address) for index, actor in enumerate(actors)], timeout=120)
    assert kinds == [["RingSender", "RingReceiver"], ["RingReceiver", "RingSender"]]
    assert ray.get([actor.run.remote() for actor in actors], timeout=120) == [0, 0]
    ray.get([actor.close.remote() for actor in actors], timeout=60)
    server.close()
