"""Attention over the paged KV cache in plain torch, for CPUs: few calls per layer; what layers share is computed once.

    decode rows   in groups of similar length whose gathered KV fits the CPU's cache:
                  one gather per group, then batched products with a query head group per KV head
    prefill rows  one by one: their own tokens if that is all there is, else the row's gathered blocks and a mask

With a window only blocks that some query of the row sees are gathered, and long chunks are attended to piece by piece.

Why groups and why these calls: docs/design/0002-cpu-attention.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raypp.ops.attention import AttentionBatch, Heads, Span
from raypp.ops.kv_cache import FP8, LayerCache, as_cached, cache_rows, gather_blocks, with_latents, write_kv_cache
from raypp.ops.row_attention import additive_mask, attend_piece, capped, piece_mask, row_pieces, softmax_with_sinks

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
class PrefillPiece:
    """Tokens of one prefill row, [start, end) of the step, and what they attend to: all of the row, if one can."""

    start: int
    end: int
    first_key: int  # of the step's tokens, where the row has no tokens but these
    num_keys: int
    head_blocks: torch.Tensor | None  # [2 * Hk * blocks]; None: the row has no tokens but these
    mask: torch.Tensor | None  # [end - start, num_keys], 0 or -inf; None: see `raypp.ops.row_attention.piece_mask`
    sees_ahead: bool


@dataclass(frozen=True, eq=False, slots=True)
class AttentionPlan:
    """A step's attention, prepared for all layers of a kind."""

    rows: torch.Tensor  # [T * Hk] int64, see `raypp.ops.kv_cache.cache_rows`
    num_decode_tokens: int
    decode_query_len: int
    decode_groups: list[DecodeGroup]
    prefill_pieces: list[PrefillPiece]


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: AttentionBatch, heads: Heads
) -> torch.Tensor:
    """Write the step's keys and values into the cache and return the attention's output, [T, Hq, Dv].

    Shapes: q [T, Hq, Dk]; k [T, Hk, Dk] and v [T, Hk, Dv], Hq a multiple of Hk, with padding behind if the batch's slot
    mappings have any; of latents k is as the cache has it, which is written in place. What a row computes past the end
    of its block table is finite, meaningless and never read.

    Args:
        q: Queries.
        k: Keys of the step's tokens.
        v: Values of the step's tokens.
        cache: The layer's.
        batch: The step.
        heads: The layer's.
    """
    plan = batch.plans.get(heads.kind)
    if plan is None:  # the first layer of a kind prepares for all: they differ in nothing that the plan depends on
        plan = batch.plans[heads.kind] = _plan(cache, q.dtype, batch, heads)
    assert isinstance(plan, AttentionPlan)
    k_scale, v_scale = (heads.k_scale, heads.v_scale) if cache.keys.dtype == FP8 else (1.0, 1.0)
    k, v = as_cached(k, cache.keys, k_scale), as_cached(v, cache.values, v_scale)
    write_kv_cache(cache, k, v, plan.rows)
    # A product with the scales is one with the scores, and one with the output.
    out = _attend(q, k, v, cache, plan, heads, heads.scale * k_scale)
    return out if v_scale == 1.0 else out.mul_(v_scale)


def _plan(cache: LayerCache, dtype: torch.dtype, batch: AttentionBatch, heads: Heads) -> AttentionPlan:
    """Prepare a step. Reads lengths from the device, which is the host."""
    return AttentionPlan(
        rows=cache_rows(cache, batch.slot_mappings[heads.group]),
        num_decode_tokens=batch.num_decode_rows * batch.decode_query_len,
        decode_query_len=batch.decode_query_len,
        decode_groups=_decode_groups(cache, dtype, batch, heads) if batch.num_decode_rows else [],
        prefill_pieces=_prefill_pieces(cache, dtype, batch, heads) if batch.prefill_query_lens else [],
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    plan: AttentionPlan,
    heads: Heads,
    scale: float,
) -> torch.Tensor:
    """Return the weighted sum of what the cache holds, [T, Hq, Dv]; k and v are as it holds them."""
    query_len = plan.decode_query_len
    if len(plan.decode_groups) == 1 and not plan.prefill_pieces:
        return _attend_decode(q, cache, query_len, plan.decode_groups[0], heads, scale)
    out = q.new_empty(len(q), heads.num_heads, heads.value_dim)
    decode_q, decode_out = q[: plan.num_decode_tokens], out[: plan.num_decode_tokens]
    for group in plan.decode_groups:
        if group.tokens is None:
            decode_out.copy_(_attend_decode(decode_q, cache, query_len, group, heads, scale))
        else:
            group_q = decode_q.index_select(0, group.tokens)
            group_out = _attend_decode(group_q, cache, query_len, group, heads, scale)
            decode_out.index_copy_(0, group.tokens, group_out)
    for piece in plan.prefill_pieces:
        if piece.head_blocks is None:
            tokens = slice(piece.first_key, piece.first_key + piece.num_keys)
            keys, values = k[tokens].transpose(0, 1), v[tokens].transpose(0, 1)
        else:
            keys, values = _gather(cache, piece.head_blocks, heads.num_kv_heads, None, None)
            keys, values = keys[:, : piece.num_keys], values[:, : piece.num_keys]
        keys = with_latents(keys, values) if heads.has_latents else keys
        queries = q[piece.start : piece.end]
        out[piece.start : piece.end] = attend_piece(
            queries, keys, values, piece.mask, heads, scale, sees_ahead=piece.sees_ahead
        )
    return out


def _gather(
    cache: LayerCache, head_blocks: torch.Tensor, num_rows: int, behind: torch.Tensor | None, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of rows, one of each KV head, [num_rows, L, D], those at places `behind` as zeros.

    Other rows may have left infinity or NaN there, and a weight of 0 times that is NaN.
    """
    both = cache.both
    if both is not None:  # one call instead of two
        keys, values = _gather_side(both, head_blocks, 2 * num_rows, behind, dtype).chunk(2)
        return keys, values
    if behind is not None:
        behind = behind[: len(behind) // 2]
    head_blocks = head_blocks[: len(head_blocks) // 2]
    keys, values = (_gather_side(side, head_blocks, num_rows, behind, dtype) for side in cache)
    return keys, values


def _gather_side(
    side: torch.Tensor, head_blocks: torch.Tensor, num_rows: int, behind: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    head_dim = side.shape[-1]
    gathered = gather_blocks(side, head_blocks)
    if dtype is not None and gathered.dtype != dtype:
        gathered = gathered.to(dtype)
    if behind is not None:
        gathered.view(-1, head_dim).index_fill_(0, behind, 0)
    return gathered.view(num_rows, -1, head_dim)


def _attend_decode(
    q: torch.Tensor, cache: LayerCache, query_len: int, group: DecodeGroup, heads: Heads, scale: float
) -> torch.Tensor:
    """Return the output of a group's rows, [R * Q, Hq, Dv]. Shapes: q [R * Q, Hq, Dk]."""
    num_rows, num_kv_heads, mask = group.num_rows, heads.num_kv_heads, group.mask
    keys, values = _gather(cache, group.head_blocks, num_rows * num_kv_heads, group.behind, mask.dtype)
    keys = with_latents(keys, values) if heads.has_latents else keys
    # The heads that share a KV head become query rows of one product: nothing is repeated. Views only when Q is 1.
    by_kv_head = q.view(num_rows, query_len, num_kv_heads, -1, heads.head_dim).transpose(1, 2)
    queries = by_kv_head.reshape(num_rows * num_kv_heads, -1, heads.head_dim).to(mask.dtype)
    if heads.soft_cap is None:
        scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale)
    else:
        scores = capped(torch.bmm(queries, keys.transpose(1, 2)), heads.soft_cap, scale).add_(mask)
    if heads.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = heads.sinks.view(num_kv_heads, 1, -1).expand(num_rows, -1, query_len, -1)
        weights = softmax_with_sinks(scores, sinks.reshape(num_rows * num_kv_heads, -1))
    out = torch.bmm(weights, values).view(num_rows, num_kv_heads, query_len, -1, heads.value_dim)
    return out.transpose(1, 2).reshape(len(q), heads.num_heads, heads.value_dim).to(q.dtype)


def _decode_groups(cache: LayerCache, dtype: torch.dtype, batch: AttentionBatch, heads: Heads) -> list[DecodeGroup]:
    """Cut the decode rows into groups of similar length whose padded KV is at most GROUP_BYTES."""
    num_rows, query_len, window = batch.num_decode_rows, batch.decode_query_len, heads.window
    seq_lens, tables = batch.seq_lens[:num_rows], batch.block_tables[heads.group]
    if window is not None:
        seq_lens, tables = _from_window(seq_lens, tables, query_len, window, cache.keys.shape[2])
    lens = seq_lens.tolist()
    bytes_per_token = heads.num_kv_heads * (heads.head_dim + heads.value_dim) * 4
    if max(lens) * len(lens) * bytes_per_token <= GROUP_BYTES or len(lens) == 1:
        return [_decode_group(cache, dtype, heads, query_len, max(lens), seq_lens, tables, None)]
    groups, members = [], list[int]()
    for row in [*sorted(range(len(lens)), key=lens.__getitem__), None]:
        if members and (row is None or (len(members) + 1) * lens[row] * bytes_per_token > GROUP_BYTES):
            rows = torch.tensor(members, device=seq_lens.device)
            groups.append(
                _decode_group(
                    cache,
                    dtype,
                    heads,
                    query_len,
                    lens[members[-1]],
                    seq_lens.index_select(0, rows),
                    tables.index_select(0, rows),
                    (rows.unsqueeze(1) * query_len + torch.arange(query_len, device=rows.device)).view(-1),
                )
            )
            members = []
        if row is not None:
            members.append(row)
    return groups


def _from_window(
    seq_lens: torch.Tensor, tables: torch.Tensor, query_len: int, window: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lengths and tables as if each row began with the first block that its first query sees.

    Shapes: seq_lens [R], tables [R or more, W]. Lengths past a table's end are cut there.
    """
    width = tables.shape[1]
    seq_lens = seq_lens.clamp(max=width * block_size)
    first_blocks = (seq_lens - (query_len + window - 1)).clamp_(min=0) // block_size
    seq_lens = seq_lens - first_blocks * block_size
    num_blocks = -(-int(seq_lens.max()) // block_size)
    entries = first_blocks.unsqueeze(1) + torch.arange(num_blocks, device=tables.device)
    return seq_lens, tables[: len(seq_lens)].gather(1, entries.clamp_(max=width - 1))


def _decode_group(
    cache: LayerCache,
    dtype: torch.dtype,
    heads: Heads,
    query_len: int,
    max_len: int,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    tokens: torch.Tensor | None,
) -> DecodeGroup:
    num_rows, num_kv_heads = len(seq_lens), heads.num_kv_heads
    block_size = cache.keys.shape[2]
    num_blocks = min(-(-max_len // block_size), block_tables.shape[1])  # a row may run past its table
    length = num_blocks * block_size
    positions = torch.arange(length, dtype=torch.int32, device=seq_lens.device)
    # Query token j of Q sits at position seq_len - Q + j and attends to that position and all before.
    if query_len == 1:
        bounds = seq_lens.view(num_rows, 1, 1)
    else:
        offsets = torch.arange(1 - query_len, 1, dtype=torch.int32, device=seq_lens.device)
        bounds = (seq_lens.view(num_rows, 1) + offsets).unsqueeze(2)
    allowed = positions < bounds
    if heads.window is not None:
        allowed &= positions >= bounds - heads.window
    mask = additive_mask(allowed, torch.promote_types(dtype, torch.float32))  # [R, Q, L]
    group_heads = 1 if query_len == 1 else heads.num_heads // num_kv_heads
    mask = mask.view(num_rows, 1, query_len, 1, length).expand(-1, num_kv_heads, -1, group_heads, -1)
    # By numpy: how many places there are depends on the lengths, which no operation of a recording may.
    is_behind = np.arange(length) >= seq_lens.cpu().numpy()[:, None, None]
    behind = np.flatnonzero(np.broadcast_to(is_behind, (2, num_rows, num_kv_heads, length)))
    return DecodeGroup(
        num_rows=num_rows,
        length=length,
        head_blocks=_head_blocks(cache, block_tables[:num_rows, :num_blocks]),
        mask=mask.reshape(num_rows * num_kv_heads, -1, length),
        behind=torch.from_numpy(behind).to(seq_lens.device),
        tokens=tokens,
    )


def _head_blocks(cache: LayerCache, block_tables: torch.Tensor) -> torch.Tensor:
    """Return where rows' blocks lie when `LayerCache.both` is seen as [-1, block_size * D]: keys, then values.

    By row and head. The first half is where they lie in keys, and in values, alone. Shapes: block_tables [R, blocks]
    int32; returns [2 * R * Hk * blocks] int64.
    """
    num_blocks, num_kv_heads = cache.keys.shape[:2]
    heads = torch.arange(2 * num_kv_heads, device=block_tables.device).view(2, 1, num_kv_heads, 1)
    heads[1] += (num_blocks - 1) * num_kv_heads  # values lie behind all keys
    return torch.add(heads, block_tables.unsqueeze(1), alpha=num_kv_heads).view(-1)


def _prefill_pieces(cache: LayerCache, dtype: torch.dtype, batch: AttentionBatch, heads: Heads) -> list[PrefillPiece]:
    block_size, pieces = cache.keys.shape[2], list[PrefillPiece]()
    tables, start = batch.block_tables[heads.group], batch.num_decode_rows * batch.decode_query_len
    spans: Sequence[Sequence[Span] | None] = [None] * len(batch.prefill_query_lens)
    if heads.sees_ahead and batch.prefill_spans is not None:
        spans = batch.prefill_spans
    lens = zip(batch.prefill_query_lens, batch.prefill_seq_lens, spans, strict=True)
    for row, (query_len, seq_len, of_row) in enumerate(lens, batch.num_decode_rows):
        num_before = seq_len - query_len
        for piece in row_pieces(query_len, seq_len, heads, block_size if num_before else 1, of_row):
            head_blocks = None
            if num_before:
                blocks = slice(piece.first // block_size, -(-piece.last // block_size))
                head_blocks = _head_blocks(cache, tables[row : row + 1, blocks])
            mask = piece_mask(piece, num_before, heads, dtype, tables.device)
            tokens = (start + piece.begin, start + piece.end, start + piece.first)
            pieces.append(PrefillPiece(*tokens, piece.last - piece.first, head_blocks, mask, piece.sees_ahead))
        start += query_len
    return pieces
