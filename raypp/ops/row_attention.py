"""Attention of one prefill row in plain torch, on any device: which tokens go together, what they see, the products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.attention import Heads, Span

_SCORES_BYTES = 32 << 20
"""Scores of a piece of a chunk, where torch's own attention cannot compute them; else its mask."""
_LEAST_PIECE = 128  # queries of a chunk that are attended to at once, with a window


class RowPiece(NamedTuple):
    """Queries of a row that are attended to at once, and the positions that they see."""

    begin: int  # of the row's queries
    end: int
    first: int  # position of the first key
    last: int  # one past that of the last key
    sees_ahead: bool = False  # whether all queries see all keys up to the last; else none sees keys behind itself


def row_pieces(
    query_len: int, seq_len: int, heads: Heads, block_size: int = 1, spans: Sequence[Span] | None = None
) -> Iterator[RowPiece]:
    """Cut a row's queries into pieces: one, unless there is a window, a span, or much memory of scores or a mask.

    Args:
        query_len: Tokens of this step, the row's last.
        seq_len: All tokens of the row.
        heads: The layer's.
        block_size: First keys are multiples of it.
        spans: See `AttentionBatch.prefill_spans`. None: the step has none.
    """
    num_before, size, num_keys = seq_len - query_len, query_len, seq_len
    if heads.window is not None:
        size = max(heads.window, _LEAST_PIECE)
        num_keys = min(seq_len, heads.window + size)
    # Where there is a mask, torch may compute all scores at once, too; on GPUs such rows are those of steps with spans.
    if spans is not None or not _has_own_kernel(heads):
        size = min(size, max(1, _SCORES_BYTES // (heads.num_heads * num_keys * 4)))
    elif num_before:
        size = min(size, max(1, _SCORES_BYTES // (num_keys * 4)))
    for start, stop, sees_ahead in _parts(query_len, spans or ()):
        for begin in range(start, stop, size):
            end = min(stop, begin + size)
            first = 0 if heads.window is None else max(0, num_before + begin + 1 - heads.window)
            last = num_before + (stop if sees_ahead else end)
            yield RowPiece(begin, end, first // block_size * block_size, last, sees_ahead)


def _parts(query_len: int, spans: Sequence[Span]) -> Iterator[tuple[int, int, bool]]:
    """Cut a row's queries into spans and what is between them."""
    at = 0
    for begin, end in spans:
        if at < begin:
            yield at, begin, False
        yield begin, end, True
        at = end
    if at < query_len:
        yield at, query_len, False


def piece_mask(
    piece: RowPiece, num_before: int, heads: Heads, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return what each query of a piece sees of its keys, [queries, keys], 0 or -inf.

    None: all of them if the piece sees ahead, else those up to itself.

    Args:
        piece: Of a row.
        num_before: Tokens of the row before its first query.
        heads: The layer's.
        dtype: Of queries.
        device: Of the mask.
    """
    first_query, end, window = num_before + piece.begin, num_before + piece.end, heads.window
    has_own_kernel = _has_own_kernel(heads)
    is_whole = piece.sees_ahead or first_query == piece.first
    if is_whole and has_own_kernel and (window is None or end - piece.first <= window):
        return None
    keys = torch.arange(piece.first, piece.last, device=device)
    queries = keys[first_query - piece.first : end - piece.first].unsqueeze(1)
    allowed = keys <= queries if not piece.sees_ahead else keys >= 0
    if window is not None:
        allowed = allowed & (keys > queries - window)
    allowed = allowed.expand(len(queries), -1)
    return additive_mask(allowed, dtype if has_own_kernel else torch.promote_types(dtype, torch.float32))


def additive_mask(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where something is allowed, else -inf. Shapes: allowed [...] bool."""
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, -torch.inf)


def attend_piece(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    heads: Heads,
    scale: float,
    *,
    sees_ahead: bool = False,
) -> torch.Tensor:
    """Return the output of a piece's queries, [Q, Hq, Dv].

    Shapes: q [Q, Hq, Dk]; keys [Hk, L, Dk]; values [Hk, L, Dv]; mask [Q, L], see `piece_mask`.
    """
    if not _has_own_kernel(heads):
        assert mask is not None
        return _attend_by_parts(q, keys, values, mask, heads, scale)
    return (
        F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys.to(q.dtype).unsqueeze(0),
            values.to(q.dtype).unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None and not sees_ahead,
            scale=scale,
            enable_gqa=heads.num_heads != heads.num_kv_heads,
        )
        .squeeze(0)
        .transpose(0, 1)
    )


def capped(products: torch.Tensor, soft_cap: float, scale: float) -> torch.Tensor:
    """Return soft_cap * tanh(products * scale / soft_cap), in place."""
    return products.mul_(scale / soft_cap).tanh_().mul_(soft_cap)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the weights of scores [n, m, L] in a softmax that also has sinks [n, m]; these have no values."""
    with_sinks = torch.cat((scores, sinks.to(scores.dtype).unsqueeze(2)), 2)
    return with_sinks.softmax(-1)[:, :, :-1]


def _has_own_kernel(heads: Heads) -> bool:
    """Whether torch's own attention computes it: it knows no soft caps, no sinks, and on CPUs no values of other sizes.

    For these it would repeat keys and values for all heads, and hold all scores at once.
    """
    return heads.soft_cap is None and heads.sinks is None and heads.head_dim == heads.value_dim


def _attend_by_parts(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, heads: Heads, scale: float
) -> torch.Tensor:
    num_queries, num_kv_heads, dtype = len(q), heads.num_kv_heads, mask.dtype
    queries = q.view(num_queries, num_kv_heads, -1, heads.head_dim).permute(1, 2, 0, 3).to(dtype)
    queries = queries.reshape(num_kv_heads, -1, heads.head_dim)
    scores = torch.bmm(queries, keys.to(dtype).transpose(1, 2))
    scores = scores.mul_(scale) if heads.soft_cap is None else capped(scores, heads.soft_cap, scale)
    scores.view(num_kv_heads, -1, num_queries, scores.shape[-1]).add_(mask)
    if heads.sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = softmax_with_sinks(scores, heads.sinks.repeat_interleave(num_queries).view(num_kv_heads, -1))
    out = torch.bmm(weights, values.to(dtype)).view(num_kv_heads, -1, num_queries, heads.value_dim)
    return out.permute(2, 0, 1, 3).reshape(num_queries, heads.num_heads, heads.value_dim).to(q.dtype)
