"""The gated delta net in plain torch: the CPU's, and what kernels are compared with. See `raypp.ops.row_state`.

    decode rows   together: checkpoint and ring up to the first token, then a triangular system of the step's 1 + K
    prefill rows  one by one, in pieces of up to 64 tokens: each a triangular system, then one update of the state

Everything is computed in float32, or float64 if states are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.attention import AttentionBatch
from raypp.ops.break_point import break_point
from raypp.ops.delta_rule import PIECE, Entries, Tokens, absorb, recur, unit
from raypp.ops.row_state import DeltaHeads, LayerState, RowSpans


class Inputs(NamedTuple):
    """What the projections gave of rows with n tokens each."""

    mixed: torch.Tensor  # [R, n, C], of the convolution
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
    outputs, entries = recur(_states(layer, rows, kept > 0), before, tokens)
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
        state = absorb(state, _read(layer, heads, rows, at(held), at(kept), kept - held))
        layer.states[rows] = state.to(layer.states.dtype)
        held = kept
    state = absorb(state, _read(layer, heads, rows, at(held), at(start), start - held))
    nothing = _read(layer, heads, rows, at(0), at(0), 0)
    outputs, position = [], start
    while position < end:
        stop = min(end, position + PIECE, kept if position < kept else end)
        output, entries = recur(state, nothing, Tokens(*(x[:, position - start : stop - start] for x in tokens)))
        outputs.append(output[0])
        state = absorb(state, entries)
        if position >= kept:  # at most a block, so that none takes the place of another
            _keep(layer, heads, rows, torch.arange(position, stop, device=device)[None], entries)
        position = stop
        if position == kept:
            layer.states[rows] = state.to(layer.states.dtype)
    return torch.cat(outputs)


def _move_checkpoints(layer: LayerState, heads: DeltaHeads, spans: RowSpans, num_rows: int) -> None:
    """Bring the states of decode rows to where the step keeps them."""
    held, kept = spans.held[:num_rows].long(), spans.kept[:num_rows].long()
    behind = (kept > held).nonzero().flatten()
    if not len(behind):
        return
    rows, held, kept = (x.index_select(0, behind) for x in (spans.rows[:num_rows], held, kept))
    entries = _read(layer, heads, rows, held, kept, int((kept - held).max()))
    moved = absorb(_states(layer, rows, held > 0), entries)
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
    queries, keys = (_by_value_head(unit(x.unflatten(2, (-1, shape.k_dim))), heads) for x in (queries, keys))
    values = values.unflatten(2, (-1, shape.v_dim))
    return Tokens(queries * shape.k_dim**-0.5, keys, values, inputs.log_decays, inputs.betas)


def _by_value_head(x: torch.Tensor, heads: DeltaHeads) -> torch.Tensor:
    """Return queries or keys once per value head, [R, n, Hv, Dk]."""
    return x.repeat_interleave(heads.shape.num_v_heads // heads.shape.num_k_heads, 2)
