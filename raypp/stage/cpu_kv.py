"""A stage's KV blocks and snapshots of states in CPU memory: the copies that plans order, in their order.

On a GPU a batch of copies runs in a stream of its own, beside the steps before it:

    steps     ... | after_step | another | another | the step of the batch, and all after it
    copies               +--> out, in ------------->+

No host waits. A graph holds none of it: the waits stand in the stream before its replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from raypp.messages import BlockCopies, StepPlan, unpack
from raypp.ops.block_store import BlockStore
from raypp.ops.device_kernels import open_block_store, open_row_store
from raypp.ops.kv_cache import LayerCache
from raypp.ops.row_state import LayerMemory
from raypp.stage.stage_spec import StageSpec
from raypp.tracing import ForwardCounter, now_ns
from raypp.transport.gpu_access import CurrentStream

GroupStore = tuple[int, BlockStore]
"""A group of layers, and memory for blocks of some of its caches; behind the last group, memory for snapshots."""


class HostCpuKv:
    """For a stage on a CPU: copies are done when the call returns.

    Args:
        stores: Of its caches.
        counter: Counts how long that takes.
    """

    def __init__(self, stores: Sequence[GroupStore], counter: ForwardCounter) -> None:
        self._stores = stores
        self._counter = counter

    def before_step(self, plan: StepPlan) -> None:
        """Copy."""
        if len(plan.block_copies):
            began_ns = now_ns()
            _copy(self._stores, unpack(BlockCopies, plan.block_copies.data))
            self._counter.add_copy_wait(now_ns() - began_ns)

    def after_step(self, plan: StepPlan) -> None:
        """It is done."""


class CudaCpuKv:
    """For a stage on a GPU.

    Args:
        stores: Of its caches.
        device: The GPU.
        num_ring_entries: Steps that may be in flight at a time: older ones are done when a plan arrives.
        counter: Counts how long steps wait for copies.
    """

    def __init__(
        self, stores: Sequence[GroupStore], device: torch.device, num_ring_entries: int, counter: ForwardCounter
    ) -> None:
        self._stores = stores
        self._counter = counter
        self._stream = torch.cuda.Stream(device)
        self._current = CurrentStream(device)
        self._batches: deque[_Batch] = deque()
        self._free: list[_Batch] = []
        self._stepped = [torch.cuda.Event() for _ in range(num_ring_entries)]

    def before_step(self, plan: StepPlan) -> None:
        """Queue the copies behind the last step that has their blocks, and the plan's own step behind them."""
        if not len(plan.block_copies):
            return
        copies = unpack(BlockCopies, plan.block_copies.data)
        num_entries = len(self._stepped)
        if copies.after_step >= max(0, plan.step_id - num_entries):
            self._stream.wait_event(self._stepped[copies.after_step % num_entries])
        with torch.cuda.stream(self._stream):
            _copy(self._stores, copies)
        steps, batch = self._current.get(), self._free.pop() if self._free else _Batch()
        batch.copied.record(self._stream)
        batch.asked.record(steps)
        steps.wait_event(batch.copied)
        self._batches.append(batch)

    def after_step(self, plan: StepPlan) -> None:
        """Mark the end of the step in its stream, and count the waits that are over."""
        self._stepped[plan.step_id % len(self._stepped)].record(self._current.get())
        while self._batches and self._batches[0].is_over:
            batch = self._batches.popleft()
            self._counter.add_copy_wait(batch.wait_ns)
            self._free.append(batch)


class _Batch:
    """Moments of a plan's copies."""

    def __init__(self) -> None:
        self.asked = torch.cuda.Event(enable_timing=True)  # when the steps come to where they wait
        self.copied = torch.cuda.Event(enable_timing=True)

    @property
    def is_over(self) -> bool:
        return bool(self.asked.query() and self.copied.query())

    @property
    def wait_ns(self) -> int:
        milliseconds: float = self.asked.elapsed_time(self.copied)
        return max(0, round(milliseconds * 1e6))


def open_cpu_kv(
    spec: StageSpec,
    kv_caches: Sequence[LayerMemory],
    of_head: Sequence[LayerCache],
    of_rows: Sequence[torch.Tensor],
    counter: ForwardCounter,
) -> HostCpuKv | CudaCpuKv | None:
    """Return what copies a stage's blocks and snapshots to CPU memory and back; None: nothing is kept there.

    Args:
        spec: Which stage.
        kv_caches: Of its layers.
        of_head: Of a draft head; it has the first group's blocks.
        of_rows: All tables of rows' states, snapshots behind the rows of requests; none on a stage without states.
        counter: Counts how long steps wait for copies.

    Raises:
        ResourceError: the machine has not so much memory to spare.
    """
    if not any(group.num_cpu_blocks for group in spec.groups):
        return None
    stores = []
    for index, group in enumerate(spec.groups):
        of_layers = zip(kv_caches, spec.layer_groups, strict=True)
        of_group = [cache for cache, at in of_layers if at == index and isinstance(cache, LayerCache)]
        kinds = [caches for caches in (of_group, [] if index else of_head) if caches]
        stores += [(index, open_block_store(caches, group.num_cpu_blocks, spec.num_staged_blocks)) for caches in kinds]
    if of_rows and spec.num_cpu_snapshots:
        snapshots = [table[spec.max_num_seqs :] for table in of_rows]
        stores.append((len(spec.groups), open_row_store(snapshots, spec.num_cpu_snapshots)))
    device = torch.device(spec.device)
    if device.type != "cuda":
        return HostCpuKv(stores, counter)
    return CudaCpuKv(stores, device, spec.num_ring_entries, counter)


def _copy(stores: Sequence[GroupStore], copies: BlockCopies) -> None:
    for group, store in stores:
        out, back = copies.out_groups == group, copies.in_groups == group
        if out.any():
            store.copy_out(copies.out_block_ids[out], copies.out_cpu_block_ids[out])
        if back.any():
            store.copy_in(copies.in_block_ids[back], copies.in_cpu_block_ids[back])
