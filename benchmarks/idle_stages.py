"""Stages whose device does nothing: what is left is what their hosts do. For measurements and tests without a GPU.

The stages, their plans, rings, links and results are real. A replay computes nothing, a flag of a link is passed at
once, and a model only makes tensors. So every call that a GPU would be given is still made, and costs what it costs
Python; what the driver of a GPU takes for it is missing, and is to be added by the number of calls, see `DeviceCalls`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raypp.graphs.graph_manager import CudaGraphManager
from raypp.graphs.pieces import MemoryUse, Replay
from raypp.plan.engine_plan import EnginePlan
from raypp.stage.build_stage import allocate_kv_caches
from raypp.stage.schemas import StageSchemas
from raypp.stage.stage import Stage
from raypp.stage.step_sizes import StepSizes
from raypp.testing.fake_stage import FakeModel
from raypp.tracing import Tracer
from raypp.transport.edges import Edge, StageLinks, ends_in_one_process, pipeline_edges
from raypp.transport.ipc.cuda_device import CudaDevice
from raypp.transport.ipc.ipc_ends import FlagForcer, IpcEdgeMemory, IpcReceiver, IpcSender
from raypp.transport.schema import MessageSpec


class DeviceCalls(TorchDispatchMode):
    """Counts, while it is entered, what a stage asks of its device.

    Attributes:
        counts: `replays` of graphs, `flags` waited for or written, `kernels` and copies launched, `buffers` allocated,
            and `views` of tensors, which cost the host a little and the device nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returns = func._schema.returns
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
        is_allocation = func.overloadpacket.__name__ in ("empty", "empty_like", "empty_strided")
        self.counts["views" if is_view else "buffers" if is_allocation else "kernels"] += 1
        return func(*args, **(kwargs or {}))


class IdleGraphs:
    """A `GraphMaker` whose graphs do nothing.

    Args:
        calls: Where replays are counted.
    """

    can_hold_break_points = True

    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Nothing is needed."""
        yield

    def begin(self) -> None:
        """Begin nothing."""

    def end(self) -> Replay:
        """Return what counts."""
        return self._replay

    def abandon(self) -> None:
        """Keep nothing."""

    def memory(self) -> MemoryUse:
        """Nobody counts main memory."""
        return MemoryUse(0, 0)

    def trim(self) -> None:
        """Nothing is kept."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def _replay(self) -> None:
        self._calls["replays"] += 1


class _IdleStream:
    """The part of a `CudaDevice` that a step uses."""

    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    def wait(self, flag: int, value: int) -> None:
        self._calls["flags"] += 1

    def write(self, flag: int, value: int) -> None:
        self._calls["flags"] += 1


def build_idle_stages(
    plan: EnginePlan, calls: DeviceCalls, tracer: Callable[[int], Tracer] | None = None
) -> list[Stage]:
    """Return the stages of a plan without their models, joined by links as between GPUs of one node.

    Args:
        plan: What to make, for CPUs.
        calls: Where replays and flags are counted.
        tracer: Makes that of a stage; None: nothing is traced.
    """
    specs = [plan.stage_spec(index) for index in range(len(plan.stages))]
    models = [FakeModel(0.0, plan.model.vocab_size) for _ in specs]
    schemas = StageSchemas.of(specs[0], models[0].hidden_size)
    stages = [
        Stage(
            spec,
            model,
            allocate_kv_caches(spec, plan.model),
            links,
            schemas,
            Tracer(f"stage {spec.stage_index}", enabled=False) if tracer is None else tracer(spec.stage_index),
            CudaGraphManager(IdleGraphs(calls.counts)),
        )
        for spec, model, links in zip(
            specs,
            models,
            _idle_links(calls.counts, schemas.forward_messages(specs[0]), schemas.feedback_messages(specs[0])),
            strict=True,
        )
    ]
    sizes = StepSizes.common([stage.graphs.sizes for stage in stages])
    for stage in stages:
        stage.pad_to(sizes)
    return stages


def _idle_links(calls: Counter[str], forward: list[MessageSpec], feedback: MessageSpec) -> list[StageLinks]:
    device = cast(CudaDevice, _IdleStream(calls))  # its other methods are for opening and closing

    def open_edge(edge: Edge) -> tuple[IpcSender, IpcReceiver]:
        slots = torch.zeros(edge.num_slots, edge.slot_bytes, dtype=torch.uint8)
        memory = IpcEdgeMemory(slots, published=0, released=0)
        ends = (device, memory, FlagForcer(device), lambda: None)
        return IpcSender(*ends), IpcReceiver(*ends)

    edges = pipeline_edges(len(forward) + 1, [spec.slot_bytes for spec in forward], feedback.slot_bytes)
    return [StageLinks.of(index, ends) for index, ends in enumerate(ends_in_one_process(edges, open_edge))]
