"""What operations of a layer compute, as plain as torch can say it: for tests to compare with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from raypp.ops.attention import Heads
from raypp.ops.backend import SILU, Gate, Routing, choose_experts
from raypp.ops.cuda.cuda_kernels import plain_rms_norm as rms_norm
from raypp.ops.cuda.cuda_kernels import plain_silu_and_mul as silu_and_mul
from raypp.ops.kv_cache import LayerCache
from raypp.ops.sample.adjust import BANNED


def apply_rotary(heads: torch.Tensor, positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> torch.Tensor:
    """Return heads [T, n, D] rotated: dimensions (i, i + D / 2) by the angle position * inverse_frequencies[i]."""
    angles = positions.float()[:, None, None] * inverse_frequencies
    first, second = heads.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Return one sequence's causal attention, [Q, Hq, Dv]; the queries are its last Q tokens.

    Shapes: q [Q, Hq, Dk]; k [L, Hk, Dk] and v [L, Hk, Dv], all of the sequence. What no query sees may be anything.
    Computed in float32.
    """
    (query_len, num_heads, _), (seq_len, num_kv_heads, _) = q.shape, k.shape
    keys = k.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = v.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * heads.scale
    if heads.soft_cap is not None:
        scores = heads.soft_cap * torch.tanh(scores / heads.soft_cap)
    key_positions = torch.arange(seq_len)
    query_positions = torch.arange(seq_len - query_len, seq_len)[:, None]
    sees = key_positions <= query_positions
    if heads.window is not None:
        sees &= key_positions > query_positions - heads.window
    sees = sees.to(q.device)
    scores = scores.masked_fill(~sees, -torch.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.float()[:, None, None].expand(-1, query_len, 1)
        scores = torch.cat((scores, sinks), 2)
    weights = scores.softmax(-1)[:, :, :seq_len]
    values = values.masked_fill(~sees.any(0)[:, None, None], 0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: torch.Tensor,
    heads: Heads,
) -> torch.Tensor:
    """Write k and v into the cache and attend, row by row and token by token. Returns [T, Hq, Dv].

    Shapes: q [T, Hq, Dk]; k [T, Hk, Dk]; v [T, Hk, Dv]; block_tables [R, blocks].
    """
    block_size, out, start = cache.keys.shape[2], q.new_empty(*q.shape[:2], v.shape[2]), 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for index in range(query_len):
            position = seq_len - query_len + index
            block = int(block_tables[row, position // block_size])
            cache.keys[block, :, position % block_size] = k[start + index]
            cache.values[block, :, position % block_size] = v[start + index]
        blocks = block_tables[row].long()
        keys, values = (side[blocks].transpose(1, 2).flatten(0, 1)[:seq_len] for side in cache)
        out[start : start + query_len] = attention(q[start : start + query_len], keys, values, heads)
        start += query_len
    return out


def changed_logits(
    logits: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    bias: Mapping[int, float],
    repetition: float,
    frequency: float,
    presence: float,
    early_end_token_ids: Collection[int],
    bad_words: Sequence[Sequence[int]],
    allowed: Collection[int] | None,
) -> torch.Tensor:
    """Return what a request's parameters make of its logits [V] for the token after `prompt` and `output`, float32."""
    values = logits.float().clone()
    for token_id, value in bias.items():
        values[token_id] += value
    for token_id in {*prompt, *output}:
        values[token_id] = values[token_id] / repetition if values[token_id] > 0 else values[token_id] * repetition
    for token_id in set(output):
        values[token_id] -= torch.tensor(frequency) * list(output).count(token_id)
        values[token_id] -= presence
    known = [*prompt, *output]
    endings = [word[-1] for word in bad_words if known[len(known) - len(word) + 1 :] == list(word[:-1])]
    for token_id in [*early_end_token_ids, *endings]:
        values[token_id] = BANNED
    if allowed is not None:
        for token_id in range(len(values)):
            if token_id not in allowed:
                values[token_id] = -torch.inf
    return values


def append_heads(
    qkv: torch.Tensor,
    heads: Heads,
    positions: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: LayerCache,
) -> torch.Tensor:
    """Normalize and rotate the heads of a projection, write keys and values to their slots; return q, [T, Hq, D].

    Shapes: qkv [T, `heads.width`]; positions, slot_mapping [T]. Computed in float32, rounded once.
    """
    num_heads, num_kv_heads, dtype = heads.num_heads, heads.num_kv_heads, qkv.dtype
    if heads.has_gate:
        width = 2 * num_heads * heads.head_dim
        queries = qkv[:, :width].unflatten(1, (num_heads, 2, heads.head_dim))[:, :, 0]
        qkv = torch.cat((queries.flatten(1), qkv[:, width:]), 1)
    if heads.values_are_keys:
        qkv = torch.cat((qkv, qkv[:, num_heads * heads.head_dim :]), 1)
    widths = num_heads * heads.head_dim, num_kv_heads * heads.head_dim, num_kv_heads * heads.value_dim
    counts = num_heads, num_kv_heads, num_kv_heads
    parts = zip(qkv.float().split_with_sizes(widths, 1), counts, strict=True)
    q, k, v = (part.view(len(qkv), count, -1) for part, count in parts)
    if heads.norm is not None:
        q = rms_norm(q, heads.norm.q_weight, heads.norm.eps)
        k = rms_norm(k, heads.norm.k_weight, heads.norm.eps)
        v = rms_norm(v, None, heads.norm.eps) if heads.norm.has_values else v
    rotated = heads.rotary_dim or heads.head_dim
    q, k = (
        torch.cat((apply_rotary(x[..., :rotated], positions, inverse_frequencies), x[..., rotated:]), -1).to(dtype)
        for x in (q, k)
    )
    block_size = cache.keys.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        cache.keys[slot // block_size, :, slot % block_size] = k[token]
        cache.values[slot // block_size, :, slot % block_size] = v[token].to(dtype)
    return q


def decode_attention(
    q: torch.Tensor,
    cache: LayerCache,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_len: int,
    heads: Heads,
) -> torch.Tensor:
    """Return the attention of decode rows whose keys and values are in the cache already, [R * query_len, Hq, Dv].

    Shapes: q [R * query_len, Hq, Dk]; seq_lens [R]; block_tables [R, W].
    Lengths past a table's end are cut there.
    """
    out = q.new_empty(*q.shape[:2], heads.value_dim)
    for row, (table, seq_len) in enumerate(zip(block_tables.long(), seq_lens.tolist(), strict=True)):
        keys, values = (side[table].transpose(1, 2).flatten(0, 1)[:seq_len] for side in cache)
        tokens = slice(row * query_len, (row + 1) * query_len)
        out[tokens] = attention(q[tokens], keys, values, heads)
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return norm(x) W^T + b, its gate, or its sum with the residual stream; computed in float32, rounded once.

    Shapes: x [T, K]; weight [N, K]; scale [N], of a weight in 8 bits; bias [N]; norm_weight [K]; residual [T, N]. With
    a gate the result is [T, N / 2].
    """
    y = x.float()
    if norm_weight is not None:
        y = rms_norm(y, norm_weight, eps)
    y = y @ weight.float().T
    if scale is not None:
        y *= scale
    if bias is not None:
        y += bias.float()
    if is_gated:
        y = silu_and_mul(y)
    if residual is not None:
        y += residual.float()
    return y.to(x.dtype)


def experts(
    hidden: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    gate: Gate = SILU,
    norm_of_router: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return hidden + the weighted sum of each token's experts, [T, H] float32; token by token in float32.

    Shapes: hidden [T, H]; norm_weight [H]; router [E, H]; gate_up [E, 2 I, H]; down [E, H, I]; the others as in
    `raypp.ops.backend.Router`.
    """
    normed = rms_norm(hidden.float(), norm_weight, eps)
    seen = normed if norm_of_router is None else rms_norm(hidden.float(), norm_of_router, eps)
    chosen, weights = choose_experts(seen @ router.float().T, routing, None, expert_scales)
    out = hidden.float().clone()
    for token, (own, own_weights) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for expert, weight in zip(own, own_weights, strict=True):
            y = gate(*(normed[token] @ gate_up[expert].float().T)[None].chunk(2, -1))
            out[token] += weight * (y @ down[expert].float().T)[0]
    return out
