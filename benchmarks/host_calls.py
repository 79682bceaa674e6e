"""Where the time of a stage's host goes in a step, on a GPU: by kind of call, and beside the calls.

A stage factory for `LLM(..., stage_factory=HostCalls(folder))`: the stages are as ever, but each actor times what its
stage thread calls during `Stage.step`, and writes a line per step to `folder/stage-N.jsonl`, between two steps. Timing
costs half a microsecond per call, which is in the figures.
"""

from __future__ import annotations

import functools
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raypp.models.config import ModelConfig
from raypp.stage.stage_spec import StageSpec
from raypp.tracing import now_ns

STEP = "step"
"""From a step's beginning to its end."""
RAN = "ran"
"""How much of that its thread ran; the rest it slept: for Python's lock, a processor, or inside of the driver."""
ELSE = "all else"
"""Of a step, what no watched call took."""


@dataclass(frozen=True)
class HostCalls:
    """Makes the models of stages as ever, and times the calls of the process that it makes them in.

    Args:
        folder: Where the figures go, on the node of the stages.
    """

    folder: str

    def __call__(self, spec: StageSpec, config: ModelConfig) -> Any:
        """Return the model of one stage."""
        from raypp.stage.build_stage import build_stage_model
        from raypp.stage.stage import Stage
        from raypp.transport.ipc.cuda_device import CudaDevice

        times = StepTimes(Path(self.folder) / f"stage-{spec.stage_index}.jsonl")
        times.watch(torch.cuda.CUDAGraph, "replay", "replays")
        times.watch(CudaDevice, "wait", "flags")
        times.watch(CudaDevice, "write", "flags")
        times.watch(torch.Tensor, "copy_", "copies")
        for name in ("record", "query", "elapsed_time", "synchronize"):
            times.watch(torch.cuda.Event, name, "events")
        Stage.step = times.of_steps(Stage.step)  # type: ignore[method-assign]
        return build_stage_model(spec, config, None)


def read_calls(
    folder: Path, num_stages: int, window_ns: tuple[int, int], num_steps: int
) -> list[dict[str, dict[str, float]]]:
    """Return for every stage the medians by kind of call, `{"us": ..., "calls": ...}`, with `STEP`, `RAN` and `ELSE`.

    Args:
        folder: Where the stages wrote.
        num_stages: How many there were.
        window_ns: Steps that began between these moments of `now_ns` count,
        num_steps: and of these the last ones.
    """
    found = []
    for index in range(num_stages):
        lines = (folder / f"stage-{index}.jsonl").read_text().splitlines()
        steps = [step for step in map(json.loads, lines) if window_ns[0] <= step["begun_ns"] <= window_ns[1]]
        found.append(_medians(steps[-num_steps:]))
    return found


def _medians(steps: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {
        kind: {
            "us": statistics.median(step["us"].get(kind, 0.0) for step in steps),
            "calls": statistics.median(step["calls"].get(kind, 0) for step in steps),
        }
        for kind in sorted({kind for step in steps for kind in step["us"]})
    }


class StepTimes:
    """Writes down the times of the steps of one process, of the thread that steps.

    Args:
        path: Where a line of JSON goes after every step.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._thread: int | None = None  # that is inside of a step
        self._is_inside = False  # of a watched call
        self._ns: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def watch(self, owner: Any, name: str, kind: str) -> None:
        """Time a method in steps, but not where another one calls it that is watched."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._thread != threading.get_ident() or self._is_inside:
                return original(*args, **kwargs)
            self._is_inside, begun = True, time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._ns[kind] += time.perf_counter_ns() - begun
                self._calls[kind] += 1
                self._is_inside = False

        setattr(owner, name, timed)

    def of_steps(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Stage.step` that writes down what it took."""

        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._ns.clear()
            self._calls.clear()
            self._thread = threading.get_ident()
            begun_ns, begun, ran = now_ns(), time.perf_counter_ns(), time.thread_time_ns()
            try:
                return step(*args, **kwargs)
            finally:
                ran_ns, step_ns = time.thread_time_ns() - ran, time.perf_counter_ns() - begun
                self._thread = None
                self._write(begun_ns, step_ns, ran_ns)

        return timed

    def _write(self, begun_ns: int, step_ns: int, ran_ns: int) -> None:
        took = {STEP: step_ns, RAN: ran_ns, ELSE: step_ns - self._ns.total(), **self._ns}
        us = {kind: ns / 1e3 for kind, ns in took.items()}
        self._file.write(json.dumps({"begun_ns": begun_ns, "us": us, "calls": self._calls}) + "\n")
