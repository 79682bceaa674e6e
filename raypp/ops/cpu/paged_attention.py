"""Attention over the paged KV cache in plain torch, for CPUs: few calls per layer; what layers share is computed once.

    decode rows   in groups of similar length whose gathered KV fits the CPU's cache:
                  one gather per group, then batched products with a query head group per KV head
    prefill rows  one by one: their own tokens if that is all there is, else the row's gathered blocks and a mask

Why groups and why these calls: docs/design/0002-cpu-attention.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.kv_cache import FP8, as_cached, cache_rows, gather_blocks, write_kv_cache

GROUP_BYTES = 2 << 20
"""Gathered KV of a group of decode rows. Larger than a core's cache, and attention waits for memory."""


@dataclass(frozen=True, eq=False, slots=True)
class DecodeGroup:
    """Decode rows that are attended together: R rows of Q query tokens, padded to L tokens, G heads per KV head."""

    num_rows: int
    length: int  # L, a multiple of the block size
    head_blocks: torch.Tensor  # [2 * R * Hk * L / block_size], keys, then values; see `_head_blocks`
    mask: torch.Tensor  # [R * Hk, 1 or Q * G, L], 0 or -inf, in the precision of the scores
    behind: torch.Tensor  # [n] int64, places of [2, R, Hk, L] that lie behind their row's length
    tokens: torch.Tensor | None  # [R * Q] int64, the group's tokens; None: all decode tokens, in order


@dataclass(frozen=True, eq=False, slots=True)
class PrefillRow:
    """One prefill row's tokens, [start, end), and what they attend to."""

    start: int
    end: int
    seq_len: int
    head_blocks: torch.Tensor | None  # [2 * Hk * blocks]; None: the row has no tokens but these
    mask: torch.Tensor | None  # [query_len, seq_len], 0 or -inf


@dataclass(frozen=True, eq=False, slots=True)
class AttentionPlan:
    """A step's attention, prepared for all layers."""

    key_rows: torch.Tensor  # [T * Hk] int64, see `raypp.ops.kv_cache.cache_rows`
    value_rows: torch.Tensor  # [T * Hk] int64
    num_decode_tokens: int
    decode_query_len: int
    decode_groups: list[DecodeGroup]
    prefill_rows: list[PrefillRow]


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch, heads: Heads
) -> torch.Tensor:
    """Write the step's keys and values into the cache and return the attention's output, [T, Hq, D].

    Shapes: q [T, Hq, D]; k, v [T, Hk, D], Hq a multiple of Hk, with padding behind if the batch's slot mapping has any;
    kv_cache [2, num_blocks, Hk, block_size, D], written in place. What a row computes past the end of its block table
    is finite, meaningless and never read.

    Args:
        q: Queries.
        k: Keys of the step's tokens.
        v: Values of the step's tokens.
        kv_cache: The layer's cache, see `raypp.ops.kv_cache`.
        batch: The step.
        heads: The layer's.
    """
    if batch.plan is None:  # the first layer prepares for all: they differ in nothing that the plan depends on
        batch.plan = _plan(kv_cache, q, batch)
    plan = batch.plan
    assert isinstance(plan, AttentionPlan)
    k_scale, v_scale = (heads.k_scale, heads.v_scale) if kv_cache.dtype == FP8 else (1.0, 1.0)
    k, v = as_cached(k, kv_cache, k_scale), as_cached(v, kv_cache, v_scale)
    write_kv_cache(kv_cache, k, v, plan.key_rows, plan.value_rows)
    # A product with the scales is one with the scores, and one with the output.
    out = _attend(q, k, v, kv_cache, plan, heads.scale * k_scale)
    return out if v_scale == 1.0 else out.mul_(v_scale)


def _plan(kv_cache: torch.Tensor, q: torch.Tensor, batch: AttentionBatch) -> AttentionPlan:
    """Prepare a step. Reads lengths from the device, which is the host."""
    num_rows, query_len, dtype = batch.num_decode_rows, batch.decode_query_len, q.dtype
    lens = batch.seq_lens[:num_rows].tolist() if num_rows else []
    key_rows, value_rows = cache_rows(kv_cache, batch.slot_mapping)
    return AttentionPlan(
        key_rows=key_rows,
        value_rows=value_rows,
        num_decode_tokens=num_rows * query_len,
        decode_query_len=query_len,
        decode_groups=_decode_groups(kv_cache, dtype, q.shape[1], query_len, lens, batch.seq_lens, batch.block_tables),
        prefill_rows=_prefill_rows(kv_cache, dtype, batch) if batch.prefill_query_lens else [],
    )


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Return the weighted sum of what the cache holds, [T, Hq, D]; k and v are as it holds them."""
    if len(plan.decode_groups) == 1 and not plan.prefill_rows:
        return _attend_decode(q, kv_cache, plan.decode_query_len, plan.decode_groups[0], scale)
    out = torch.empty_like(q)
    decode_q, decode_out = q[: plan.num_decode_tokens], out[: plan.num_decode_tokens]
    for group in plan.decode_groups:
        if group.tokens is None:
            decode_out.copy_(_attend_decode(decode_q, kv_cache, plan.decode_query_len, group, scale))
        else:
            group_q = decode_q.index_select(0, group.tokens)
            group_out = _attend_decode(group_q, kv_cache, plan.decode_query_len, group, scale)
            decode_out.index_copy_(0, group.tokens, group_out)
    for row in plan.prefill_rows:
        tokens = slice(row.start, row.end)
        out[tokens] = _attend_prefill(q[tokens], k[tokens], v[tokens], kv_cache, row, scale)
    return out


def _attend_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, query_len: int, group: DecodeGroup, scale: float
) -> torch.Tensor:
    """Return the output of a group's rows. Shapes: q [R * Q, Hq, D], returned alike."""
    num_kv_heads, _, head_dim = kv_cache.shape[2:]
    num_rows, length = group.num_rows, group.length
    gathered = gather_blocks(kv_cache, group.head_blocks)
    if gathered.dtype != group.mask.dtype:
        gathered = gathered.to(group.mask.dtype)
    # Other rows may have left infinity or NaN there, and a weight of 0 times that is NaN.
    gathered.view(-1, head_dim).index_fill_(0, group.behind, 0)
    keys, values = gathered.view(2, num_rows * num_kv_heads, length, head_dim).unbind(0)
    # The heads that share a KV head become query rows of one product: nothing is repeated. Views only when Q is 1.
    heads = q.view(num_rows, query_len, num_kv_heads, -1, head_dim).transpose(1, 2)
    queries = heads.reshape(num_rows * num_kv_heads, -1, head_dim).to(group.mask.dtype)
    weights = torch.baddbmm(group.mask, queries, keys.transpose(1, 2), alpha=scale).softmax(-1)
    out = torch.bmm(weights, values).view(num_rows, num_kv_heads, query_len, -1, head_dim)
    return out.transpose(1, 2).reshape(q.shape).to(q.dtype)


def _attend_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, row: PrefillRow, scale: float
) -> torch.Tensor:
    """Return the output of one row. Shapes: q [query_len, Hq, D], returned alike; k, v [query_len, Hk, D]."""
    if row.head_blocks is None:
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
    else:
        num_kv_heads, _, head_dim = kv_cache.shape[2:]
        gathered = gather_blocks(kv_cache, row.head_blocks)
        keys, values = gathered.view(2, num_kv_heads, -1, head_dim)[:, :, : row.seq_len].unbind(0)
    return (
        F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys.to(q.dtype).unsqueeze(0),
            values.to(q.dtype).unsqueeze(0),
            attn_mask=row.mask,
            is_causal=row.mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        .squeeze(0)
        .transpose(0, 1)
    )


def _decode_groups(
    kv_cache: torch.Tensor,
    dtype: torch.dtype,
    num_heads: int,
    query_len: int,
    lens: list[int],
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
) -> list[DecodeGroup]:
    """Cut the decode rows, of `lens`, into groups of similar length whose padded KV is at most GROUP_BYTES."""
    if not lens:
        return []
    bytes_per_token = 2 * kv_cache.shape[2] * kv_cache.shape[4] * 4
    if max(lens) * len(lens) * bytes_per_token <= GROUP_BYTES or len(lens) == 1:
        rows_lens = seq_lens[: len(lens)]
        return [_decode_group(kv_cache, dtype, num_heads, query_len, max(lens), rows_lens, block_tables, None)]
    groups, members = [], list[int]()
    for row in [*sorted(range(len(lens)), key=lens.__getitem__), None]:
        if members and (row is None or (len(members) + 1) * lens[row] * bytes_per_token > GROUP_BYTES):
            rows = torch.tensor(members, device=kv_cache.device)
            groups.append(
                _decode_group(
                    kv_cache,
                    dtype,
                    num_heads,
                    query_len,
                    lens[members[-1]],
                    seq_lens.index_select(0, rows),
                    block_tables.index_select(0, rows),
                    (rows.unsqueeze(1) * query_len + torch.arange(query_len, device=rows.device)).view(-1),
                )
            )
            members = []
        if row is not None:
            members.append(row)
    return groups


def _decode_group(
    kv_cache: torch.Tensor,
    dtype: torch.dtype,
    num_heads: int,
    query_len: int,
    max_len: int,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    tokens: torch.Tensor | None,
) -> DecodeGroup:
    num_rows = seq_lens.shape[0]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    num_blocks = min(-(-max_len // block_size), block_tables.shape[1])  # a row may run past its table
    length = num_blocks * block_size
    positions = torch.arange(length, dtype=torch.int32, device=kv_cache.device)
    # Query token j of Q sits at position seq_len - Q + j and attends to that position and all before.
    if query_len == 1:
        bounds = seq_lens.view(num_rows, 1, 1)
    else:
        offsets = torch.arange(1 - query_len, 1, dtype=torch.int32, device=kv_cache.device)
        bounds = (seq_lens.view(num_rows, 1) + offsets).unsqueeze(2)
    mask = _additive_mask(positions < bounds, torch.promote_types(dtype, torch.float32))  # [R, Q, L]
    group_heads = 1 if query_len == 1 else num_heads // num_kv_heads
    mask = mask.view(num_rows, 1, query_len, 1, length).expand(-1, num_kv_heads, -1, group_heads, -1)
    # By numpy: how many places there are depends on the lengths, which no operation of a recording may.
    is_behind = np.arange(length) >= seq_lens.cpu().numpy()[:, None, None]
    behind = np.flatnonzero(np.broadcast_to(is_behind, (2, num_rows, num_kv_heads, length)))
    return DecodeGroup(
        num_rows=num_rows,
        length=length,
        head_blocks=_head_blocks(kv_cache, block_tables[:num_rows, :num_blocks]),
        mask=mask.reshape(num_rows * num_kv_heads, -1, length),
        behind=torch.from_numpy(behind).to(seq_lens.device),
        tokens=tokens,
    )


def _head_blocks(kv_cache: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    """Return where rows' blocks lie when a cache is seen as [-1, block_size * D]: keys, then values, by row and head.

    Shapes: block_tables [R, blocks] int32; returns [2 * R * Hk * blocks] int64.
    """
    num_blocks, num_kv_heads = kv_cache.shape[1:3]
    heads = torch.arange(2 * num_kv_heads, device=kv_cache.device).view(2, 1, num_kv_heads, 1)
    heads[1] += (num_blocks - 1) * num_kv_heads  # values lie behind all keys
    return torch.add(heads, block_tables.unsqueeze(1), alpha=num_kv_heads).view(-1)


def _prefill_rows(kv_cache: torch.Tensor, dtype: torch.dtype, batch: AttentionBatch) -> list[PrefillRow]:
    block_size, rows, start = kv_cache.shape[3], [], batch.num_decode_rows * batch.decode_query_len
    block_tables = batch.block_tables[batch.num_decode_rows :]
    query_lens, seq_lens = batch.prefill_query_lens, batch.prefill_seq_lens
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        head_blocks = mask = None
        if query_len < seq_len:
            head_blocks = _head_blocks(kv_cache, block_tables[index : index + 1, : -(-seq_len // block_size)])
            positions = torch.arange(seq_len, device=kv_cache.device)
            mask = _additive_mask(positions <= positions[seq_len - query_len :].unsqueeze(1), dtype)
        rows.append(PrefillRow(start, start + query_len, seq_len, head_blocks, mask))
        start += query_len
    return rows


def _additive_mask(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, -torch.inf)
