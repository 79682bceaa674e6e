"""The gated delta net on a GPU: convolution, replay of a row's ring, and for prompts the scan of a library.

    all tokens      convolution, by tokens and channels                          one Triton launch
    all rows        checkpoints moved; of decode rows the 1 + K tokens, too      one launch, by heads, parts of values
    prompts         from the chunk's start to where its checkpoint will stand    fla-core's chunked scan, else torch's
                    from there to the chunk's end, at most a block of tokens     the second launch again
    all tokens      norm and gate                                                one launch

Steps of decode rows alone have no scan: they wait for nothing, and a graph can hold them. Twin:
`raypp.ops.cpu.torch_gated_delta`. Sources: `raypp.ops.row_state`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

from raypp.errors import install
from raypp.ops.attention import AttentionBatch
from raypp.ops.break_point import break_point
from raypp.ops.cuda.kernel_launch import Device, start
from raypp.ops.delta_rule import scan_rows
from raypp.ops.host_to_device import to_device_together
from raypp.ops.row_state import DeltaHeads, LayerState, RowSpans

_LOG = logging.getLogger(__name__)
_CONV_TOKENS = 4
_CONV_CHANNELS = 256
_LEAST_WINDOW = 16
_NORM_HEADS = 4
_PART = 32  # of a head's values: a program keeps a state of [Dk, 32] in registers
_CHUNK = 64  # tokens of a chunk of the library's scan


@dataclass(frozen=True, eq=False)
class ScanPlan:
    """The tokens of prompts up to where their rows' checkpoints will stand, for all layers. S rows, n tokens."""

    rows: torch.Tensor  # [S] int64, of the tables
    tokens: torch.Tensor  # [n] int64, of the step
    starts: torch.Tensor  # [S + 1] int64, where each row's tokens begin among these
    chunks: torch.Tensor  # [.., 2] int64: of each of the library's chunks its row, and its number in the row
    lengths: tuple[int, ...]  # [S]


def plan_scan(batch: AttentionBatch, block_size: int, device: torch.device) -> ScanPlan | None:
    """Return what is scanned of a step's prompts; None: nothing. Waits for nothing."""
    begin = batch.num_decode_rows * batch.decode_query_len
    rows, tokens, lengths = [], [], []
    lens = zip(batch.prefill_query_lens, batch.prefill_seq_lens, strict=True)
    for row, (length, end) in enumerate(lens, batch.num_decode_rows):
        num_scanned = (end - 1) // block_size * block_size - (end - length)
        if num_scanned > 0:
            rows.append(row)
            tokens.append(np.arange(begin, begin + num_scanned))
            lengths.append(num_scanned)
        begin += length
    if not rows or batch.spans is None:
        return None
    counts = [-(-length // _CHUNK) for length in lengths]
    numbers = [np.arange(count) for count in counts]
    chunks = np.stack((np.repeat(np.arange(len(rows)), counts), np.concatenate(numbers)), 1)
    on_host = (np.array(rows), np.concatenate(tokens), np.cumsum([0, *lengths]), chunks)
    indices, of_tokens, starts, of_chunks = to_device_together([part.astype(np.int64) for part in on_host], device)
    return ScanPlan(batch.spans.rows.index_select(0, indices), of_tokens, starts, of_chunks, tuple(lengths))


class CudaGatedDelta:
    """One layer; see `raypp.ops.backend.GatedDelta`.

    Args:
        heads: The layer's.
        block_size: Of the KV cache: tokens between two checkpoints.
        device: Where it runs.
    """

    def __init__(self, heads: DeltaHeads, *, block_size: int, device: Device) -> None:
        shape = heads.shape
        self._heads = heads
        self._block_size = block_size
        self._device = device
        self._widths = (shape.num_k_heads * shape.k_dim,) * 2 + (shape.num_v_heads * shape.v_dim,)
        self._conv_weight = heads.conv_weight.t().contiguous()  # [kernel size, C]: neighbours are read together
        self._scan = choose_scan(device)

    def __call__(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        state: LayerState,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = projected[0].new_empty(len(projected[0]), self._widths[2])
        self._run(projected, state, batch, out)
        return out

    @break_point
    def _run(
        self, projected: tuple[torch.Tensor, torch.Tensor], state: LayerState, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        spans, num_decode, num_tokens = batch.spans, batch.num_decode_rows, batch.num_tokens
        assert spans is not None, "the step says nothing of its rows"
        convolved = self._convolve(projected[0], state, spans, num_tokens)
        tensors = (*projected, convolved, out, state)
        self._replay(*tensors, spans, num_decode, batch.decode_query_len, is_end=False)
        if batch.prefill_query_lens:
            plan = batch.plans.get(ScanPlan)
            if isinstance(plan, ScanPlan):
                self._scan_prompts(projected[1], convolved, out, state, plan)
            self._replay(*tensors, spans, num_decode, 1, is_end=True)
        self._gate(projected[0], out, num_tokens)

    def _gate(self, x: torch.Tensor, out: torch.Tensor, num_tokens: int) -> None:
        """Normalize each head's output and multiply it by silu of its gate, in place."""
        shape = self._heads.shape
        _gated_norm[(num_tokens, triton.cdiv(shape.num_v_heads, _NORM_HEADS))](
            out,
            x,
            self._heads.norm_weight,
            self._heads.eps,
            X_STRIDE=x.shape[1],
            WIDTH=sum(self._widths),
            V_HEADS=shape.num_v_heads,
            V_DIM=shape.v_dim,
            BLOCK_V=triton.next_power_of_2(shape.v_dim),
            HEADS=_NORM_HEADS,
            OVERLAPS=self._device.has_dependent_launch,
            **self._device.launch_options,
        )

    def _convolve(
        self, x: torch.Tensor, state: LayerState, spans: RowSpans, num_tokens: int
    ) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values after the convolution, each [T, width]."""
        width = sum(self._widths)
        made = tuple(x.new_empty(num_tokens, each) for each in self._widths)
        _convolve[(triton.cdiv(num_tokens, _CONV_TOKENS), triton.cdiv(width, _CONV_CHANNELS))](
            x,
            self._conv_weight,
            state.inputs,
            spans.rows,
            spans.starts,
            spans.query_start_loc,
            spans.token_rows,
            *made,
            num_tokens,
            X_STRIDE=x.shape[1],
            WIDTH=width,
            KEYS=self._widths[0],
            NUM_INPUTS=state.inputs.shape[1],
            KERNEL_SIZE=self._heads.shape.kernel_size,
            TOKENS=_CONV_TOKENS,
            CHANNELS=_CONV_CHANNELS,
            OVERLAPS=self._device.has_dependent_launch,
            **self._device.launch_options,
        )
        return made

    def _replay(
        self,
        x: torch.Tensor,
        numbers: torch.Tensor,
        convolved: Sequence[torch.Tensor],
        out: torch.Tensor,
        state: LayerState,
        spans: RowSpans,
        num_decode: int,
        query_len: int,
        *,
        is_end: bool,
    ) -> None:
        """Move the checkpoints of all rows, and compute the decode rows; or compute the ends of prompts' chunks."""
        heads, shape, num_rows = self._heads, self._heads.shape, len(spans.rows)
        # From a checkpoint to a step's last token: registers that a step without drafts does not need cost a tenth.
        window = max(_LEAST_WINDOW, triton.next_power_of_2(self._block_size + query_len - 1))
        part = min(_PART, triton.next_power_of_2(shape.v_dim))
        grid = (num_rows - num_decode if is_end else num_rows, shape.num_v_heads, triton.cdiv(shape.v_dim, part))
        _replay[grid](
            x,
            numbers,
            *convolved,
            heads.a_log,
            heads.dt_bias,
            shape.k_dim**-0.5,
            spans.rows,
            spans.starts,
            spans.query_start_loc,
            spans.held,
            spans.kept,
            num_decode,
            *state,
            out,
            X_STRIDE=x.shape[1],
            WIDTH=sum(self._widths),
            K_HEADS=shape.num_k_heads,
            V_HEADS=shape.num_v_heads,
            K_DIM=shape.k_dim,
            V_DIM=shape.v_dim,
            RING=state.keys.shape[1],
            NUM_INPUTS=state.inputs.shape[1],
            WINDOW=window,
            BLOCK_K=triton.next_power_of_2(shape.k_dim),
            PART=part,
            IS_END=is_end,
            OVERLAPS=self._device.has_dependent_launch,
            **self._device.launch_options,
        )

    def _scan_prompts(
        self,
        numbers: torch.Tensor,
        convolved: Sequence[torch.Tensor],
        out: torch.Tensor,
        state: LayerState,
        plan: ScanPlan,
    ) -> None:
        """Compute prompts up to where their checkpoints will stand, and move these there."""
        shape, heads, tokens = self._heads.shape, self._heads, plan.tokens
        queries, keys, values = (part.index_select(0, tokens) for part in convolved)
        b, a = numbers.index_select(0, tokens).float().chunk(2, 1)
        log_decays = -heads.a_log.exp() * F.softplus(a + heads.dt_bias)
        outputs, ended = self._scan(
            queries.unflatten(1, (shape.num_k_heads, shape.k_dim)),
            keys.unflatten(1, (shape.num_k_heads, shape.k_dim)),
            values.unflatten(1, (shape.num_v_heads, shape.v_dim)),
            log_decays,
            torch.sigmoid(b),
            state.states.index_select(0, plan.rows).float(),
            plan,
        )
        state.states.index_copy_(0, plan.rows, ended.to(state.states.dtype))
        out.index_copy_(0, tokens, outputs.flatten(1).to(out.dtype))


Scan = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""As `raypp.ops.delta_rule.scan_rows`, with a `ScanPlan` in the place of lengths."""


@cache
def choose_scan(device: Device) -> Scan:
    """Return the scan of a library if it is installed, else torch's, which takes many times as long."""
    if device.is_interpreter:
        return _scan_by_torch
    if find_spec("fla") is None:
        _LOG.warning(
            "fla-core is not installed (%s): prompts go through gated delta nets in plain torch", install("gpu")
        )
        return _scan_by_torch
    return _scan_by_library


def _scan_by_torch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_decays: torch.Tensor,
    betas: torch.Tensor,
    states: torch.Tensor,
    plan: ScanPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    return scan_rows(queries, keys, values, log_decays, betas, states, plan.lengths)


def _scan_by_library(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_decays: torch.Tensor,
    betas: torch.Tensor,
    states: torch.Tensor,
    plan: ScanPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    outputs, ended = chunk_gated_delta_rule(
        *(part.contiguous()[None] for part in (queries, keys, values, log_decays, betas)),
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=plan.starts,
        chunk_indices=plan.chunks,
    )
    return outputs[0], ended


@triton.jit
def _convolve(
    x,
    weight,
    inputs,
    rows,
    starts,
    query_start_loc,
    token_rows,
    queries,
    keys,
    values,
    num_tokens,
    X_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    KERNEL_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_one, in_x = token < num_tokens, channel < WIDTH
    start(OVERLAPS)
    index = tl.load(token_rows + token, mask=is_one, other=0)
    row = tl.load(rows + index, mask=is_one, other=0).to(tl.int64)
    offset = token - tl.load(query_start_loc + index, mask=is_one, other=0)
    position = tl.load(starts + index, mask=is_one, other=0) + offset
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(KERNEL_SIZE):
        back = KERNEL_SIZE - 1 - tap
        is_new = is_one & (offset >= back)
        is_old = is_one & (offset < back) & (position >= back)
        cell = x + (token - back).to(tl.int64)[:, None] * X_STRIDE + channel[None, :]
        new = tl.load(cell, mask=is_new[:, None] & in_x[None, :], other=0.0)
        place = row * NUM_INPUTS + tl.where(is_old, position - back, 0) % NUM_INPUTS
        old = tl.load(
            inputs + place[:, None] * WIDTH + channel[None, :], mask=is_old[:, None] & in_x[None, :], other=0.0
        )
        factor = tl.load(weight + tap * WIDTH + channel, mask=in_x, other=0.0).to(tl.float32)
        total += (new.to(tl.float32) + old.to(tl.float32)) * factor[None, :]
    y = (total * tl.sigmoid(total)).to(queries.dtype.element_ty)
    VALUES: tl.constexpr = WIDTH - 2 * KEYS
    of_keys = token.to(tl.int64)[:, None] * KEYS + channel[None, :]
    of_values = token.to(tl.int64)[:, None] * VALUES + channel[None, :] - 2 * KEYS
    inside = is_one[:, None] & in_x[None, :]
    is_query, is_value = channel[None, :] < KEYS, channel[None, :] >= 2 * KEYS
    tl.store(queries + of_keys, y, mask=inside & is_query)
    tl.store(keys + of_keys - KEYS, y, mask=inside & (channel[None, :] >= KEYS) & (channel[None, :] < 2 * KEYS))
    tl.store(values + of_values, y, mask=inside & is_value)


@triton.jit
def _gated_norm(
    out,
    x,
    norm_weight,
    eps,
    X_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK_V)[None, :]
    inside, cell = (head < V_HEADS) & (column < V_DIM), head * V_DIM + column
    weight = tl.load(norm_weight + column, mask=column < V_DIM, other=0.0).to(tl.float32)
    start(OVERLAPS)
    value = tl.load(out + token * (V_HEADS * V_DIM) + cell, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + token * X_STRIDE + WIDTH + cell, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / V_DIM + eps)
    y = value * scale[:, None] * weight * gate * tl.sigmoid(gate)
    tl.store(out + token * (V_HEADS * V_DIM) + cell, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _entries(
    rings,
    row,
    first,
    end,
    head,
    of_v,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    RING: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return keys, values at `of_v` and decays of the positions [first, end) of a row, float32, then zeros."""
    ring_keys, ring_values, ring_decays = rings
    entry, of_k = tl.arange(0, WINDOW), tl.arange(0, BLOCK_K)
    is_one = first + entry < end
    place = row * RING + (first + entry) % RING
    key_cell = ring_keys + (place[:, None] * K_HEADS + head // (V_HEADS // K_HEADS)) * K_DIM + of_k[None, :]
    key = tl.load(key_cell, mask=is_one[:, None] & (of_k < K_DIM)[None, :], other=0.0).to(tl.float32)
    value_cell = ring_values + (place[:, None] * V_HEADS + head) * V_DIM + of_v[None, :]
    value = tl.load(value_cell, mask=is_one[:, None] & (of_v < V_DIM)[None, :], other=0.0).to(tl.float32)
    return key, value, tl.load(ring_decays + place * V_HEADS + head, mask=is_one, other=0.0)


@triton.jit
def _replay(
    x,
    numbers,
    queries,
    keys,
    values,
    a_log,
    dt_bias,
    scale,
    rows,
    starts,
    query_start_loc,
    held,
    kept,
    num_decode,
    states,
    ring_keys,
    ring_values,
    ring_decays,
    inputs,
    out,
    X_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    RING: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    IS_END: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    RATIO: tl.constexpr = V_HEADS // K_HEADS
    ABSORBED: tl.constexpr = 16  # entries at a time: registers do not hold more beside the state
    KEYS: tl.constexpr = K_HEADS * K_DIM
    index, head = tl.program_id(0), tl.program_id(1)
    key_head = head // RATIO
    of_k, of_v = tl.arange(0, BLOCK_K), tl.program_id(2) * PART + tl.arange(0, PART)
    entry, is_first_part = tl.arange(0, WINDOW), tl.program_id(2) == 0
    in_k, in_v = of_k < K_DIM, of_v < V_DIM
    in_state = in_k[:, None] & in_v[None, :]
    fall = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    rings = ring_keys, ring_values, ring_decays
    start(OVERLAPS)
    if IS_END:
        index += num_decode
    row = tl.load(rows + index).to(tl.int64)
    first = tl.load(starts + index)
    begin = tl.load(query_start_loc + index)
    count = tl.load(query_start_loc + index + 1) - begin
    end, target = first + count, tl.load(kept + index)
    if IS_END:  # the rest of a chunk
        at, before = target, target
        begin += tl.maximum(target - first, 0)
        first = tl.maximum(target, first)
        count = end - first
    else:
        before, at = tl.load(held + index), tl.minimum(target, first)
        # What the convolution of later steps sees. No two programs write different things.
        for back in range(tl.minimum(count, NUM_INPUTS)):
            written = end - 1 - back
            taken = x + (begin + count - 1 - back).to(tl.int64) * X_STRIDE
            input_cell = inputs + (row * NUM_INPUTS + tl.maximum(written, 0) % NUM_INPUTS) * WIDTH
            is_kept = written >= first
            seen = tl.load(taken + 2 * KEYS + head * V_DIM + of_v, mask=in_v & is_kept, other=0.0)
            tl.store(input_cell + 2 * KEYS + head * V_DIM + of_v, seen, mask=in_v & is_kept)
            if (head % RATIO == 0) & is_first_part:
                for side in tl.static_range(2):
                    column = side * KEYS + key_head * K_DIM + of_k
                    seen_keys = tl.load(taken + column, mask=in_k & is_kept, other=0.0)
                    tl.store(input_cell + column, seen_keys, mask=in_k & is_kept)
        count = tl.where(index < num_decode, count, 0)
    state_cell = states + ((row * V_HEADS + head) * K_DIM + of_k[:, None]) * V_DIM + of_v[None, :]
    state = tl.load(state_cell, mask=in_state & (before > 0), other=0.0).to(tl.float32)
    if not IS_END:
        for position in range(before, at, ABSORBED):
            stop = tl.minimum(position + ABSORBED, at)
            old, added, decay = _entries(
                rings, row, position, stop, head, of_v, K_HEADS, V_HEADS, K_DIM, V_DIM, RING, ABSORBED, BLOCK_K
            )
            total = tl.sum(decay, 0)
            old *= tl.exp(total - tl.cumsum(decay, 0))[:, None]
            state = state * tl.exp(total) + tl.dot(tl.trans(old), added, input_precision="ieee")
        if (at > before) | (target > first):  # a scan goes on from there
            tl.store(state_cell, state.to(states.dtype.element_ty), mask=in_state)
    if count > 0:
        old_keys, old_values, decays = _entries(
            rings, row, at, first, head, of_v, K_HEADS, V_HEADS, K_DIM, V_DIM, RING, WINDOW, BLOCK_K
        )
        sum_of_decays = tl.sum(decays, 0)
        rest = tl.where(at + entry < first, tl.exp(sum_of_decays - tl.cumsum(decays, 0)), 0.0)
        whole = tl.exp(sum_of_decays)
        for step in range(count):
            token = (begin + step).to(tl.int64)
            query = tl.load(queries + token * KEYS + key_head * K_DIM + of_k, mask=in_k, other=0.0).to(tl.float32)
            key = tl.load(keys + token * KEYS + key_head * K_DIM + of_k, mask=in_k, other=0.0).to(tl.float32)
            value = tl.load(values + (token * V_HEADS + head) * V_DIM + of_v, mask=in_v, other=0.0).to(tl.float32)
            query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
            key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            key = key.to(ring_keys.dtype.element_ty).to(tl.float32)  # as later steps find it
            beta = tl.sigmoid(tl.load(numbers + token * (2 * V_HEADS) + head).to(tl.float32))
            a = tl.load(numbers + token * (2 * V_HEADS) + V_HEADS + head).to(tl.float32) + bias
            log_decay = fall * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            falls = tl.exp(log_decay)
            rest *= falls
            whole *= falls
            known = whole * tl.sum(state * key[:, None], 0)
            known += tl.sum((rest * tl.sum(old_keys * key[None, :], 1))[:, None] * old_values, 0)
            fresh = (beta * (value - known)).to(ring_values.dtype.element_ty).to(tl.float32)
            is_here = entry == first - at + step
            old_keys = tl.where(is_here[:, None], key[None, :], old_keys)
            old_values = tl.where(is_here[:, None], fresh[None, :], old_values)
            rest = tl.where(is_here, 1.0, rest)
            output = whole * tl.sum(state * query[:, None], 0)
            output += tl.sum((rest * tl.sum(old_keys * query[None, :], 1))[:, None] * old_values, 0)
            tl.store(out + (token * V_HEADS + head) * V_DIM + of_v, output.to(out.dtype.element_ty), mask=in_v)
            place = row * RING + (first + step) % RING
            value_now = ring_values + (place * V_HEADS + head) * V_DIM + of_v
            tl.store(value_now, fresh.to(ring_values.dtype.element_ty), mask=in_v)
            tl.store(ring_decays + place * V_HEADS + head, log_decay, mask=is_first_part)
            if (head % RATIO == 0) & is_first_part:
                key_now = ring_keys + (place * K_HEADS + key_head) * K_DIM + of_k
                tl.store(key_now, key.to(ring_keys.dtype.element_ty), mask=in_k)
