"""KV blocks of a GPU's caches in page-locked CPU memory: gathered on the GPU, then copied in as few pieces as can be.

    caches, scattered over layers --gather--> staging: block after block --copies of runs--> CPU memory      and back

The gather and its reverse run at the GPU's own speed; the copies are the copy engine's work, which takes no
multiprocessor from the step that runs beside them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.errors import ResourceError
from raypp.messages import NULL_BLOCK, Int32s
from raypp.ops.block_store import BlockMover, Planes
from raypp.ops.host_to_device import to_device
from raypp.ops.kv_cache import LayerCache, zeros_on_demand

_left_behind: list[torch.Tensor] = []
_CGROUP = Path("/sys/fs/cgroup")


Places = NDArray[Any]  # integers


class PinnedBlockStore:
    """Copies between a GPU and page-locked memory. The host waits for nothing.

    Args:
        caches: Of layers with the same blocks, on the GPU.
        num_cpu_blocks: Blocks that there is room for.
        num_staged: Blocks that the GPU holds on their way at a time.
        mover: Of the GPU.

    Raises:
        ResourceError: there is not so much memory, or it cannot be page-locked.
    """

    def __init__(self, caches: Sequence[LayerCache], num_cpu_blocks: int, num_staged: int, mover: BlockMover) -> None:
        self._planes, self._mover = Planes(caches), mover
        memory = locked_memory(num_cpu_blocks * self._planes.piece_bytes, self)
        self._memory = memory.view(self._planes.dtype).view(num_cpu_blocks, self._planes.num_words)
        self._staging = self._planes.pieces(num_staged)
        null_block = np.array([NULL_BLOCK], np.int32)  # kernels compile, and are loaded
        self.copy_out(null_block, null_block)
        self.copy_in(null_block, null_block)

    def copy_out(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        for some_blocks, places in self._pieces(blocks, cpu_blocks):
            staged = self._staging[: len(places)]
            self._mover.gather(self._planes, to_device(some_blocks, staged.device), staged)
            for start, end in runs(places):
                first = int(places[start])
                self._memory[first : first + end - start].copy_(staged[start:end], non_blocking=True)

    def copy_in(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
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


def locked_memory(num_bytes: int, owner: object) -> torch.Tensor:
    """Return page-locked memory, [num_bytes] uint8 of any content, for as long as its owner lives.

    At start only: locking takes a second for some GiB. Memory is locked where it lies, since torch's own comes in
    powers of two. What an owner leaves stays locked for the next owner of as much: the next life of a stage.

    Raises:
        ResourceError: there is not so much memory to spare, or the system does not let it be locked.
    """
    if any(memory.nbytes == num_bytes for memory in _left_behind):
        torch.cuda.synchronize()  # copies that its last owner queued may be under way
        memory = _left_behind.pop([memory.nbytes for memory in _left_behind].index(num_bytes))
    else:
        _unlock_what_is_left()
        memory = _lock(num_bytes)
    weakref.finalize(owner, _left_behind.append, memory).atexit = False
    return memory


def spare_bytes() -> int | None:
    """Return the main memory that this machine or container has to spare; None where the system does not tell."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            # What it has read of files, such as a checkpoint's, counts as its memory, and goes when memory is needed.
            files = int(used["active_file"]) + int(used["inactive_file"])
            found.append(int(limit) - int((_CGROUP / "memory.current").read_text()) + files)
    except (OSError, ValueError, KeyError):
        pass  # not Linux, or a container that shows neither
    return min(found, default=None)


def _lock(num_bytes: int) -> torch.Tensor:
    spare = spare_bytes()
    if spare is not None and num_bytes > spare:
        raise ResourceError(
            "there is too little main memory for KV blocks",
            got=f"{spare / 2**30:.2f} GiB to spare",
            expected=f"{num_bytes / 2**30:.2f} GiB, which will be page-locked",
            hint="lower cpu_kv_bytes; it is for each stage",
        )
    memory = zeros_on_demand(num_bytes, torch.uint8)
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if status:
        raise ResourceError(
            "the memory for KV blocks cannot be page-locked",
            got=f"CUDA error {status} for {num_bytes / 2**30:.2f} GiB",
            expected="a system that lets this process lock so much of its main memory",
            hint="lower cpu_kv_bytes, or raise the limit of locked memory (ulimit -l, a container's memory)",
        )
    return memory


def _unlock_what_is_left() -> None:
    while _left_behind:
        torch.cuda.cudart().cudaHostUnregister(_left_behind.pop().data_ptr())
