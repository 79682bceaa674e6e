"""Kernels that prepare heads for attention: norm (Qwen3), rotation, append to the cache, copy out of it.

And the rotation of a vision tower.

Twins: `append_heads` of tests/gpu/reference_ops.py, `raypp.ops.vision.rotate_qk_`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.attention import Heads, Rotation, rotary_angles
from raypp.ops.cuda.between_products import narrowed
from raypp.ops.cuda.kernel_launch import Device, start
from raypp.ops.kv_cache import FP8, LayerCache

_HEADS_PER_PROGRAM = 4
_VISION_HEADS_PER_PROGRAM = 8


def rotation_table(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, device: Device, scale: float = 1.0
) -> Rotation:
    """Return the cosine and sine of each token's angles, times `scale`, both float32 [T, D / 2].

    Shapes: positions [T] int64 and inverse_frequencies [D / 2] float32, or along axes [T, A] and [A, D / 2]. Once per
    step, for all layers.
    """
    if positions.ndim == 2:  # a part of a prompt with images: rare enough for plain torch
        angles = rotary_angles(positions, inverse_frequencies)
        return Rotation(angles.cos() * scale, angles.sin() * scale)
    num_tokens, half = positions.shape[0], inverse_frequencies.shape[0]
    table = torch.empty(2, num_tokens, half, dtype=torch.float32, device=positions.device)
    rope = Rotation(table[0], table[1])
    if num_tokens:
        _rotation_table[(num_tokens,)](
            positions,
            inverse_frequencies,
            rope.cos,
            rope.sin,
            scale,
            half,
            BLOCK=triton.next_power_of_2(half),
            OVERLAPS=device.has_dependent_launch,
            num_warps=1,
            **device.launch_options,
        )
    return rope


def append_heads(
    qkv: torch.Tensor,
    heads: Heads,
    rope: Rotation,
    slot_mapping: torch.Tensor,
    cache: LayerCache,
    device: Device,
) -> torch.Tensor:
    """Return the queries, [T, Hq, Dk], and write keys and values to their slots.

    Shapes: qkv [T, `heads.width`] contiguous: queries, keys, values that are not keys, with gates one of Dk elements
    behind each head of queries; rope: see `rotation_table`, of the elements that are rotated; slot_mapping [T] int64;
    the cache of qkv's type or FP8. Tokens of the same slot (in the null block): any may win.
    """
    num_tokens, head_dim, value_dim = qkv.shape[0], heads.head_dim, heads.value_dim
    q = torch.empty(num_tokens, heads.num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return q
    norm = heads.norm
    num_all = heads.num_heads + 2 * heads.num_kv_heads
    _append_heads[(num_tokens, triton.cdiv(num_all, _HEADS_PER_PROGRAM))](
        qkv,
        qkv if norm is None else norm.q_weight,
        qkv if norm is None else norm.k_weight,
        0.0 if norm is None else norm.eps,
        rope.cos,
        rope.sin,
        slot_mapping,
        q,
        *cache,
        1.0 / heads.k_scale,
        1.0 / heads.v_scale,
        NUM_HEADS=heads.num_heads,
        NUM_KV_HEADS=heads.num_kv_heads,
        HALF=head_dim // 2,
        ROTARY_HALF=(heads.rotary_dim or head_dim) // 2,
        VALUE_HALF=value_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(max(head_dim, value_dim) // 2),
        BLOCK_SIZE=cache.keys.shape[2],
        HEADS=_HEADS_PER_PROGRAM,
        HAS_NORM=norm is not None,
        HAS_VALUE_NORM=norm is not None and norm.has_values,
        HAS_GATE=heads.has_gate,
        ARE_KEYS=heads.values_are_keys,
        IS_FP8=cache.keys.dtype == FP8,
        OVERLAPS=device.has_dependent_launch,
        num_warps=1,
        **device.launch_options,
    )
    return q


def gate_heads_(out: torch.Tensor, qkv: torch.Tensor, device: Device) -> None:
    """Multiply attention's output by the sigmoid of its gates, in place.

    Shapes: out [T, Hq, Dk]; qkv [T, ..] contiguous, begins with a head's queries and its gate, head by head.
    """
    num_tokens, num_heads, head_dim = out.shape
    if num_tokens:
        _gate_heads[(num_tokens, triton.cdiv(num_heads, _HEADS_PER_PROGRAM))](
            out,
            qkv,
            qkv.shape[1],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            HEADS=_HEADS_PER_PROGRAM,
            OVERLAPS=device.has_dependent_launch,
            **device.launch_options,
        )


def gather_heads(
    cache: LayerCache,
    tables: torch.Tensor,
    starts: torch.Tensor,
    most_blocks: int,
    heads: Heads,
    keys: torch.Tensor,
    values: torch.Tensor,
    device: Device,
) -> None:
    """Copy rows' keys and values out of their blocks; those in 8 bits come out times the layer's scales.

    Shapes: tables [rows or more, blocks or more] int32; starts [rows + 1] int32, where each row's tokens begin; keys
    [tokens, Hk, Dk] and values [tokens, Hk, Dv], of the queries' type. No row has more than `most_blocks`.
    """
    _, num_kv_heads, block_size, head_dim = cache.keys.shape
    value_dim, is_fp8 = cache.values.shape[3], cache.keys.dtype == FP8
    _gather_heads[(most_blocks, len(starts) - 1, num_kv_heads)](
        *cache,
        tables,
        tables.stride(0),
        starts,
        heads.k_scale if is_fp8 else 1.0,
        heads.v_scale if is_fp8 else 1.0,
        keys,
        values,
        HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=triton.next_power_of_2(max(head_dim, value_dim)),
        IS_SCALED=is_fp8,
        OVERLAPS=device.has_dependent_launch,
        **device.launch_options,
    )


def rotate_qk_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, device: Device) -> torch.Tensor:
    """Rotate queries and keys in place, in float32, and return `qkv`.

    Shapes: qkv [P, 3, heads, D] contiguous: queries, keys, values; cos and sin [P, D / 2] float32.
    """
    num_patches, _, num_heads, head_dim = qkv.shape
    if num_patches:
        _rotate_qk[(num_patches, triton.cdiv(2 * num_heads, _VISION_HEADS_PER_PROGRAM))](
            qkv,
            cos,
            sin,
            NUM_HEADS=num_heads,
            HALF=head_dim // 2,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            HEADS=_VISION_HEADS_PER_PROGRAM,
            OVERLAPS=device.has_dependent_launch,
            num_warps=2,
            **device.launch_options,
        )
    return qkv


@triton.jit
def _rotation_table(positions, inverse_frequencies, cos, sin, scale, half, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    pair = tl.arange(0, BLOCK)
    inside = pair < half
    token = tl.program_id(0)
    frequency = tl.load(inverse_frequencies + pair, mask=inside, other=0.0)
    start(OVERLAPS)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    tl.store(cos + token * half + pair, tl.cos(angle) * scale, mask=inside)
    tl.store(sin + token * half + pair, tl.sin(angle) * scale, mask=inside)


@triton.jit
def _gate_heads(
    out,
    qkv,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < NUM_HEADS) & (column < HEAD_DIM)
    cell = out + (token * NUM_HEADS + head) * HEAD_DIM + column
    start(OVERLAPS)
    gate = tl.load(qkv + token * qkv_stride + (2 * head + 1) * HEAD_DIM + column, mask=inside, other=0.0)
    value = tl.load(cell, mask=inside, other=0.0).to(tl.float32) * tl.sigmoid(gate.to(tl.float32))
    tl.store(cell, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _partner(column, ROTARY_HALF: tl.constexpr):
    """Return the element that one is turned with; itself behind those that are rotated."""
    behind = tl.where(column < 2 * ROTARY_HALF, column - ROTARY_HALF, column)
    return tl.where(column < ROTARY_HALF, column + ROTARY_HALF, behind)


@triton.jit
def _turned(value, other, column, cos, sin, ROTARY_HALF: tl.constexpr):
    """Return elements of heads rotated; those behind the rotated ones as they are. Shapes: value [heads, columns]."""
    is_turned = column < 2 * ROTARY_HALF
    pair = tl.where(is_turned, column, 0) % ROTARY_HALF
    c = tl.load(cos + pair, mask=is_turned, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=is_turned, other=0.0)
    return value * c + other * tl.where(column < ROTARY_HALF, -s, s)[None, :]


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])  # an element per program
def _append_heads(
    qkv,
    q_weight,
    k_weight,
    eps,
    cos,
    sin,
    slot_mapping,
    q,
    key_cache,
    value_cache,
    k_inverse,
    v_inverse,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    VALUE_HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_VALUE_NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ARE_KEYS: tl.constexpr,
    IS_FP8: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    D: tl.constexpr = 2 * HALF
    ALL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    first_value = (NUM_HEADS * (1 + HAS_GATE) + NUM_KV_HEADS) * D
    place = head * D
    width = first_value + NUM_KV_HEADS * 2 * VALUE_HALF
    if ARE_KEYS:
        place -= tl.where(is_value, NUM_KV_HEADS * D, 0)
        width = first_value
    if HAS_GATE:
        place += tl.minimum(head, NUM_HEADS) * D
    if VALUE_HALF == HALF:
        half = HALF
        begin = place[:, None]
    else:
        half = tl.where(is_value, VALUE_HALF, HALF)[:, None]
        value_begin = first_value + (head - NUM_HEADS - NUM_KV_HEADS) * 2 * VALUE_HALF
        begin = tl.where(is_value, value_begin, place)[:, None]
    inside = (head < ALL)[:, None] & (pair[None, :] < half)
    if HAS_NORM:
        valid = pair < HALF
        q_first = tl.load(q_weight + pair, mask=valid, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight + HALF + pair, mask=valid, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight + pair, mask=valid, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight + HALF + pair, mask=valid, other=0.0).to(tl.float32)
    start(OVERLAPS)
    cell = qkv + token * width + begin + pair[None, :]
    first_in = tl.load(cell, mask=inside, other=0.0)
    second_in = tl.load(cell + half, mask=inside, other=0.0)
    slot = tl.load(slot_mapping + token)
    first, second = first_in.to(tl.float32), second_in.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        first *= scale * tl.where(is_query[:, None], q_first[None, :], k_first[None, :])
        second *= scale * tl.where(is_query[:, None], q_second[None, :], k_second[None, :])
        if HAS_VALUE_NORM:
            first_in, second_in = first_in.to(tl.float32) * scale, second_in.to(tl.float32) * scale
    dtype = q.dtype.element_ty
    if ROTARY_HALF == HALF:
        c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
        s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
        turned_first, turned_second = first * c - second * s, second * c + first * s
    else:  # pairs lie elsewhere, so each element's other one is read once more
        with_first, with_second = _partner(pair, ROTARY_HALF), _partner(HALF + pair, ROTARY_HALF)
        row = qkv + token * width + begin
        is_head = inside & (pair < HALF)[None, :]
        first_other = tl.load(row + with_first[None, :], mask=is_head, other=0.0).to(tl.float32)
        second_other = tl.load(row + with_second[None, :], mask=is_head, other=0.0).to(tl.float32)
        if HAS_NORM:
            q_other = tl.load(q_weight + with_first, mask=valid, other=0.0).to(tl.float32)
            k_other = tl.load(k_weight + with_first, mask=valid, other=0.0).to(tl.float32)
            first_other *= scale * tl.where(is_query[:, None], q_other[None, :], k_other[None, :])
            q_other = tl.load(q_weight + with_second, mask=valid, other=0.0).to(tl.float32)
            k_other = tl.load(k_weight + with_second, mask=valid, other=0.0).to(tl.float32)
            second_other *= scale * tl.where(is_query[:, None], q_other[None, :], k_other[None, :])
        cos_row, sin_row = cos + token * ROTARY_HALF, sin + token * ROTARY_HALF
        turned_first = _turned(first, first_other, pair, cos_row, sin_row, ROTARY_HALF)
        turned_second = _turned(second, second_other, HALF + pair, cos_row, sin_row, ROTARY_HALF)
    q_cell = q + token * (NUM_HEADS * D) + head[:, None] * D + pair[None, :]
    tl.store(q_cell, turned_first.to(dtype), mask=inside & is_query[:, None])
    tl.store(q_cell + HALF, turned_second.to(dtype), mask=inside & is_query[:, None])
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    kv_head = tl.where(is_value, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
    kv_cell = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset)[:, None] * (2 * half) + pair[None, :]
    kv_cell = tl.where(is_value, value_cache, key_cache)[:, None] + kv_cell
    is_kept = inside & (head >= NUM_HEADS)[:, None]
    kept_first = tl.where(is_value[:, None], first_in.to(tl.float32), turned_first)
    kept_second = tl.where(is_value[:, None], second_in.to(tl.float32), turned_second)
    if IS_FP8:
        inverse = tl.where(is_value, v_inverse, k_inverse)[:, None]
        kept_first = narrowed(kept_first * inverse, tl.float8e4nv)
        kept_second = narrowed(kept_second * inverse, tl.float8e4nv)
    else:
        kept_first, kept_second = kept_first.to(dtype), kept_second.to(dtype)
    tl.store(kv_cell, kept_first, mask=is_kept)
    tl.store(kv_cell + half, kept_second, mask=is_kept)


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


@triton.jit(do_not_specialize_on_alignment=["starts", "tables"])  # a few elements per program
def _gather_heads(
    key_cache,
    value_cache,
    tables,
    table_stride,
    starts,
    k_scale,
    v_scale,
    keys,
    values,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_SCALED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start(OVERLAPS)
    row, first, head = tl.program_id(1), tl.program_id(0) * BLOCK_SIZE, tl.program_id(2)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    if begin + first < end:
        block = tl.load(tables + row * table_stride + tl.program_id(0)).to(tl.int64)
        token, column = tl.arange(0, BLOCK_SIZE)[:, None], tl.arange(0, BLOCK_D)[None, :]
        cell = (block * HEADS + head) * BLOCK_SIZE + token
        place = (begin + first + token).to(tl.int64) * HEADS + head
        inside = (begin + first + token < end) & (column < HEAD_DIM)
        key = tl.load(key_cache + cell * HEAD_DIM + column, mask=inside, other=0.0)
        inside_value = (begin + first + token < end) & (column < VALUE_DIM)
        value = tl.load(value_cache + cell * VALUE_DIM + column, mask=inside_value, other=0.0)
        if IS_SCALED:
            key, value = key.to(tl.float32) * k_scale, value.to(tl.float32) * v_scale
        tl.store(keys + place * HEAD_DIM + column, key.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + place * VALUE_DIM + column, value.to(values.dtype.element_ty), mask=inside_value)
