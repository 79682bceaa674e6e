"""KV blocks in CPU memory, of caches on any device; see `raypp.messages.BlockCopies`.

A store belongs to caches of one shape: those of a stage's layers, which are one tensor, or that of a draft head. One
block of all these layers lies in one piece in CPU memory, so a block is one transfer, and neighbours are one together.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from raypp.messages import Int32s
from raypp.ops.kv_cache import zeros_on_demand

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class BlockStore(Protocol):
    """CPU memory for blocks of some caches. On a GPU what a call orders is done by the current stream."""

    def copy_out(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks of the caches to CPU memory. Shapes: [n] both; `cpu_blocks` all differ."""

    def copy_in(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks from CPU memory into the caches. Shapes: [n] both; `blocks` all differ."""


class BlockMover(Protocol):
    """Copies between caches and pieces of whole blocks, on one device. P planes: keys and values of all layers."""

    def gather(self, planes: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy blocks into one piece each.

        Shapes: planes [P, num_blocks, words]; blocks [n] int64; staged [n, P, words].
        """

    def scatter(self, planes: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy pieces back into blocks, which all differ. Shapes: as `gather`."""


class TorchBlockMover:
    """On any device."""

    def gather(self, planes: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        torch.index_select(planes.transpose(0, 1), 0, blocks, out=staged)

    def scatter(self, planes: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        planes.transpose(0, 1).index_copy_(0, blocks, staged)


def planes_of(kv_caches: torch.Tensor) -> torch.Tensor:
    """Return caches as planes of blocks, [2 * L, num_blocks, words], in words that torch can copy.

    Shapes: kv_caches [L, 2, num_blocks, Hk, block_size, D].
    """
    num_layers, _, num_blocks, *block = kv_caches.shape
    num_bytes = math.prod(block) * kv_caches.element_size()
    words = next(word for word in _WORDS if num_bytes % word.itemsize == 0)
    return kv_caches.view(num_layers * 2, num_blocks, -1).view(words)


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
        staged = self._memory.new_empty(len(blocks), *self._memory.shape[1:])
        self._mover.gather(self._planes, _indices(blocks), staged)
        self._memory.index_copy_(0, _indices(cpu_blocks), staged)

    def copy_in(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        self._mover.scatter(self._planes, _indices(blocks), self._memory.index_select(0, _indices(cpu_blocks)))


def _indices(blocks: Int32s) -> torch.Tensor:
    return torch.from_numpy(blocks.astype(np.int64))
