"""Where the time of a stage's host goes in a step, on a GPU: by kind of call, and beside the calls.

A stage factory for `LLM(..., stage_factory=HostCalls(folder))`: the stages are as ever, but each actor times what its
stage thread calls during `Stage.step`, and keeps the last steps in `folder/stage-N.json`. Timing costs some tenths of a
microsecond per call.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raypp.models.config import ModelConfig
from raypp.stage.spec import StageSpec

_NUM_KEPT, _NUM_BETWEEN_WRITES = 400, 100
STEP, PROCESSOR = "step", "processor time"
"""Of a step: from its beginning to its end, and how much of that its thread ran; the rest it waited for others."""


@dataclass(frozen=True)
class HostCalls:
    """Makes the models of stages as ever, and times the calls of the process that it makes them in.

    Args:
        folder: Where the figures go, on the node of the stages.
    """

    folder: str

    def __call__(self, spec: StageSpec, config: ModelConfig) -> Any:
        """Return the model of one stage."""
        from raypp.stage.build import build_stage_model
        from raypp.stage.stage import Stage
        from raypp.transport.cuda_device import CudaDevice

        times = _StepTimes(Path(self.folder) / f"stage-{spec.stage_index}.json")
        times.watch(torch.cuda.CUDAGraph, "replay", "replays")
        times.watch(CudaDevice, "wait", "flags")
        times.watch(CudaDevice, "write", "flags")
        times.watch(torch.Tensor, "copy_", "copies")
        for name in ("record", "query", "elapsed_time", "synchronize"):
            times.watch(torch.cuda.Event, name, "events")
        Stage.step = times.of_steps(Stage.step)  # type: ignore[method-assign]
        return build_stage_model(spec, config, None)


def read_calls(folder: Path, num_stages: int) -> list[dict[str, dict[str, float]]]:
    """Return for every stage, by kind of call, the medians over the last steps: microseconds, and number of calls."""
    found = []
    for index in range(num_stages):
        steps = json.loads((folder / f"stage-{index}.json").read_text())
        kinds = sorted({kind for step in steps for kind in step["us"]})
        found.append(
            {
                kind: {
                    "us": statistics.median(step["us"].get(kind, 0.0) for step in steps),
                    "calls": statistics.median(step["calls"].get(kind, 0) for step in steps),
                }
                for kind in kinds
            }
        )
    return found


class _StepTimes:
    """The times of the last steps of one process, of the thread that steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread: int | None = None  # that is inside of a step
        self._ns: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._kept: deque[dict[str, dict[str, float]]] = deque(maxlen=_NUM_KEPT)
        self._num_steps = 0

    def watch(self, owner: Any, name: str, kind: str) -> None:
        """Time a method, in steps."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._thread != threading.get_ident():
                return original(*args, **kwargs)
            begun = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._ns[kind] += time.perf_counter_ns() - begun
                self._calls[kind] += 1

        setattr(owner, name, timed)

    def of_steps(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Stage.step` that notes what it took."""

        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._ns.clear()
            self._calls.clear()
            self._thread = threading.get_ident()
            begun, ran = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return step(*args, **kwargs)
            finally:
                self._ns[PROCESSOR] = time.thread_time_ns() - ran
                self._ns[STEP] = time.perf_counter_ns() - begun
                self._thread = None
                self._note()

        return timed

    def _note(self) -> None:
        self._kept.append({"us": {kind: ns / 1e3 for kind, ns in self._ns.items()}, "calls": dict(self._calls)})
        self._num_steps += 1
        if self._num_steps % _NUM_BETWEEN_WRITES == 0:
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps(list(self._kept)))
            os.replace(beside, self._path)
