"""What each kernel does to its arguments, in torch: for runs that want the numbers, and not in an hour.

Functions are named like the kernels. They take a launch's arguments by name, as tensors in main memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def _store(into: torch.Tensor, value: torch.Tensor) -> None:
    largest = torch.finfo(into.dtype).max
    into.copy_(value.clamp(-largest, largest) if into.dtype.itemsize == 1 else value)


def _narrow(a: SimpleNamespace) -> None:
    _store(a.y, a.x.float())


def _rms_norm(a: SimpleNamespace) -> None:
    value = a.x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + a.eps)
    _store(a.y, value * a.weight.float() if a.HAS_WEIGHT else value)


def _join_norms(a: SimpleNamespace) -> None:
    for side, x in zip(a.y.chunk(2, -1), (a.embedding[a.token_ids.long()], a.states), strict=True):
        value = x.float()
        _store(side, value * torch.rsqrt(value.square().mean(-1, keepdim=True) + a.eps))


def _silu_and_mul(a: SimpleNamespace) -> None:
    gate, up = a.gate_up.float().chunk(2, -1)
    a.y.copy_(gate * torch.sigmoid(gate) * up)


def _rotation_table(a: SimpleNamespace) -> None:
    angles = a.positions.float().unsqueeze(1) * a.inverse_frequencies
    a.cos.copy_(angles.cos())
    a.sin.copy_(angles.sin())


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _heads(
    source: torch.Tensor, a: SimpleNamespace, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    split = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = source.view(len(source), -1, head_dim).float().split_with_sizes(split, 1)
    if a.HAS_NORM:
        q, k = (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a.eps) * weight.float()
            for x, weight in ((q, a.q_weight), (k, a.k_weight))
        )
    return tuple(x.to(source.dtype) for x in (_turned(q, a.cos, a.sin), _turned(k, a.cos, a.sin), v))  # type: ignore


def _write(a: SimpleNamespace, k: torch.Tensor, v: torch.Tensor) -> None:
    block_size = a.kv_cache.shape[3]
    blocks, offsets = a.slot_mapping // block_size, a.slot_mapping % block_size
    assert int(blocks.max()) < a.kv_cache.shape[1], "a slot outside of the cache"
    assert int(a.slot_mapping.min()) >= 0
    a.kv_cache[0, blocks, :, offsets] = k
    a.kv_cache[1, blocks, :, offsets] = v


def _append_heads(a: SimpleNamespace) -> None:
    q, k, v = _heads(a.qkv, a, a.NUM_HEADS, a.NUM_KV_HEADS, 2 * a.HALF)
    a.q.copy_(q)
    _write(a, k, v)


def _decode_attention(a: SimpleNamespace) -> None:
    num_rows, num_heads, query_len = len(a.block_tables), a.GROUP * a.NUM_KV_HEADS, a.QUERY_LEN
    assert a.block_tables.dtype == a.seq_lens.dtype == torch.int32
    fresh_k = fresh_v = None
    if a.IS_PROJECTION:
        q, fresh_k, fresh_v = _heads(a.source, a, num_heads, a.NUM_KV_HEADS, a.D)
    else:
        q = a.source
    width = a.block_tables.shape[1] * a.BLOCK_SIZE
    lengths = a.seq_lens[:num_rows].long().clamp(max=width).clamp(min=query_len)
    context = lengths - query_len if a.IS_PROJECTION else lengths
    longest = max(int(context.max()), 1)
    tables = a.block_tables[:, : -(-longest // a.BLOCK_SIZE)].long()
    keys, values = (side[tables].permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :longest].float() for side in a.kv_cache)
    tokens = torch.arange(longest)
    visible = lengths.unsqueeze(1) - query_len + 1 + torch.arange(query_len)  # [R, query_len]
    seen = tokens < torch.minimum(visible, context.unsqueeze(1)).unsqueeze(2)  # [R, query_len, longest]
    if fresh_k is not None and fresh_v is not None:
        _write(a, fresh_k, fresh_v)
        shape = (num_rows, query_len, a.NUM_KV_HEADS, a.D)
        keys, values = (
            torch.cat((old, new.view(shape).transpose(1, 2).float()), 2)
            for old, new in ((keys, fresh_k), (values, fresh_v))
        )
        causal = torch.ones(query_len, query_len, dtype=torch.bool).tril().expand(num_rows, -1, -1)
        seen = torch.cat((seen, causal), 2)
    keys, values = (x.repeat_interleave(a.GROUP, 1) for x in (keys, values))
    queries = q.reshape(num_rows, query_len, num_heads, a.D).transpose(1, 2).float()
    scale = a.scale_log2 / math.log2(math.e)
    attended = scaled_dot_product_attention(queries, keys, values, attn_mask=seen.unsqueeze(1), scale=scale)
    _store(a.out, attended.transpose(1, 2).reshape(a.out.shape))


def _rotate_qk(a: SimpleNamespace) -> None:
    for side in range(2):
        a.qkv[:, side] = _turned(a.qkv[:, side].float(), a.cos, a.sin).to(a.qkv.dtype)


def _decode_inputs(a: SimpleNamespace) -> None:
    a.tables[a.entry_rows, a.entry_positions] = a.entry_blocks.to(torch.int32)
    a.block_tables.copy_(a.tables[a.rows])
    computed = a.num_computed_tokens.long().unsqueeze(1)
    position = computed + torch.arange(a.QUERY_LEN)
    blocks = a.block_tables.long().gather(1, (position // a.BLOCK_SIZE).clamp(max=a.width - 1))
    a.positions.copy_(position.flatten())
    a.slot_mapping.copy_((blocks * a.BLOCK_SIZE + position % a.BLOCK_SIZE).flatten())
    a.seq_lens.copy_((computed.flatten() + a.QUERY_LEN).clamp(max=a.max_len))


def _verify(a: SimpleNamespace) -> None:
    rows, width = a.rows, a.K + 1
    first, places = a.firsts, torch.arange(width)
    drafted = a.num_proposed[rows].clamp(max=max(a.K, 1))
    drafts = a.draft_ids[rows, : max(a.K, 1)]
    equal = drafts == a.token_ids[:, : drafts.shape[1]]
    equal &= torch.arange(drafts.shape[1]) < drafted.unsqueeze(1)
    matched = equal.int().cumprod(1).sum(1)
    room = (a.limits[rows].long() - first).clamp(min=1)
    valid = torch.minimum(1 + matched.clamp(max=a.K), room)
    for into, value in ((a.num_valid, valid), (a.num_drafted, drafted), (a.num_matched, matched)):
        into.copy_(value)
    a.lengths.copy_(first + valid)
    columns = (first.unsqueeze(1) + places) % a.window
    kept = places < valid.unsqueeze(1)
    a.tokens[rows.unsqueeze(1).expand_as(columns)[kept], columns[kept]] = a.token_ids[kept]


def _propose(a: SimpleNamespace) -> None:
    from raypp.ops.break_point import breaking_at
    from raypp.ops.ngram import propose_ngrams

    lengths, num_rows = a.lengths.clamp(min=1), len(a.rows)
    with breaking_at(None):
        drafts, proposed = propose_ngrams(
            a.tokens, a.rows, lengths, min_n=a.MIN_N, max_n=a.MAX_N, num_drafts=a.K, max_length=int(lengths.max())
        )
    a.drafts[:num_rows] = drafts
    a.num_proposed[:num_rows] = torch.where(a.lengths > 0, proposed, 0)


def _project_few(a: SimpleNamespace) -> None:
    assert len(a.x) == a.ROWS
    _project(a, a.HAS_NORM, a.HAS_SCALE)


def _project_rows(a: SimpleNamespace) -> None:
    assert a.num_rows == len(a.x)
    assert not a.HAS_SCALE or a.x.dtype.itemsize == 1
    _project(a, has_norm=False, has_scale=a.HAS_SCALE)


def _project(a: SimpleNamespace, has_norm: bool, has_scale: bool) -> None:
    x = a.x.float()
    assert a.weight.shape == (a.num_outputs * (2 if a.HAS_GATE else 1), a.num_inputs)
    assert a.y.shape[1] == a.num_outputs
    if has_norm:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a.eps)
    y = x @ a.weight.float().T
    if has_scale:
        assert a.weight.dtype == torch.float8_e4m3fn
        y = y * a.weight_scale
    if a.HAS_BIAS:
        y = y + a.bias.float()
    if a.HAS_GATE:
        gate, up = y.chunk(2, -1)
        y = gate * torch.sigmoid(gate) * up
    if a.HAS_RESIDUAL:
        y = y + a.residual.float()
    _store(a.y, y)


def _best(a: SimpleNamespace) -> None:
    logits = a.logits.float()
    assert logits.shape[1] == a.vocab_size
    a.tokens.copy_(logits.argmax(-1))


def _survey(a: SimpleNamespace) -> None:
    assert a.logits.shape[1] == a.vocab_size
    a.tokens.copy_(a.logits.float().argmax(-1))


def _gather(a: SimpleNamespace) -> None:
    from raypp.ops.sample.draw import sample

    a.tokens.copy_(sample(a.logits, a.temperature, a.seeds, a.positions, (a.top_k, a.top_p, a.min_p)))


def _finish(a: SimpleNamespace) -> None:
    """Nothing is left to draw."""


TWINS: dict[str, Callable[[Any], None]] = {
    function.__name__: function
    for function in (
        _narrow,
        _rms_norm,
        _join_norms,
        _silu_and_mul,
        _rotation_table,
        _append_heads,
        _decode_attention,
        _rotate_qk,
        _decode_inputs,
        _verify,
        _propose,
        _project_few,
        _project_rows,
        _best,
        _survey,
        _gather,
        _finish,
    )
} | {"_search": _finish}

CHEAP = frozenset({"_decode_inputs", "_verify", "_propose", "_best", "_survey", "_gather", "_finish", "_search"})
"""Those that decide what a driver hears: computed even where nothing else is."""
