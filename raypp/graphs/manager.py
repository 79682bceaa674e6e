"""The graphs of one stage: recorded once, then replayed. Without CUDA, or without graphs, the same programs are called.

A program is a callable without arguments and without a result. It reads and writes tensors that exist before it is
recorded and keep their addresses, and whatever it makes for itself lies in one memory pool that all graphs share. It
must not wait for the device, and everything that changes from one replay to the next must be in those tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

_LOG = logging.getLogger(__name__)

Program = Callable[[], None]


@dataclass
class RecordingCost:
    """What recording the graphs of a mode took."""

    num_graphs: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0


class CudaGraphManager:
    """Records programs and runs them by their keys.

    Args:
        device: Where they run.
        replay: Whether to record CUDA graphs. Else programs are kept and called, which is all that a CPU can do.
    """

    def __init__(self, device: torch.device, *, replay: bool) -> None:
        assert not replay or device.type == "cuda", "only CUDA has graphs"
        self._device = device
        self._replay = replay
        self._pool: Any = None  # torch names its type nowhere
        self._runs: dict[Hashable, Program] = {}
        self.costs: dict[str, RecordingCost] = {}
        """By mode."""

    def record(self, mode: str, key: Hashable, program: Program) -> None:
        """Record a program; it is executed on the way. Record the largest first: the smaller ones reuse its memory.

        Args:
            mode: What it is accounted to.
            key: What `run` will name it by.
            program: What to record.
        """
        assert key not in self._runs, f"{key} is recorded already"
        cost = self.costs.setdefault(mode, RecordingCost())
        started, free_bytes = time.perf_counter(), self._free_bytes()
        program()  # compiles kernels, fills caches, makes what libraries need: none of that may be in a graph
        if self._replay:
            self._runs[key] = self._capture(program).replay
        else:
            self._runs[key] = program
        cost.num_graphs += 1
        cost.seconds += time.perf_counter() - started
        cost.memory_bytes += max(0, free_bytes - self._free_bytes())

    def run(self, key: Hashable) -> None:
        """Run what was recorded under `key`, on the current stream. Does not wait for it."""
        self._runs[key]()

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a recording of that key."""
        return key in self._runs

    def log_costs(self) -> None:
        """Say what the recordings cost."""
        for mode, cost in self.costs.items():
            _LOG.info(
                "%d %s graphs took %.1f s and %.2f GiB",
                cost.num_graphs,
                mode,
                cost.seconds,
                cost.memory_bytes / 2**30,
            )

    def _capture(self, program: Program) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            program()
        self._pool = graph.pool()
        return graph

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._replay else 0
