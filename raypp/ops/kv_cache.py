"""The paged KV cache of one layer: blocks of token slots, keys and values.

A token's slot is `block id * block_size + offset in the block`. Block 0 is the null block: no request owns it, padding
and tokens past a row's limit are written there.
"""

from __future__ import annotations

import torch


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return one layer's cache, [2, num_blocks, block_size, num_kv_heads, head_dim], keys first.

    All zeros: attention reads whole blocks, and what it masks must still be finite.
    """
    return torch.zeros(2, num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)


def write_kv_cache(
    kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_slots: torch.Tensor, value_slots: torch.Tensor
) -> None:
    """Write the keys and values of the step's tokens into the cache, in place.

    Shapes: kv_cache [2, num_blocks, block_size, Hk, D]; k, v [T, Hk, D]; key_slots [T] int64; value_slots [T] int64,
    the same plus the number of slots, see `value_slots_of`. Where slots repeat (in the null block), any may win.
    """
    slots = kv_cache.view(-1, *kv_cache.shape[3:])  # keys and values in one dimension: one view for both
    slots.index_copy_(0, key_slots, k)
    slots.index_copy_(0, value_slots, v)


def value_slots_of(kv_cache: torch.Tensor, key_slots: torch.Tensor) -> torch.Tensor:
    """Return where the values of `key_slots` lie when keys and values are counted in one dimension. Once per step."""
    return key_slots + kv_cache.shape[1] * kv_cache.shape[2]
