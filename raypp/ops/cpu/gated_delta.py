"""The gated delta net in plain torch: the CPU's, and what kernels are compared with. See `raypp.ops.row_state`.

    decode rows   together: checkpoint and ring up to the first token, then a triangular system of the step's 1 + K
    prefill rows  one by one, in pieces of up to 64 tokens: each a triangular system, then one update of the state

Everything is computed in float32, or float64 if states are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.attention import AttentionBatch
from raypp.ops.break_point import break_point
from raypp.ops.row_state import DeltaHeads, LayerState, RowSpans

_PIECE = 64
"""Tokens of a triangular system, as fla-core has them: its size grows with their square."""
_NORM_EPS = 1e-6
"""Of the length of queries and keys; transformers 5.17 has it in `l2norm`."""


class Inputs(NamedTuple):
    """What the projections gave of rows with n tokens each."""

    mixed: torch.Tensor  # [R, n, C], of the convolution
    log_decays: torch.Tensor  # [R, n, Hv]
    betas: torch.Tensor  # [R, n, Hv]


class Entries(NamedTuple):
    """What tokens add to a state. R rows, n tokens."""

    keys: torch.Tensor  # [R, n, Hv, Dk]
    values: torch.Tensor  # [R, n, Hv, Dv] u
    log_decays: torch.Tensor  # [R, n, Hv]


class Tokens(NamedTuple):
    """The inputs of the recurrence."""

    queries: torch.Tensor  # [R, n, Hv, Dk]
    keys: torch.Tensor  # [R, n, Hv, Dk]
    values: torch.Tensor  # [R, n, Hv, Dv]
    log_decays: torch.Tensor  # [R, n, Hv]
    betas: torch.Tensor  # [R, n, Hv]


class TorchGatedDelta:
    """A layer's convolution, recurrence and gated norm; see `raypp.ops.backend.GatedDelta`."""

    def __init__(self, heads: DeltaHeads) -> None:
        self._heads = heads

    def __call__(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        state: LayerState,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        of_gates, _ = projected
        if out is None:
            out = of_gates.new_empty(len(of_gates), self._heads.shape.num_v_heads * self._heads.shape.v_dim)
        _run(projected, self._heads, state, batch, out)
        return out


@break_point
def _run(
    projected: tuple[torch.Tensor, torch.Tensor],
    heads: DeltaHeads,
    state: LayerState,
    batch: AttentionBatch,
    out: torch.Tensor,
) -> None:
    spans, shape, num_tokens = batch.spans, heads.shape, batch.num_tokens
    assert spans is not None, "the step says nothing of its rows"
    mixed, gates = projected[0][:num_tokens].split_with_sizes((shape.conv_dim, out.shape[1]), 1)
    numbers = projected[1][:num_tokens].to(torch.promote_types(state.states.dtype, torch.float32))
    betas, log_decays = _gates(numbers, heads)
    num_decode, query_len = batch.num_decode_rows, batch.decode_query_len
    outputs = out.new_empty(num_tokens, shape.num_v_heads, shape.v_dim)
    if num_decode:
        count = num_decode * query_len
        inputs = Inputs(*(x[:count].unflatten(0, (num_decode, query_len)) for x in (mixed, log_decays, betas)))
        outputs[:count] = _decode(inputs, heads, state, spans).flatten(0, 1)
    begin = num_decode * query_len
    for index, (length, end) in enumerate(
        zip(batch.prefill_query_lens, batch.prefill_seq_lens, strict=True), num_decode
    ):
        part = slice(begin, begin + length)
        inputs = Inputs(*(x[None, part] for x in (mixed, log_decays, betas)))
        outputs[part] = _prefill(inputs, heads, state, spans, index, end - length)
        begin += length
    gates = gates.unflatten(1, (shape.num_v_heads, shape.v_dim))
    normed = F.rms_norm(outputs.to(numbers.dtype), (shape.v_dim,), heads.norm_weight.to(numbers.dtype), heads.eps)
    out[:num_tokens] = (normed * F.silu(gates.to(numbers.dtype))).flatten(1).to(out.dtype)


def _gates(numbers: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """Return beta and log g, [T, Hv] each. Shapes: numbers [T, 2 Hv], b and a."""
    b, a = numbers.chunk(2, 1)
    return torch.sigmoid(b), -heads.a_log.to(a.dtype).exp() * F.softplus(a + heads.dt_bias)


def _decode(inputs: Inputs, heads: DeltaHeads, layer: LayerState, spans: RowSpans) -> torch.Tensor:
    """Return the outputs of decode rows, [R, n, Hv, Dv]."""
    num_rows, num_new = inputs.mixed.shape[:2]
    rows, starts, kept = spans.rows[:num_rows], spans.starts[:num_rows].long(), spans.kept[:num_rows].long()
    _move_checkpoints(layer, heads, spans, num_rows)
    positions = starts[:, None] + torch.arange(num_new, device=rows.device)
    tokens = _tokens(inputs, _with_past(inputs.mixed, layer, heads, rows, starts), heads)
    _write(layer.inputs, rows, positions, inputs.mixed)
    before = _read(layer, heads, rows, kept, starts, int((starts - kept).max()))
    outputs, entries = _recur(_states(layer, rows, kept > 0), before, tokens)
    _keep(layer, heads, rows, positions, entries)
    return outputs


def _prefill(
    inputs: Inputs, heads: DeltaHeads, layer: LayerState, spans: RowSpans, index: int, start: int
) -> torch.Tensor:
    """Return the outputs of one row's chunk, [n, Hv, Dv].

    Args:
        inputs: Of the chunk; R is 1.
        heads: Of the layer.
        layer: Its states.
        spans: Of the step.
        index: Of the row in the step.
        start: The chunk's first position.
    """
    num_new, device = inputs.mixed.shape[1], inputs.mixed.device
    end, rows = start + num_new, spans.rows[index : index + 1]
    held, kept = int(spans.held[index]), int(spans.kept[index])

    def at(position: int) -> torch.Tensor:
        return torch.tensor([position], device=device)

    state = _states(layer, rows, at(held) > 0)
    tokens = _tokens(inputs, _with_past(inputs.mixed, layer, heads, rows, at(start)), heads)
    num_last = min(num_new, layer.inputs.shape[1])
    last = torch.arange(end - num_last, end, device=device)
    _write(layer.inputs, rows, last[None], inputs.mixed[:, num_new - num_last :])
    if kept <= start:
        state = _absorb(state, _read(layer, heads, rows, at(held), at(kept), kept - held))
        layer.states[rows] = state.to(layer.states.dtype)
        held = kept
    state = _absorb(state, _read(layer, heads, rows, at(held), at(start), start - held))
    nothing = _read(layer, heads, rows, at(0), at(0), 0)
    outputs, position = [], start
    while position < end:
        stop = min(end, position + _PIECE, kept if position < kept else end)
        output, entries = _recur(state, nothing, Tokens(*(x[:, position - start : stop - start] for x in tokens)))
        outputs.append(output[0])
        state = _absorb(state, entries)
        if position >= kept:  # at most a block, so that none takes the place of another
            _keep(layer, heads, rows, torch.arange(position, stop, device=device)[None], entries)
        position = stop
        if position == kept:
            layer.states[rows] = state.to(layer.states.dtype)
    return torch.cat(outputs)


def scan_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_decays: torch.Tensor,
    betas: torch.Tensor,
    states: torch.Tensor,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of rows' tokens, one row after the other, [n, Hv, Dv], and the states after them.

    Shapes: queries and keys [n, Hk, Dk], of any length; values [n, Hv, Dv]; log_decays and betas [n, Hv]; states
    [S, Hv, Dk, Dv]; lengths [S], whose sum is n. In the states' type.
    """
    dtype, ratio = states.dtype, values.shape[1] // keys.shape[1]
    queries, keys = (_unit(x.to(dtype)).repeat_interleave(ratio, 1) for x in (queries, keys))
    tokens = Tokens(queries * keys.shape[2] ** -0.5, keys, values.to(dtype), log_decays.to(dtype), betas.to(dtype))
    nothing = Entries(*(x[None, :0] for x in (tokens.keys, tokens.values, tokens.log_decays)))
    outputs, ended, begin = [], [], 0
    for state, length in zip(states.split(1), lengths, strict=True):
        for first in range(begin, begin + length, _PIECE):
            piece = slice(first, min(first + _PIECE, begin + length))
            output, entries = _recur(state, nothing, Tokens(*(x[None, piece] for x in tokens)))
            outputs.append(output[0])
            state = _absorb(state, entries)
        ended.append(state)
        begin += length
    return torch.cat(outputs), torch.cat(ended)


def _move_checkpoints(layer: LayerState, heads: DeltaHeads, spans: RowSpans, num_rows: int) -> None:
    """Bring the states of decode rows to where the step keeps them."""
    held, kept = spans.held[:num_rows].long(), spans.kept[:num_rows].long()
    behind = (kept > held).nonzero().flatten()
    if not len(behind):
        return
    rows, held, kept = (x.index_select(0, behind) for x in (spans.rows[:num_rows], held, kept))
    entries = _read(layer, heads, rows, held, kept, int((kept - held).max()))
    moved = _absorb(_states(layer, rows, held > 0), entries)
    layer.states[rows] = moved.to(layer.states.dtype)


def _states(layer: LayerState, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the states of rows, [R, Hv, Dk, Dv], zeros where there is no checkpoint. Shapes: counts [R] bool."""
    states = layer.states.index_select(0, rows).to(torch.promote_types(layer.states.dtype, torch.float32))
    return states.masked_fill_(~counts[:, None, None, None], 0)


def _read(
    layer: LayerState, heads: DeltaHeads, rows: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, most: int
) -> Entries:
    """Return the entries of positions [begins, ends) of rows, padded to `most` by entries that change nothing."""
    positions = begins[:, None] + torch.arange(most, device=rows.device)
    is_one = positions < ends[:, None]
    places = positions % layer.keys.shape[1]
    dtype = torch.promote_types(layer.states.dtype, torch.float32)
    keys, values, log_decays = (x[rows[:, None], places] for x in (layer.keys, layer.values, layer.log_decays))
    keys = _by_value_head(keys.to(dtype), heads).masked_fill(~is_one[:, :, None, None], 0)
    values = values.to(dtype).masked_fill(~is_one[:, :, None, None], 0)
    return Entries(keys, values, log_decays.to(dtype).masked_fill(~is_one[:, :, None], 0))


def _keep(layer: LayerState, heads: DeltaHeads, rows: torch.Tensor, positions: torch.Tensor, entries: Entries) -> None:
    """Write entries to the rings. Shapes: positions [R, n] int64."""
    step = heads.shape.num_v_heads // heads.shape.num_k_heads
    rings = (layer.keys, layer.values, layer.log_decays)
    for ring, values in zip(rings, (entries.keys[:, :, ::step], *entries[1:]), strict=True):
        _write(ring, rows, positions, values)


def _write(ring: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    ring[rows[:, None], positions % ring.shape[1]] = values.to(ring.dtype)


def _with_past(
    mixed: torch.Tensor, layer: LayerState, heads: DeltaHeads, rows: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Return the inputs of the convolution with those that its first token sees, [R, kernel size - 1 + n, C]."""
    past = starts[:, None] - torch.arange(heads.shape.kernel_size - 1, 0, -1, device=rows.device)
    seen = layer.inputs[rows[:, None], past % layer.inputs.shape[1]].masked_fill((past < 0)[:, :, None], 0)
    return torch.cat((seen.to(mixed.dtype), mixed), 1)


def _tokens(inputs: Inputs, with_past: torch.Tensor, heads: DeltaHeads) -> Tokens:
    """Return queries, keys and values of what the convolution gives; the first two get length one.

    Shapes: with_past [R, kernel size - 1 + n, C].
    """
    shape, dtype, num_new = heads.shape, inputs.log_decays.dtype, inputs.mixed.shape[1]
    weight = heads.conv_weight.to(dtype)
    convolved = torch.zeros_like(inputs.mixed, dtype=dtype)
    for tap in range(shape.kernel_size):
        convolved += with_past[:, tap : tap + num_new] * weight[:, tap]
    convolved = F.silu(convolved).to(inputs.mixed.dtype).to(dtype)
    widths = (shape.num_k_heads * shape.k_dim,) * 2 + (shape.num_v_heads * shape.v_dim,)
    queries, keys, values = convolved.split_with_sizes(widths, 2)
    queries, keys = (_by_value_head(_unit(x.unflatten(2, (-1, shape.k_dim))), heads) for x in (queries, keys))
    values = values.unflatten(2, (-1, shape.v_dim))
    return Tokens(queries * shape.k_dim**-0.5, keys, values, inputs.log_decays, inputs.betas)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _by_value_head(x: torch.Tensor, heads: DeltaHeads) -> torch.Tensor:
    """Return queries or keys once per value head, [R, n, Hv, Dk]."""
    return x.repeat_interleave(heads.shape.num_v_heads // heads.shape.num_k_heads, 2)


def _recur(state: torch.Tensor, before: Entries, tokens: Tokens) -> tuple[torch.Tensor, Entries]:
    """Return the outputs of n tokens, [R, n, Hv, Dv], and what they add to the state.

    Shapes: state [R, Hv, Dk, Dv], of the tokens before those of `before`.
    """
    queries, keys, values, betas = (x.transpose(1, 2) for x in (*tokens[:3], tokens.betas))  # [R, Hv, n, ...]
    gone = tokens.log_decays.transpose(1, 2).cumsum(2)  # [R, Hv, n] since the first of the step, its own included
    old_keys, old_values = before.keys.transpose(1, 2), before.values.transpose(1, 2)
    of_old = before.log_decays.transpose(1, 2)
    left = of_old.flip(2).cumsum(2).flip(2)
    whole = left[:, :, :1].exp() if left.shape[2] else torch.ones_like(gone[:, :, :1])
    rest = (left - of_old).exp()  # of an entry, up to the first token

    def known(x: torch.Tensor) -> torch.Tensor:
        """Products with the state before the first token."""
        products = whole.unsqueeze(3) * (x @ state)
        return products + ((x @ old_keys.transpose(2, 3)) * rest.unsqueeze(2)) @ old_values

    decays = (gone.unsqueeze(3) - gone.unsqueeze(2)).tril().exp().tril()
    since = gone.exp().unsqueeze(3)
    beta = betas.unsqueeze(3)
    system = (beta * (keys @ keys.transpose(2, 3)) * decays).tril(-1)
    right = beta * (values - since * known(keys))
    added = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    outputs = since * known(queries) + ((queries @ keys.transpose(2, 3)) * decays) @ added
    return outputs.transpose(1, 2), Entries(tokens.keys, added.transpose(1, 2), tokens.log_decays)


def _absorb(state: torch.Tensor, entries: Entries) -> torch.Tensor:
    """Return the state after the entries' tokens. Shapes: state [R, Hv, Dk, Dv]."""
    if not entries.keys.shape[1]:
        return state
    decays = entries.log_decays.transpose(1, 2)  # [R, Hv, n]
    left = decays.flip(2).cumsum(2).flip(2)
    keys = entries.keys.transpose(1, 2) * (left - decays).exp().unsqueeze(3)
    return state * left[:, :, 0].exp()[:, :, None, None] + keys.transpose(2, 3) @ entries.values.transpose(1, 2)
