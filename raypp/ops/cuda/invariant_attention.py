"""Attention whose bits depend on a token's position alone: not on other rows, nor on how a prompt is cut into chunks.

The context of a query is cut at fixed positions. Each part is summed from zero by a running softmax, and the parts are
added in their order: by one program, or, where rows are few, by the last of several to finish. So a token has the same
bits whether it is decoded, drafted, or part of a prompt that is computed again. A program takes the query heads of a KV
head for up to `_QUERIES` queries, of decode rows and of prompts alike: products and sums have one shape.

Parts are longer further back (`_PART_STARTS`), so that short contexts are spread over many programs, and long ones have
few results to be added. What a query does not see adds exactly zero.

Twin: `decode_attention` of tests/gpu/reference_ops.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from raypp.errors import ConfigError
from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.cuda.between_products import as_stored
from raypp.ops.cuda.decode_attention import attend
from raypp.ops.cuda.kernel_launch import Device, Workspace, arrives_last, start
from raypp.ops.kv_cache import FP8, LayerCache

_QUERIES = 64  # of a program: what Hopper's tensor cores take at least
_TILE = 64  # keys that are multiplied at once
_MOST_COLUMNS = 256  # of a head
_MAX_SPLITS = 32
_SPLIT_FLOATS = 16 << 20  # of parts' results
_LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))

# Part p begins at (p - first part of its level) * length + first position of its level.
_FIRST_PARTS: tl.constexpr = tl.constexpr((0, 16, 28, 40))
_FIRST_POSITIONS: tl.constexpr = tl.constexpr((0, 4096, 16384, 65536))
_LENGTHS: tl.constexpr = tl.constexpr((256, 1024, 4096, 16384))


def part_start(part: int) -> int:
    """Return the position with which a part begins."""
    levels = zip(_FIRST_PARTS.value, _FIRST_POSITIONS.value, _LENGTHS.value, strict=True)
    first, position, length = max(level for level in levels if level[0] <= part)
    return int(position + (part - first) * length)


def part_of(position: int) -> int:
    """Return the part of a position."""
    levels = zip(_FIRST_POSITIONS.value, _FIRST_PARTS.value, _LENGTHS.value, strict=True)
    position_of_level, first, length = max(level for level in levels if level[0] <= position)
    return int(first + (position - position_of_level) // length)


class _Tiles(NamedTuple):
    """What programs compute of a step's prefill rows."""

    tiles: torch.Tensor  # [tiles, 4] int32: row, first token, tokens, first position
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


class InvariantAttention:
    """Attention of decode rows, in place of `TritonDecode`, and of prompts, a `raypp.ops.cuda.step_attention.Prefill`.

    Args:
        heads: Of all layers of the kind.
        device: Where it runs.
        workspace: For results of parts.

    Raises:
        ConfigError: there is no kernel for heads of this size.
    """

    def __init__(self, heads: Heads, device: Device, workspace: Workspace) -> None:
        group, largest = heads.num_heads // heads.num_kv_heads, max(heads.head_dim, heads.value_dim)
        if largest > _MOST_COLUMNS or group > _QUERIES:
            raise ConfigError(
                "batch_invariant has no attention for these heads",
                got=f"heads of {largest}, {group} query heads per KV head",
                expected=f"heads of at most {_MOST_COLUMNS}, at most {_QUERIES} query heads per KV head",
                hint="batch_invariant=false",
            )
        self._heads = heads
        self._group = group
        self._tile_tokens = _QUERIES // group
        self._device = device
        self._workspace = workspace
        self._block_d, self._block_dv = (max(32, triton.next_power_of_2(n)) for n in (heads.head_dim, heads.value_dim))
        workspace.reserve(_SPLIT_FLOATS)

    def __call__(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_len: int,
        heads: Heads,
        out: torch.Tensor,
    ) -> None:
        """Write the output of decode rows to `out`; see `raypp.ops.cuda.decode_attention.TritonDecode`."""
        num_tiles = len(block_tables) * triton.cdiv(query_len, self._tile_tokens)
        num_parts = part_of(block_tables.shape[1] * cache.keys.shape[2] - 1) + 1
        num_pairs = num_tiles * heads.num_kv_heads
        num_splits = min(_MAX_SPLITS, num_parts, 3 * self._device.num_processors // max(1, num_pairs))
        if num_pairs * num_parts * self._part_floats(min(query_len, self._tile_tokens)) > _SPLIT_FLOATS:
            num_splits = 1
        num_splits = 1 << max(1, num_splits).bit_length() - 1  # of which there are few: each is another kernel
        self._launch(q, cache, seq_lens, block_tables, None, num_tiles, query_len, num_splits, heads, out)

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        tiles, first = list[tuple[int, int, int, int]](), 0
        for row, (query_len, seq_len) in enumerate(
            zip(batch.prefill_query_lens, batch.prefill_seq_lens, strict=True), batch.num_decode_rows
        ):
            for begin in range(0, query_len, self._tile_tokens):
                count = min(self._tile_tokens, query_len - begin)
                tiles.append((row, first + begin, count, seq_len - query_len + begin))
            first += query_len
        tiles.sort(key=lambda tile: -tile[3])  # those that take longest first
        is_cuda = self._device.torch_device.type == "cuda"
        planned = torch.tensor(tiles, dtype=torch.int32, pin_memory=is_cuda)
        on_device = planned.to(self._device.torch_device, non_blocking=True)
        return _Tiles(on_device, batch.seq_lens, batch.block_tables[self._heads.group])

    def run(self, plan: object, q: torch.Tensor, cache: LayerCache, heads: Heads, out: torch.Tensor) -> None:
        assert isinstance(plan, _Tiles)
        self._launch(q, cache, plan.seq_lens, plan.block_tables, plan.tiles, len(plan.tiles), 1, 1, heads, out)

    def _part_floats(self, num_tokens: int) -> int:
        """Return the size of a part's result, of so many tokens of a row and a KV head."""
        return int(num_tokens * self._group * (self._block_dv + 2))

    def _launch(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        tiles: torch.Tensor | None,
        num_tiles: int,
        query_len: int,
        num_splits: int,
        heads: Heads,
        out: torch.Tensor,
    ) -> None:
        if not num_tiles:
            return
        k_scale, v_scale = (heads.k_scale, heads.v_scale) if cache.keys.dtype == FP8 else (1.0, 1.0)
        soft_cap, block_size = heads.soft_cap or 0.0, cache.keys.shape[2]
        assert num_splits == 1 or num_tiles * heads.num_kv_heads <= self._workspace.counters.numel()
        _attend_by_parts[(num_splits, heads.num_kv_heads, num_tiles)](
            q,
            *cache,
            seq_lens,
            block_tables,
            block_tables.stride(0),
            block_tables.shape[1],
            q if tiles is None else tiles,
            out,
            self._workspace.floats,
            self._workspace.counters,
            heads.scale * k_scale * math.log2(math.e),
            soft_cap * math.log2(math.e),
            q if heads.sinks is None else heads.sinks,
            heads.window or 0,
            v_scale,
            part_of(block_tables.shape[1] * block_size - 1) + 1,
            QUERY_LEN=query_len,
            GROUP=self._group,
            NUM_KV_HEADS=heads.num_kv_heads,
            D=heads.head_dim,
            BLOCK_D=self._block_d,
            DV=heads.value_dim,
            BLOCK_DV=self._block_dv,
            BLOCK_SIZE=block_size,
            TOKENS=self._tile_tokens,
            FILLED=min(query_len, self._tile_tokens) * self._group,
            QUERIES=_QUERIES,
            TILE=_TILE,
            SPLITS=num_splits,
            HAS_TILES=tiles is not None,
            HAS_WINDOW=heads.window is not None,
            HAS_CAP=heads.soft_cap is not None,
            HAS_SINKS=heads.sinks is not None,
            CLAMPS=out.dtype != q.dtype,
            OVERLAPS=self._device.has_dependent_launch,
            num_warps=4 if self._block_dv <= 128 else 8,
            num_stages=2 if self._block_d <= 128 else 1,
            **self._device.launch_options,
        )


@triton.jit
def _part_start(part):
    """Return the position with which a part begins."""
    begin = (part - _FIRST_PARTS[0]) * _LENGTHS[0] + _FIRST_POSITIONS[0]
    for level in tl.static_range(1, 4):
        of_level = (part - _FIRST_PARTS[level]) * _LENGTHS[level] + _FIRST_POSITIONS[level]
        begin = tl.where(part >= _FIRST_PARTS[level], of_level, begin)
    return begin


@triton.jit
def _part_of(position):
    """Return the part of a position."""
    part = (position - _FIRST_POSITIONS[0]) // _LENGTHS[0] + _FIRST_PARTS[0]
    for level in tl.static_range(1, 4):
        of_level = (position - _FIRST_POSITIONS[level]) // _LENGTHS[level] + _FIRST_PARTS[level]
        part = tl.where(position >= _FIRST_POSITIONS[level], of_level, part)
    return part


@triton.jit
def _with_part(highest, total, weighted, part_highest, part_total, part_weighted):
    """Return a softmax's highest score, sum and weighted values with those of one more part."""
    most = tl.maximum(highest, part_highest)
    shrink, grow = tl.exp2(highest - most), tl.exp2(part_highest - most)
    weighted = weighted * shrink[:, None] + part_weighted * grow[:, None]
    return most, total * shrink + part_total * grow, weighted


# The width follows the longest row of a step.
@triton.jit(
    do_not_specialize=["table_stride", "table_width", "window", "max_parts"],
    do_not_specialize_on_alignment=["seq_lens", "block_tables", "tiles"],
)
def _attend_by_parts(
    q,
    key_cache,
    value_cache,
    seq_lens,
    block_tables,
    table_stride,
    table_width,
    tiles,
    out,
    partial,
    counters,
    scale_log2,
    cap_log2,
    sinks,
    window,
    v_scale,
    max_parts,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    FILLED: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CLAMPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    NUM_HEADS: tl.constexpr = GROUP * NUM_KV_HEADS
    ROW_TILES: tl.constexpr = (QUERY_LEN + TOKENS - 1) // TOKENS
    PART: tl.constexpr = FILLED * (BLOCK_DV + 2)  # floats of a part's result
    split, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = tl.arange(0, QUERIES)  # (query token, head of the group), the group innermost
    column, value_column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    token_in_tile = tl.arange(0, TILE)
    start(OVERLAPS)
    if HAS_TILES:
        row = tl.load(tiles + 4 * tile).to(tl.int64)
        first_token = tl.load(tiles + 4 * tile + 1).to(tl.int64)
        num_tokens = tl.load(tiles + 4 * tile + 2)
        position = tl.load(tiles + 4 * tile + 3)
    else:
        row = (tile // ROW_TILES).to(tl.int64)
        of_row = tile % ROW_TILES * TOKENS
        first_token = row * QUERY_LEN + of_row
        num_tokens = tl.minimum(TOKENS, QUERY_LEN - of_row)
        length = tl.maximum(QUERY_LEN, tl.minimum(tl.load(seq_lens + row), table_width * BLOCK_SIZE))
        position = length - QUERY_LEN + of_row
    query_token, query_head = query // GROUP, kv_head * GROUP + query % GROUP
    is_query = query < num_tokens * GROUP
    out_row = (first_token + query_token) * NUM_HEADS + query_head
    queries = tl.load(
        q + out_row[:, None] * D + column[None, :], mask=is_query[:, None] & (column < D)[None, :], other=0.0
    )
    table = block_tables + row * table_stride
    context = position + num_tokens
    visible = position + 1 + query_token  # a query token sees the context and itself
    first_part = 0
    if HAS_WINDOW:
        first_part = _part_of(tl.maximum(0, position + 1 - window))
    num_parts = _part_of(context - 1) + 1 - first_part
    if split < num_parts:
        highest = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        weighted = tl.zeros((QUERIES, BLOCK_DV), tl.float32)
        pair = tile * NUM_KV_HEADS + kv_head
        parts = partial + pair.to(tl.int64) * max_parts * PART
        cell = query[:, None] * BLOCK_DV + value_column[None, :]
        for number in range(split, num_parts, SPLITS):
            begin = _part_start(first_part + number)
            end = tl.minimum(_part_start(first_part + number + 1), context)
            part_highest = tl.full((QUERIES,), -1e30, tl.float32)
            part_total = tl.zeros((QUERIES,), tl.float32)
            part_weighted = tl.zeros((QUERIES, BLOCK_DV), tl.float32)
            for first in range(begin, end, TILE):
                token = first + token_in_tile
                # Past the context there may be anything, NaN included: its scores are replaced, its values not read.
                in_context = (token < context)[:, None]
                block = tl.load(table + tl.minimum(token // BLOCK_SIZE, table_width - 1)).to(tl.int64)
                token_row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
                keys = tl.load(
                    key_cache + token_row[:, None] * D + column[None, :],
                    mask=in_context & (column < D)[None, :],
                    other=0.0,
                )
                values = tl.load(
                    value_cache + token_row[:, None] * DV + value_column[None, :],
                    mask=in_context & (value_column < DV)[None, :],
                    other=0.0,
                )
                is_visible = token[None, :] < tl.minimum(visible, context)[:, None]
                if HAS_WINDOW:
                    # Blocks that lie wholly before what the row's first query sees may be others' by now.
                    is_visible &= token[None, :] >= (visible - window)[:, None]
                    values = tl.where((token >= position + 1 - window)[:, None], values, 0.0)
                part_highest, part_total, part_weighted = attend(
                    queries,
                    keys.to(queries.dtype),
                    values.to(queries.dtype),
                    is_visible,
                    scale_log2,
                    cap_log2,
                    part_highest,
                    part_total,
                    part_weighted,
                    HAS_CAP,
                )
            if SPLITS == 1:
                highest, total, weighted = _with_part(highest, total, weighted, part_highest, part_total, part_weighted)
            else:
                part = parts + number * PART
                tl.store(part + cell, part_weighted, mask=is_query[:, None])
                tl.store(part + FILLED * BLOCK_DV + query, part_highest, mask=is_query)
                tl.store(part + FILLED * (BLOCK_DV + 1) + query, part_total, mask=is_query)
        is_last = True
        if SPLITS > 1:
            is_last = arrives_last(counters + pair, tl.minimum(SPLITS, num_parts))
            if is_last:
                for number in range(num_parts):
                    part = parts + number * PART
                    part_weighted = tl.load(part + cell, mask=is_query[:, None], other=0.0, cache_modifier=".cg")
                    of_query = part + FILLED * BLOCK_DV + query
                    part_highest = tl.load(of_query, mask=is_query, other=-1e30, cache_modifier=".cg")
                    part_total = tl.load(of_query + FILLED, mask=is_query, other=0.0, cache_modifier=".cg")
                    highest, total, weighted = _with_part(
                        highest, total, weighted, part_highest, part_total, part_weighted
                    )
        if is_last:
            if HAS_SINKS:
                sink = tl.load(sinks + query_head, mask=is_query, other=-1e30) * _LOG2_E
                highest, total, weighted = _with_part(
                    highest, total, weighted, sink, tl.full((QUERIES,), 1.0, tl.float32), tl.zeros_like(weighted)
                )
            result = weighted * v_scale / tl.where(is_query, total, 1.0)[:, None]
            mask = is_query[:, None] & (value_column < DV)[None, :]
            out_cell = out_row[:, None] * DV + value_column[None, :]
            tl.store(out + out_cell, as_stored(result, out, CLAMPS), mask=mask)
