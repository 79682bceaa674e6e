"""The twin of every operation: as plain as it can be said in torch, for tests to compare with. Never fast.

`raypp.ops.sampling` is its own twin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from raypp.ops.logits import BANNED


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [..., n] scaled to a root mean square of one, times weight [..., n]; computed in float32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, I] of gate_up [T, 2 * I]; computed in float32."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def apply_rotary(heads: torch.Tensor, positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> torch.Tensor:
    """Return heads [T, n, D] rotated: dimensions (i, i + D / 2) by the angle position * inverse_frequencies[i]."""
    angles = positions.float()[:, None, None] * inverse_frequencies
    first, second = heads.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return one sequence's causal attention, [Q, Hq, D]; the queries are its last Q tokens.

    Shapes: q [Q, Hq, D]; k, v [L, Hk, D], all of the sequence. Computed in float32.
    """
    (query_len, num_heads, _), (seq_len, num_kv_heads, _) = q.shape, k.shape
    keys = k.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = v.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    future = torch.arange(seq_len) > torch.arange(seq_len - query_len, seq_len)[:, None]
    weights = scores.masked_fill(future.to(q.device), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Write k and v into the cache and attend, row by row and token by token. Returns [T, Hq, D].

    Shapes: q [T, Hq, D]; k, v [T, Hk, D]; kv_cache [2, num_blocks, Hk, block_size, D]; block_tables [R, blocks].
    """
    block_size, out, start = kv_cache.shape[3], torch.empty_like(q), 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for index in range(query_len):
            position = seq_len - query_len + index
            block = int(block_tables[row, position // block_size])
            kv_cache[0, block, :, position % block_size] = k[start + index]
            kv_cache[1, block, :, position % block_size] = v[start + index]
        blocks = block_tables[row].long()
        keys, values = (side[blocks].transpose(1, 2).flatten(0, 1)[:seq_len] for side in kv_cache)
        out[start : start + query_len] = attention(q[start : start + query_len], keys, values, scale)
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
