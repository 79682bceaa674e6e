"""Kernels of attention over latents: norm, rotation and append; decode rows over the cache, split along the context.

    append      program (token, part)   the first part normalizes and keeps the latent, and rotates and keeps the key;
                                        the others rotate some heads of queries where they are
    decode      program (split, heads, row)     the heads' queries, of all query tokens of the row, against the split's
                                        share of the context: each tile of latents is loaded once, and multiplied twice
    combine     program (head, token)   what the splits found, in their order: the same bits every time

A query is its product with what expands latents to its head's keys, and its rotated part; see
`raypp.ops.attention.LatentHeads`. Lengths and block tables are read on the device, so a captured launch serves rows of
any length. Sources: those of `raypp.ops.cuda.decode_attention`; FlashMLA (DeepSeek, 2025) for many heads by program.

Twin: `raypp.ops.cpu.torch_kernels.TorchLatentAttention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from raypp.errors import ConfigError
from raypp.ops.attention import LatentHeads, Rotation
from raypp.ops.cuda.between_products import narrowed
from raypp.ops.cuda.kernel_launch import Device, Workspace, start
from raypp.ops.kv_cache import FP8, LayerCache

_MOST_QUERIES = 64  # of a program: their weighted latents are its registers
_LEAST_QUERIES = 16  # the smallest tile of a matrix product
_QUERIES_OF_FEW_WARPS = 32
_MOST_SPLITS = 64
_LEAST_OF_A_SPLIT = 128  # tokens
_PRICE_OF_A_SPLIT = 1 / 4096  # of the time that one program takes for a whole row
_ROUNDS = 2  # of programs, at most, that leave parts
_HEADS_PER_PROGRAM = 8
_BYTES_OF_MOST_QUERIES = 128 << 10  # of shared memory: those, and 32 latents
_BYTES_OF_LARGE_TILES = 224 << 10  # of shared memory: two of 64 latents and as many queries, each of 576 in 16 bits
_PARTS_AT_ONCE = 4


@dataclass(frozen=True)
class LatentTuning:
    """How decode attention over latents is cut.

    Args:
        num_splits: Parts of the context.
        num_shares: Programs that have the heads of a row.
        tile_tokens: Latents that are multiplied at once.
        num_warps: Of a program.
        num_stages: Tiles under way from memory.
    """

    num_splits: int
    num_shares: int
    tile_tokens: int = 64
    num_warps: int = 8
    num_stages: int = 2


def tune_latents(
    num_rows: int, num_heads: int, query_len: int, device: Device, *, is_fp8: bool = False
) -> LatentTuning:
    """Return the cut for a number of rows: as many heads by program as fit, and as many splits as keep all busy.

    A processor has one program at a time. So many splits are best that their last round of programs is nearly full.
    Latents of 8 bits are widened in registers, which four warps have too few of.
    """
    num_processors = device.num_processors
    most_queries = _most_queries(device)
    num_shares = -(-num_heads * query_len // most_queries)
    while -(-num_heads // num_shares) * query_len > most_queries:
        num_shares += 1
    num_pairs = max(1, num_rows * num_shares)
    most = max(1, min(_MOST_SPLITS, _ROUNDS * num_processors // num_pairs))

    def time_of(num_splits: int) -> float:
        return math.ceil(num_pairs * num_splits / num_processors) / num_splits + num_splits * _PRICE_OF_A_SPLIT

    num_splits = min(range(1, most + 1), key=time_of)
    is_small = -(-num_heads // num_shares) * query_len <= _QUERIES_OF_FEW_WARPS
    tile_tokens = 64 if device.shared_bytes >= _BYTES_OF_LARGE_TILES else 32
    return LatentTuning(num_splits, num_shares, tile_tokens, num_warps=4 if is_small and not is_fp8 else 8)


def _most_queries(device: Device) -> int:
    return _MOST_QUERIES if device.shared_bytes >= _BYTES_OF_MOST_QUERIES else _MOST_QUERIES // 2


class TritonLatents:
    """Norm, rotation and append, and decode attention, of layers whose latents and heads have the same sizes.

    Args:
        latents: Of any of these layers.
        max_query_len: The most query tokens of a row, 1 + K.
        device: Where it runs.
        workspace: For the splits' results.

    Raises:
        ConfigError: more query tokens than a program has queries.
    """

    def __init__(self, latents: LatentHeads, max_query_len: int, device: Device, workspace: Workspace) -> None:
        if max_query_len > _most_queries(device):
            raise ConfigError(
                "attention over latents has no kernel for so many drafts",
                got=f"{max_query_len - 1} drafts",
                expected=f"at most {_most_queries(device) - 1}",
                hint="a smaller speculative.num_speculative_tokens or draft_ladder",
            )
        self._num_heads, self._rank, self._rotary_dim = latents.heads.num_heads, latents.rank, latents.rotary_dim
        self._device = device
        self._workspace = workspace
        workspace.reserve(_ROUNDS * device.num_processors * _MOST_QUERIES * (latents.rank + 1))

    def append(
        self,
        queries: torch.Tensor,
        projected: torch.Tensor,
        latents: LatentHeads,
        rope: Rotation,
        slot_mapping: torch.Tensor,
        cache: LayerCache,
    ) -> None:
        """Rotate the last R elements of each head's query in place, and write latents and rotated keys to the cache.

        Shapes: queries [T, Hq, N + R]; projected [T, L + R]; their last dimension is contiguous.
        """
        is_fp8, heads = cache.keys.dtype == FP8, latents.heads
        num_tokens, num_heads, head_dim = queries.shape
        if not num_tokens:
            return
        assert queries.stride(2) == projected.stride(1) == 1
        _append_latents[(num_tokens, 1 + -(-num_heads // _HEADS_PER_PROGRAM))](
            queries,
            queries.stride(0),
            queries.stride(1),
            projected,
            projected.stride(0),
            latents.norm_weight,
            latents.eps,
            rope.cos,
            rope.sin,
            slot_mapping,
            *cache,
            1.0 / heads.k_scale if is_fp8 else 1.0,
            1.0 / heads.v_scale if is_fp8 else 1.0,
            NUM_HEADS=num_heads,
            KEY_DIM=head_dim - self._rotary_dim,
            RANK=self._rank,
            BLOCK_RANK=triton.next_power_of_2(self._rank),
            HALF=self._rotary_dim // 2,
            BLOCK_HALF=triton.next_power_of_2(self._rotary_dim // 2),
            HEADS=_HEADS_PER_PROGRAM,
            ARE_NEIGHBOURS=latents.has_neighbours,
            IS_FP8=is_fp8,
            OVERLAPS=self._device.has_dependent_launch,
            **self._device.launch_options,
        )

    def attend(
        self,
        latent_queries: torch.Tensor,
        query_ends: torch.Tensor,
        cache: LayerCache,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_len: int,
        latents: LatentHeads,
        tuning: LatentTuning | None = None,
    ) -> torch.Tensor:
        """Return the weighted sums of latents, [Hq, R * query_len, L], of the queries' type.

        Shapes: latent_queries [Hq, R * query_len, L] contiguous; query_ends [R * query_len, Hq, rotary_dim], its last
        dimension contiguous; seq_lens [R] int32, this step's tokens included, which the cache has; block_tables [R, W]
        int32 contiguous. Lengths past the table's end are cut there.
        """
        num_heads, num_tokens, rank = latent_queries.shape
        out, num_rows, heads = torch.empty_like(latent_queries), len(block_tables), latents.heads
        if not num_rows:
            return out
        is_fp8 = cache.keys.dtype == FP8
        tuning = tuning or tune_latents(num_rows, num_heads, query_len, self._device, is_fp8=is_fp8)
        is_split, num_parts = tuning.num_splits > 1, tuning.num_splits * num_heads * num_tokens
        floats = self._workspace.floats
        assert not is_split or num_parts * (rank + 1) <= floats.numel(), "more splits than reserved"
        sums = floats[num_parts * rank :] if is_split else floats
        keys, values = (side.view(torch.uint8) if is_fp8 else side for side in cache)
        group = -(-num_heads // tuning.num_shares)
        v_scale = heads.v_scale if is_fp8 else 1.0
        _decode_latents[(tuning.num_splits, tuning.num_shares, num_rows)](
            latent_queries,
            query_ends,
            query_ends.stride(0),
            query_ends.stride(1),
            keys,
            values,
            seq_lens,
            block_tables,
            block_tables.shape[1],
            floats if is_split else out,
            sums,
            heads.scale * (heads.k_scale if is_fp8 else 1.0) * math.log2(math.e),
            v_scale,
            QUERY_LEN=query_len,
            GROUP=group,
            NUM_HEADS=num_heads,
            RANK=rank,
            BLOCK_RANK=max(_LEAST_QUERIES, triton.next_power_of_2(rank)),
            ROTARY=self._rotary_dim,
            BLOCK_ROTARY=max(_LEAST_QUERIES, triton.next_power_of_2(self._rotary_dim)),
            BLOCK_SIZE=keys.shape[2],
            QUERIES=max(_LEAST_QUERIES, triton.next_power_of_2(group * query_len)),
            TILE=tuning.tile_tokens,
            LEAST=max(_LEAST_OF_A_SPLIT, tuning.tile_tokens),
            IS_SPLIT=is_split,
            IS_FP8=is_fp8,
            OVERLAPS=self._device.has_dependent_launch,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            **self._device.launch_options,
        )
        if is_split:
            _combine_latents[(num_heads, num_tokens)](
                floats,
                sums,
                tuning.num_splits,
                out,
                RANK=rank,
                BLOCK_RANK=triton.next_power_of_2(rank),
                PARTS=_PARTS_AT_ONCE,
                OVERLAPS=self._device.has_dependent_launch,
                **self._device.launch_options,
            )
        return out


@triton.jit
def _rotated(cell, first, second, cos, sin, mask):
    """Return what pairs become whose elements are at `first` and `second` behind a cell."""
    a = tl.load(cell + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(cell + second, mask=mask, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])  # an element per program
def _append_latents(
    queries,
    token_stride,
    head_stride,
    projected,
    projected_stride,
    norm_weight,
    eps,
    cos,
    sin,
    slot_mapping,
    key_cache,
    value_cache,
    k_inverse,
    v_inverse,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    ARE_NEIGHBOURS: tl.constexpr,
    IS_FP8: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    inside = pair < HALF
    first, second = 2 * pair, 2 * pair + 1
    if not ARE_NEIGHBOURS:
        first, second = pair, pair + HALF
    column = tl.arange(0, BLOCK_RANK)
    in_rank = column < RANK
    gain = tl.load(norm_weight + column, mask=in_rank, other=0.0).to(tl.float32)
    start(OVERLAPS)
    c = tl.load(cos + token * HALF + pair, mask=inside, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=inside, other=0.0)
    if part == 0:
        slot = tl.load(slot_mapping + token)
        row = projected + token * projected_stride
        latent = tl.load(row + column, mask=in_rank, other=0.0).to(tl.float32)
        kept = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps) * gain
        a, b = _rotated(row + RANK, first, second, c, s, inside)
        own_key = key_cache + slot * (2 * HALF)
        dtype = key_cache.dtype.element_ty
        if IS_FP8:
            kept = narrowed(kept * v_inverse, tl.float8e4nv)
            a, b = narrowed(a * k_inverse, tl.float8e4nv), narrowed(b * k_inverse, tl.float8e4nv)
        else:
            kept, a, b = kept.to(dtype), a.to(dtype), b.to(dtype)
        tl.store(value_cache + slot * RANK + column, kept, mask=in_rank)
        tl.store(own_key + first, a, mask=inside)
        tl.store(own_key + second, b, mask=inside)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        mask = (head < NUM_HEADS)[:, None] & inside[None, :]
        cell = queries + token * token_stride + head[:, None] * head_stride + KEY_DIM
        x, y = _rotated(cell, first[None, :], second[None, :], c[None, :], s[None, :], mask)
        tl.store(cell + first[None, :], x.to(queries.dtype.element_ty), mask=mask)
        tl.store(cell + second[None, :], y.to(queries.dtype.element_ty), mask=mask)


@triton.jit
def _kept(cell, mask, dtype: tl.constexpr, IS_FP8: tl.constexpr):
    """Return what the cache has at some cells, in the queries' type; 0 where there may be anything."""
    found = tl.load(cell, mask=mask, other=0)
    if IS_FP8:
        found = found.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)
    return found


# The width follows the longest row of a step, and where lengths begin the number of its rows.
@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=["seq_lens", "sums"])
def _decode_latents(
    latent_queries,
    query_ends,
    token_stride,
    head_stride,
    key_cache,
    value_cache,
    seq_lens,
    block_tables,
    table_width,
    out,
    sums,
    scale_log2,
    v_scale,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_FP8: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    split, share, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tokens = tl.num_programs(2).to(tl.int64) * QUERY_LEN
    query = tl.arange(0, QUERIES)  # (query token, head of the share), the head innermost
    query_token, query_head = query // GROUP, share * GROUP + query % GROUP
    is_query = (query < QUERY_LEN * GROUP) & (query_head < NUM_HEADS)
    token_of_query = row.to(tl.int64) * QUERY_LEN + query_token
    place = query_head.to(tl.int64) * num_tokens + token_of_query  # of [heads, tokens]
    column, end_column = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROTARY)
    in_rank, in_end = column < RANK, end_column < ROTARY
    cell = place[:, None] * RANK + column[None, :]
    cell_mask = is_query[:, None] & in_rank[None, :]
    token_in_tile = tl.arange(0, TILE)
    table = block_tables + row.to(tl.int64) * table_width
    start(OVERLAPS)
    dtype: tl.constexpr = latent_queries.dtype.element_ty
    length = tl.minimum(tl.load(seq_lens + row), table_width * BLOCK_SIZE)
    split_len = tl.maximum(LEAST, tl.cdiv(tl.cdiv(length, tl.num_programs(0)), TILE) * TILE)
    begin = split * split_len
    part = split * (num_tokens * NUM_HEADS)
    if (split == 0) | (begin < length):
        queries = tl.load(latent_queries + cell, mask=cell_mask, other=0.0)
        end_cell = token_of_query * token_stride + query_head * head_stride
        end_mask = is_query[:, None] & in_end[None, :]
        ends = tl.load(query_ends + end_cell[:, None] + end_column[None, :], mask=end_mask, other=0.0)
        visible = length - QUERY_LEN + 1 + query_token  # a query token sees the context and itself
        highest = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        weighted = tl.zeros((QUERIES, BLOCK_RANK), tl.float32)
        for tile in range(begin, tl.minimum(begin + split_len, length), TILE):
            token = tile + token_in_tile
            # Past the length there may be anything, NaN included: it is not read.
            in_context = (token < length)[:, None]
            block = tl.load(table + tl.minimum(token // BLOCK_SIZE, table_width - 1)).to(tl.int64)
            slot = (block * BLOCK_SIZE + token % BLOCK_SIZE)[:, None]
            latents = _kept(value_cache + slot * RANK + column[None, :], in_context & in_rank[None, :], dtype, IS_FP8)
            key_cell = key_cache + slot * ROTARY + end_column[None, :]
            keys = _kept(key_cell, in_context & in_end[None, :], dtype, IS_FP8)
            scores = tl.dot(ends, tl.trans(keys), tl.dot(queries, tl.trans(latents))) * scale_log2
            scores = tl.where(token[None, :] < visible[:, None], scores, -1e30)
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_highest[:, None])
            shrink = tl.exp2(highest - new_highest)
            highest, total = new_highest, total * shrink + tl.sum(weights, 1)
            weighted = tl.dot(weights.to(dtype), latents, weighted * shrink[:, None])
        total = tl.where(total > 0.0, total, 1.0)  # rows without a token, which pad graphs, sum nothing
        result = weighted * (v_scale / total)[:, None]
        if IS_SPLIT:
            tl.store(out + part * RANK + cell, result, mask=cell_mask)
            tl.store(sums + part + place, highest + tl.log2(total), mask=is_query)
        else:
            tl.store(out + cell, result.to(dtype), mask=cell_mask)
    elif IS_SPLIT:
        tl.store(sums + part + place, tl.full((QUERIES,), -1e30, tl.float32), mask=is_query)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["sums"])
def _combine_latents(
    partial,
    sums,
    num_splits,
    out,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    num_places = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, BLOCK_RANK)
    in_rank = column < RANK
    start(OVERLAPS)
    most = tl.full((1,), -1e30, tl.float32)
    total = tl.zeros((1,), tl.float32)
    value = tl.zeros((BLOCK_RANK,), tl.float32)
    for begin in range(0, num_splits, PARTS):
        index = begin + tl.arange(0, PARTS)
        cell = index.to(tl.int64) * num_places + place
        log2_sum = tl.load(sums + cell, mask=index < num_splits, other=-1e30)
        has_tokens = (log2_sum > -1e29)[:, None] & in_rank[None, :]  # of others nothing was written
        part = tl.load(partial + cell[:, None] * RANK + column[None, :], mask=has_tokens, other=0.0)
        new_most = tl.maximum(most, tl.max(log2_sum, 0))
        shrink, weight = tl.exp2(most - new_most), tl.exp2(log2_sum - new_most)
        total = total * shrink + tl.sum(weight, 0)
        value = value * shrink + tl.sum(part * weight[:, None], 0)
        most = new_most
    tl.store(out + place * RANK + column, (value / total).to(out.dtype.element_ty), mask=in_rank)
