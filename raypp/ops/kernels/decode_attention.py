"""Attention of decode rows over the paged cache in one launch, split along the context (flash decoding).

    program (row, KV head, split)   the query heads that share the KV head, and all of the row's query tokens, against
                                    the split's share of the context, with a running softmax
    the last split to finish        combines the splits' results, in their order: the same bits every time

Lengths and block tables are read on the device, so a captured launch serves rows of any length. The number of splits
depends on the number of rows alone. Sources: FlashAttention-2 (arXiv:2307.08691) for the running softmax,
Flash-Decoding (Dao et al. 2023) for the splits. Twin: `raypp.ops.reference.decode_attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from raypp.ops.kernels.launch import Device, arrives_last, start
from raypp.ops.kernels.workspace import Workspace

_MAX_SPLITS = 64
_MIN_QUERIES = 16  # the smallest tile of a matrix product


@dataclass(frozen=True)
class DecodeTuning:
    """How the work is cut.

    Args:
        num_splits: Parts of the context.
        tile_tokens: Keys that are multiplied at once.
        num_warps: Of a program.
        num_stages: Tiles under way from memory.
    """

    num_splits: int
    tile_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3


def tune_decode(num_rows: int, num_kv_heads: int, device: Device) -> DecodeTuning:
    """Return the cut for a number of rows: two programs per processor, where rows and heads alone give fewer."""
    wanted = 2 * device.num_processors / max(1, num_rows * num_kv_heads)
    num_splits = min(_MAX_SPLITS, 2 ** max(0, math.ceil(math.log2(wanted)))) if wanted > 1 else 1
    return DecodeTuning(num_splits, tile_tokens=32 if num_splits >= 16 else 64)


class TritonDecode:
    """Decode attention of one kind of heads.

    Args:
        num_heads: Hq.
        num_kv_heads: Hk.
        head_dim: D.
        max_query_len: The most query tokens of a row, 1 + K.
        device: Where it runs.
        workspace: For the splits' results.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_query_len: int,
        device: Device,
        workspace: Workspace,
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._device = device
        self._workspace = workspace
        # As many (row, head, split) as `tune_decode` ever makes: it stops splitting at two programs per processor.
        num_parts = max(4 * device.num_processors, _MAX_SPLITS * num_kv_heads)
        workspace.reserve(num_parts * self._num_queries(max_query_len) * (triton.next_power_of_2(head_dim) + 2))

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_len: int,
        scale: float,
        out: torch.Tensor,
        tuning: DecodeTuning | None = None,
    ) -> None:
        """Write the attention's output to `out`.

        Shapes: q, out [R * query_len, Hq, D] contiguous; kv_cache [2, num_blocks, Hk, block_size, D], this step's
        tokens included; seq_lens [R] int32, this step's tokens included; block_tables [R, W] int32 contiguous. Lengths
        past the table's end are cut there.
        """
        num_rows = block_tables.shape[0]
        if not num_rows:
            return
        tuning = tuning or tune_decode(num_rows, self._num_kv_heads, self._device)
        counters = self._workspace.counters
        assert num_rows * self._num_kv_heads <= counters.numel()
        _decode_attention[(tuning.num_splits, self._num_kv_heads, num_rows)](
            q,
            kv_cache,
            kv_cache.stride(0),
            seq_lens,
            block_tables,
            block_tables.shape[1],
            out,
            self._workspace.floats,
            counters,
            scale * math.log2(math.e),
            QUERY_LEN=query_len,
            GROUP=self._group,
            NUM_KV_HEADS=self._num_kv_heads,
            D=self._head_dim,
            BLOCK_D=triton.next_power_of_2(self._head_dim),
            BLOCK_SIZE=kv_cache.shape[3],
            QUERIES=self._num_queries(query_len),
            TILE=tuning.tile_tokens,
            SPLITS=tuning.num_splits,
            OVERLAPS=self._device.has_dependent_launch,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            **self._device.launch_options,
        )

    def _num_queries(self, query_len: int) -> int:
        return max(_MIN_QUERIES, int(triton.next_power_of_2(query_len * self._group)))


@triton.jit
def _decode_attention(
    q,
    kv_cache,
    side_stride,
    seq_lens,
    block_tables,
    table_width,
    out,
    partial,
    counters,
    scale_log2,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = tl.arange(0, QUERIES)  # (query token, head of the group), the group innermost
    query_token = query // GROUP
    is_query = query < QUERY_LEN * GROUP
    column = tl.arange(0, BLOCK_D)
    in_head = column < D
    token_in_tile = tl.arange(0, TILE)
    cell = ((row * QUERY_LEN + query_token) * NUM_KV_HEADS + kv_head).to(tl.int64) * GROUP + query % GROUP
    cell = cell[:, None] * D + column[None, :]
    cell_mask = is_query[:, None] & in_head[None, :]
    table = block_tables + row.to(tl.int64) * table_width
    start(OVERLAPS)
    length = tl.maximum(1, tl.minimum(tl.load(seq_lens + row), table_width * BLOCK_SIZE))
    split_len = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    num_parts = tl.cdiv(length, split_len)
    if split < num_parts:
        queries = tl.load(q + cell, mask=cell_mask, other=0.0)
        visible = length - QUERY_LEN + 1 + query_token  # a query token sees the context and itself
        highest = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        weighted = tl.zeros((QUERIES, BLOCK_D), tl.float32)
        begin = split * split_len
        for tile in range(begin, tl.minimum(begin + split_len, length), TILE):
            token = tile + token_in_tile
            # Past the length whole blocks are still read: they are finite, and their weights become zero.
            block = tl.load(table + tl.minimum(token // BLOCK_SIZE, table_width - 1)).to(tl.int64)
            offset = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * D
            address = kv_cache + offset[:, None] + column[None, :]
            if BLOCK_D == D:
                keys = tl.load(address)
                values = tl.load(address + side_stride)
            else:
                keys = tl.load(address, mask=in_head[None, :], other=0.0)
                values = tl.load(address + side_stride, mask=in_head[None, :], other=0.0)
            scores = tl.dot(queries, tl.trans(keys)) * scale_log2
            scores = tl.where(token[None, :] < visible[:, None], scores, -1e30)
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_highest[:, None])
            shrink = tl.exp2(highest - new_highest)
            total = total * shrink + tl.sum(weights, 1)
            weighted = weighted * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
            highest = new_highest
        if num_parts == 1:
            tl.store(out + cell, (weighted / total[:, None]).to(out.dtype.element_ty), mask=cell_mask)
        else:
            pair = row * NUM_KV_HEADS + kv_head
            parts = partial + (pair * SPLITS).to(tl.int64) * QUERIES * (BLOCK_D + 2)
            part_cell = query[:, None] * BLOCK_D + column[None, :]
            part = parts + split * QUERIES * (BLOCK_D + 2)
            tl.store(part + part_cell, weighted)
            tl.store(part + QUERIES * BLOCK_D + query, highest)
            tl.store(part + QUERIES * (BLOCK_D + 1) + query, total)
            if arrives_last(counters + pair, num_parts):
                highest = tl.full((QUERIES,), -1e30, tl.float32)
                total = tl.zeros((QUERIES,), tl.float32)
                weighted = tl.zeros((QUERIES, BLOCK_D), tl.float32)
                for index in range(num_parts):
                    part = parts + index * QUERIES * (BLOCK_D + 2)
                    part_weighted = tl.load(part + part_cell, cache_modifier=".cg")
                    part_highest = tl.load(part + QUERIES * BLOCK_D + query, cache_modifier=".cg")
                    part_total = tl.load(part + QUERIES * (BLOCK_D + 1) + query, cache_modifier=".cg")
                    new_highest = tl.maximum(highest, part_highest)
                    shrink, grow = tl.exp2(highest - new_highest), tl.exp2(part_highest - new_highest)
                    weighted = weighted * shrink[:, None] + part_weighted * grow[:, None]
                    total = total * shrink + part_total * grow
                    highest = new_highest
                tl.store(out + cell, (weighted / total[:, None]).to(out.dtype.element_ty), mask=cell_mask)
