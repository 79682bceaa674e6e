"""The paged KV cache of one layer: blocks of token slots, keys and values, each head's tokens side by side.

A token's slot is `block id * block_size + offset in the block`. Block 0 is the null block: no request owns it, padding
and tokens past a row's limit are written there. Within a block heads come before tokens (what FlashInfer calls HND): a
gather then copies `block_size * head_dim` elements in a row, into the order in which attention multiplies them. Heads
of keys and of values may have different sizes. Of latents the value is the latent, and the key what is rotated.

A cache has the type of the activations, or is `FP8`. Then it holds keys and values divided by a scale of their layer
(`raypp.ops.attention.Heads`), and a step attends to its own tokens as the cache holds them, too: what a token's keys
and values are does not depend on how its prompt was cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_ALIGNMENT = 64  # bytes; as torch aligns its own


class LayerCache(NamedTuple):
    """The cache of one layer."""

    keys: torch.Tensor  # [num_blocks, Hk, block_size, Dk]
    values: torch.Tensor  # [num_blocks, Hk, block_size, Dv]

    @property
    def both(self) -> torch.Tensor | None:
        """Keys and values as one tensor, [2, num_blocks, Hk, block_size, D], if they lie side by side."""
        keys, values = self
        if keys.shape != values.shape or values.data_ptr() - keys.data_ptr() != keys.nbytes:
            return None
        if values.storage_offset() - keys.storage_offset() != keys.numel():
            return None  # neighbours by chance
        return keys.as_strided((2, *keys.shape), (keys.numel(), *keys.stride()))


def allocate_layer_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerCache:
    """Return one layer's cache; keys and values lie side by side if their heads have one size.

    All zeros: attention reads whole blocks, and what it masks must still be finite.
    """
    keys, values = (num_blocks, num_kv_heads, block_size, k_dim), (num_blocks, num_kv_heads, block_size, v_dim)
    if k_dim == v_dim:
        return LayerCache(*_zeros((2, *keys), dtype, device).unbind())
    return LayerCache(_zeros(keys, dtype, device), _zeros(values, dtype, device))


def sides(caches: Sequence[LayerCache]) -> list[torch.Tensor]:
    """Return keys, values, keys, values, ... of layers."""
    return [side for cache in caches for side in cache]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return zeros_on_demand(math.prod(shape), dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def zeros_on_demand(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory the system allocates when they are first written; torch would write all of them now."""
    num_bytes = count * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype)


def as_cached(x: torch.Tensor, side: torch.Tensor, scale: float) -> torch.Tensor:
    """Return keys or values as their side of the cache holds them: in 8 bits x / scale, and at most FP8_MAX.

    NaN stays NaN.
    """
    if side.dtype != FP8:
        return x
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def write_kv_cache(cache: LayerCache, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
    """Write the keys and values of the step's tokens into the cache, in place.

    Shapes: k [T, Hk, Dk] and v [T, Hk, Dv], of the cache's type (`as_cached`); rows [T * Hk] int64, see `cache_rows`.
    Where rows repeat (in the null block), any may win.
    """
    for side, new in zip(cache, (k, v), strict=True):
        head_dim = side.shape[3]
        movable(side).view(-1, head_dim).index_copy_(0, rows, movable(new).reshape(-1, head_dim))


def gather_blocks(side: torch.Tensor, head_blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks of one head each, [n, block_size * D], of the cache's type.

    Shapes: side [..., block_size, D], keys, values, or `LayerCache.both`; head_blocks [n] int64, places in it seen as
    [-1, block_size * D].
    """
    rows = movable(side).view(-1, side.shape[-2] * side.shape[-1])
    return rows.index_select(0, head_blocks).view(side.dtype)


def movable(x: torch.Tensor) -> torch.Tensor:
    """Return keys, values or a cache as something that torch can copy by index: bytes, if they are in 8 bits."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def with_latents(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return keys of latents: each value, and its key behind it, [..., Dv + Dk]. Shapes: keys [..., Dk]."""
    return torch.cat((movable(values), movable(keys)), -1).view(keys.dtype)


def cache_rows(cache: LayerCache, slots: torch.Tensor) -> torch.Tensor:
    """Return where slots lie when keys, or values, are seen as rows of one head of one token each, [T * Hk] int64.

    Shapes: slots [T] int64. The same for all layers of a kind: once per step.
    """
    _, num_kv_heads, block_size, _ = cache.keys.shape
    blocks = slots // block_size
    first_heads = torch.add(slots, blocks, alpha=(num_kv_heads - 1) * block_size)
    heads = torch.arange(0, num_kv_heads * block_size, block_size, device=slots.device)
    return (first_heads.unsqueeze(1) + heads).view(-1)
