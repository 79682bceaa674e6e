"""KV blocks of a CPU's caches, in other memory of the same CPU."""

from __future__ import annotations

import math

import numpy as np
import torch

from raypp.messages import Int32s
from raypp.ops.block_store import TorchBlockMover, planes_of
from raypp.ops.kv_cache import zeros_on_demand


class TorchBlockStore:
    """Copies at once.

    Args:
        kv_caches: [L, 2, num_blocks, Hk, block_size, D].
        num_cpu_blocks: Blocks that there is room for.
    """

    def __init__(self, kv_caches: torch.Tensor, num_cpu_blocks: int) -> None:
        self._planes = planes_of(kv_caches)
        self._mover = TorchBlockMover()
        num_planes, _, num_words = self._planes.shape
        shape = num_cpu_blocks, num_planes, num_words
        self._memory = zeros_on_demand(math.prod(shape), self._planes.dtype).view(shape)

    def copy_out(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks of the caches to CPU memory."""
        staged = self._memory.new_empty(len(blocks), *self._memory.shape[1:])
        self._mover.gather(self._planes, _indices(blocks), staged)
        self._memory.index_copy_(0, _indices(cpu_blocks), staged)

    def copy_in(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks from CPU memory into the caches."""
        self._mover.scatter(self._planes, _indices(blocks), self._memory.index_select(0, _indices(cpu_blocks)))


def _indices(blocks: Int32s) -> torch.Tensor:
    return torch.from_numpy(blocks.astype(np.int64))
