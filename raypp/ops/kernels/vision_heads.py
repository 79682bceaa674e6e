"""Queries and keys of a vision tower rotated where they are, in one launch.

Twin: `raypp.ops.vision_rotary.rotate_qk_`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.kernels.launch import Device, start

_HEADS_PER_PROGRAM = 8


def rotate_qk_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, device: Device) -> torch.Tensor:
    """Rotate queries and keys in place, in float32, and return `qkv`.

    Shapes: qkv [P, 3, heads, D] contiguous: queries, keys, values; cos and sin [P, D / 2] float32.
    """
    num_patches, _, num_heads, head_dim = qkv.shape
    if num_patches:
        _rotate_qk[(num_patches, triton.cdiv(2 * num_heads, _HEADS_PER_PROGRAM))](
            qkv,
            cos,
            sin,
            NUM_HEADS=num_heads,
            HALF=head_dim // 2,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            HEADS=_HEADS_PER_PROGRAM,
            OVERLAPS=device.has_dependent_launch,
            num_warps=2,
            **device.launch_options,
        )
    return qkv


@triton.jit
def _rotate_qk(
    qkv,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    patch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    inside = (head < 2 * NUM_HEADS)[:, None] & (pair < HALF)[None, :]
    cell = qkv + patch * (6 * NUM_HEADS * HALF) + head[:, None] * (2 * HALF) + pair[None, :]
    start(OVERLAPS)
    c = tl.load(cos + patch * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + patch * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    first = tl.load(cell, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(cell + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = qkv.dtype.element_ty
    tl.store(cell, (first * c - second * s).to(dtype), mask=inside)
    tl.store(cell + HALF, (second * c + first * s).to(dtype), mask=inside)
