"""KV blocks of a GPU's caches in page-locked CPU memory: gathered on the GPU, then copied in as few pieces as can be.

    caches, scattered over layers --gather--> staging: block after block --copies of runs--> CPU memory      and back

The gather and its reverse run at the GPU's own speed; the copies are the copy engine's work, which takes no
multiprocessor from the step that runs beside them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.errors import ResourceError
from raypp.messages import Int32s
from raypp.ops.block_store import by_block, cpu_memory
from raypp.ops.host_to_device import to_device

Places = NDArray[Any]  # integers


class PinnedBlockStore:
    """Copies between a GPU and page-locked memory. The host waits for nothing.

    Args:
        kv_caches: [L, 2, num_blocks, Hk, block_size, D], on the GPU.
        num_cpu_blocks: Blocks that there is room for.
        num_staged: Blocks that the GPU holds on their way at a time.

    Raises:
        ResourceError: the memory cannot be page-locked.
    """

    def __init__(self, kv_caches: torch.Tensor, num_cpu_blocks: int, num_staged: int) -> None:
        self._rows = by_block(kv_caches)
        self._memory = cpu_memory(self._rows, num_cpu_blocks)
        _page_lock(self._memory, self)
        self._staging = self._rows.new_empty((num_staged, *self._rows.shape[1:]))

    def copy_out(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks of the caches to CPU memory."""
        for some_blocks, places in self._pieces(blocks, cpu_blocks):
            staged = self._staging[: len(places)]
            torch.index_select(self._rows, 0, to_device(some_blocks, staged.device), out=staged)
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
            self._rows.index_copy_(0, to_device(some_blocks, staged.device), staged)

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


def _page_lock(memory: torch.Tensor, owner: object) -> None:
    """Page-lock memory until its owner is gone. torch's own page-locked memory comes in powers of two.

    Raises:
        ResourceError: the system refuses.
    """
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    status = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if status:
        raise ResourceError(
            "the memory for KV blocks cannot be page-locked",
            got=f"CUDA error {status} for {memory.nbytes / 2**30:.2f} GiB",
            expected="a system that lets this process lock so much of its main memory",
            hint="lower cpu_kv_bytes, or raise the limit of locked memory (ulimit -l, a container's memory)",
        )
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
