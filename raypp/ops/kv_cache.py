"""The paged KV cache of one layer: blocks of token slots, keys and values, each head's tokens side by side.

A token's slot is `block id * block_size + offset in the block`. Block 0 is the null block: no request owns it, padding
and tokens past a row's limit are written there. Within a block heads come before tokens (what FlashInfer calls HND): a
gather then copies `block_size * head_dim` elements in a row, into the order in which attention multiplies them.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_ALIGNMENT = 64  # bytes; as torch aligns its own


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return one layer's cache, [2, num_blocks, num_kv_heads, block_size, head_dim], keys first.

    All zeros: attention reads whole blocks, and what it masks must still be finite.
    """
    shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
    if device.type == "cpu":
        return _zeros_on_demand(math.prod(shape), dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def _zeros_on_demand(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory the system allocates when they are first written; torch would write all of them now."""
    num_bytes = count * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype)


def write_kv_cache(
    kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_rows: torch.Tensor, value_rows: torch.Tensor
) -> None:
    """Write the keys and values of the step's tokens into the cache, in place.

    Shapes: kv_cache [2, num_blocks, Hk, block_size, D]; k, v [T, Hk, D]; key_rows, value_rows [T * Hk] int64, see
    `cache_rows`. Where rows repeat (in the null block), any may win.
    """
    head_dim = kv_cache.shape[4]
    rows = kv_cache.view(-1, head_dim)
    rows.index_copy_(0, key_rows, k.reshape(-1, head_dim))
    rows.index_copy_(0, value_rows, v.reshape(-1, head_dim))


def cache_rows(kv_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where slots lie when a cache is seen as rows of D elements: the keys' and the values', [T * Hk] int64.

    Shapes: slots [T] int64. The same for all layers: once per step.
    """
    _, num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    blocks = slots // block_size
    first_heads = torch.add(slots, blocks, alpha=(num_kv_heads - 1) * block_size)
    heads = torch.arange(0, num_kv_heads * block_size, block_size, device=slots.device)
    keys = (first_heads.unsqueeze(1) + heads).view(-1)
    return keys, keys + num_blocks * num_kv_heads * block_size
