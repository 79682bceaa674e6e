"""KV blocks of a GPU's caches in page-locked CPU memory: gathered on the GPU, then copied in as few pieces as can be.

    caches, scattered over layers --gather--> staging: block after block --copies of runs--> CPU memory      and back

The gather and its reverse run at the GPU's own speed; the copies are the copy engine's work, which takes no
multiprocessor from the step that runs beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import NULL_BLOCK, Int32s
from raypp.ops.block_store import BlockMover, planes_of
from raypp.ops.cuda.locked_memory import locked_memory
from raypp.ops.host_to_device import to_device

Places = NDArray[Any]  # integers


class PinnedBlockStore:
    """Copies between a GPU and page-locked memory. The host waits for nothing.

    Args:
        kv_caches: [L, 2, num_blocks, Hk, block_size, D], on the GPU.
        num_cpu_blocks: Blocks that there is room for.
        num_staged: Blocks that the GPU holds on their way at a time.
        mover: Of the GPU.

    Raises:
        ResourceError: there is not so much memory, or it cannot be page-locked.
    """

    def __init__(self, kv_caches: torch.Tensor, num_cpu_blocks: int, num_staged: int, mover: BlockMover) -> None:
        self._planes, self._mover = planes_of(kv_caches), mover
        num_planes, _, num_words = self._planes.shape
        num_bytes = num_cpu_blocks * num_planes * num_words * self._planes.element_size()
        memory = locked_memory(num_bytes, self).view(self._planes.dtype)
        self._memory = memory.view(num_cpu_blocks, num_planes, num_words)
        self._staging = self._planes.new_empty(num_staged, num_planes, num_words)
        nobodys = np.array([NULL_BLOCK], np.int32)  # kernels compile, and are loaded
        self.copy_out(nobodys, nobodys)
        self.copy_in(nobodys, nobodys)

    def copy_out(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks of the caches to CPU memory."""
        for some_blocks, places in self._pieces(blocks, cpu_blocks):
            staged = self._staging[: len(places)]
            self._mover.gather(self._planes, to_device(some_blocks, staged.device), staged)
            for start, end in runs(places):
                first = int(places[start])
                self._memory[first : first + end - start].copy_(staged[start:end], non_blocking=True)

    def copy_in(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks from CPU memory into the caches."""
        for some_blocks, places in self._pieces(blocks, cpu_blocks):
            staged = self._staging[: len(places)]
            for start, end in runs(places):
                first = int(places[start])
                staged[start:end].copy_(self._memory[first : first + end - start], non_blocking=True)
            self._mover.scatter(self._planes, to_device(some_blocks, staged.device), staged)

    def _pieces(self, blocks: Int32s, cpu_blocks: Int32s) -> Iterator[tuple[Places, Places]]:
        """Yield what the staging holds at a time, by the places in CPU memory: neighbours come together."""
        order = np.argsort(cpu_blocks)
        ordered, places = blocks[order].astype(np.int64), cpu_blocks[order]
        for start in range(0, len(places), len(self._staging)):
            piece = slice(start, start + len(self._staging))
            yield ordered[piece], places[piece]


def runs(places: Places) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of consecutive numbers among ascending ones, [n]."""
    starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist()]
    yield from zip(starts, [*starts[1:], len(places)], strict=True)
