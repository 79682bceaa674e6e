"""The paged KV cache of one layer: blocks of token slots, keys and values, each head's tokens side by side.

A token's slot is `block id * block_size + offset in the block`. Block 0 is the null block: no request owns it, padding
and tokens past a row's limit are written there. Within a block heads come before tokens (what FlashInfer calls HND): a
gather then copies `block_size * head_dim` elements in a row, into the order in which attention multiplies them.

A cache has the type of the activations, or is `FP8`. Then it holds keys and values divided by a scale of their layer
(`raypp.ops.attention.Heads`), and a step attends to its own tokens as the cache holds them, too: what a token's keys
and values are does not depend on how its prompt was cut.
"""

from __future__ import annotations

import math

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
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
    return allocate_kv_caches(1, num_blocks, block_size, num_kv_heads, head_dim, dtype, device)[0]


def allocate_kv_caches(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return the caches of layers alike as one tensor, [num_layers, ...]; see `allocate_kv_cache`."""
    shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
    if device.type == "cpu":
        return zeros_on_demand(math.prod(shape), dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def zeros_on_demand(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory the system allocates when they are first written; torch would write all of them now."""
    num_bytes = count * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype)


def as_cached(x: torch.Tensor, kv_cache: torch.Tensor, scale: float) -> torch.Tensor:
    """Return keys or values as the cache holds them: in 8 bits x / scale, and at most FP8_MAX. NaN stays NaN."""
    if kv_cache.dtype != FP8:
        return x
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def write_kv_cache(
    kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_rows: torch.Tensor, value_rows: torch.Tensor
) -> None:
    """Write the keys and values of the step's tokens into the cache, in place.

    Shapes: kv_cache [2, num_blocks, Hk, block_size, D]; k, v [T, Hk, D], of the cache's type (`as_cached`); key_rows,
    value_rows [T * Hk] int64, see `cache_rows`. Where rows repeat (in the null block), any may win.
    """
    head_dim = kv_cache.shape[4]
    rows = movable(kv_cache).view(-1, head_dim)
    rows.index_copy_(0, key_rows, movable(k).reshape(-1, head_dim))
    rows.index_copy_(0, value_rows, movable(v).reshape(-1, head_dim))


def gather_blocks(kv_cache: torch.Tensor, head_blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks of one head each, [n, block_size * D], of the cache's type.

    Shapes: head_blocks [n] int64, places in the cache seen as [2 * num_blocks * Hk, block_size * D].
    """
    rows = movable(kv_cache).view(-1, kv_cache.shape[3] * kv_cache.shape[4])
    return rows.index_select(0, head_blocks).view(kv_cache.dtype)


def movable(x: torch.Tensor) -> torch.Tensor:
    """Return keys, values or a cache as something that torch can copy by index: bytes, if they are in 8 bits."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


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
