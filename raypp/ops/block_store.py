"""KV blocks in CPU memory, of caches on any device; see `raypp.messages.BlockCopies`.

A store belongs to caches of one shape: those of a stage's layers, which are one tensor, or that of a draft head. One
block of all these layers lies in one piece in CPU memory, so a block is one transfer, and neighbours are one together.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from raypp.messages import Int32s

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class BlockStore(Protocol):
    """CPU memory for blocks of some caches. On a GPU what a call orders is done by the current stream."""

    def copy_out(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks of the caches to CPU memory. Shapes: [n] both; `cpu_blocks` all differ."""

    def copy_in(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks from CPU memory into the caches. Shapes: [n] both; `blocks` all differ."""


def by_block(kv_caches: torch.Tensor) -> torch.Tensor:
    """Return caches as rows of whole blocks, [num_blocks, 2 * L, words]: a view that can be copied by index.

    Shapes: kv_caches [L, 2, num_blocks, Hk, block_size, D].
    """
    num_layers, _, num_blocks, *block = kv_caches.shape
    num_bytes = math.prod(block) * kv_caches.element_size()
    words = next(word for word in _WORDS if num_bytes % word.itemsize == 0)
    return kv_caches.view(num_layers * 2, num_blocks, -1).view(words).transpose(0, 1)
