"""Each kernel against its twin, on a GPU or, where there is none, in Triton's interpreter.

The interpreter is slow, so shapes are small there; and it knows no products of bfloat16.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference_ops as reference
import torch

from raypp.ops import vision
from raypp.ops.attention import AttentionBatch, HeadNorm, Heads, Span
from raypp.ops.backend import GELU, SILU, ExpertWeights, Gate, KernelSet, Router, Routing, choose_experts
from raypp.ops.block_store import Planes, TorchBlockMover
from raypp.ops.cpu.paged_attention import paged_attention
from raypp.ops.cpu.torch_gated_delta import TorchGatedDelta
from raypp.ops.cuda import between_products
from raypp.ops.cuda.adjust_kernel import LogitAdjuster, remember
from raypp.ops.cuda.between_products import narrow, silu_and_mul
from raypp.ops.cuda.block_kernels import KernelBlockMover
from raypp.ops.cuda.cuda_kernels import CudaKernels
from raypp.ops.cuda.decode_attention import DecodeTuning, TritonDecode
from raypp.ops.cuda.experts import ExpertCut, ExpertShape, choose_cut
from raypp.ops.cuda.gated_delta import CudaGatedDelta, ScanPlan, plan_scan
from raypp.ops.cuda.heads import append_heads, gate_heads_, gather_heads, rotate_qk_, rotation_table
from raypp.ops.cuda.invariant_attention import InvariantAttention
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.kernel_token_choice import KernelTokenChoice
from raypp.ops.cuda.product_tuning import MAX_ROWS, MAX_ROWS_IN_8_BITS, input_type_in_8_bits
from raypp.ops.cuda.projection import FEW_ROWS, HELD_INPUTS, Product, Tuning, fold_norm, project
from raypp.ops.cuda.router_kernels import Routed, arrange, most_tiles, route
from raypp.ops.cuda.row_inputs_kernel import row_inputs as row_inputs_kernel
from raypp.ops.cuda.token_quantization import TokenNorm, quantize_tokens
from raypp.ops.kv_cache import FP8, LayerCache, sides
from raypp.ops.row_inputs import NewEntries, Queries, row_inputs
from raypp.ops.row_state import Checkpoints, DeltaHeads, LayerState, allocate_layer_state
from raypp.ops.row_tokens import NO_TOKEN, RowTokens, StepTokens
from raypp.ops.sample.adjust import adjusted
from raypp.ops.sample.draw_sizes import MAX_REPORTED
from raypp.ops.sample.tables import ANY_TOKEN, AdjustedLogits, Adjustments, PositionMasks, RowTables, Widths
from raypp.ops.sample.token_choice import mask_truncated, sample, sample_greedy, top_logprobs
from raypp.ops.sample.token_history import TokenHistory
from raypp.ops.state_sizes import RowState
from raypp.ops.weight import FP4, Weight, WeightKind, quantize_rows, rounded_to_8_bits
from raypp.row_params import Needs
from raypp.specdec.table_bytes import row_tokens_width

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_GPU = DEVICE.type == "cuda"
DTYPES = [torch.bfloat16, torch.float16]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]
# One rounding, and for products the difference of two orders of summation.
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}


def sum_products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter multiply matrices input by input: a library's order depends on the shapes."""

    def product(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
        a, b = (each.astype(dtype or each.dtype) for each in (a, b))
        total = np.zeros((a.shape[0], b.shape[1]), dtype=a.dtype)
        for index in range(a.shape[1]):
            total += a[:, index : index + 1] * b[index : index + 1]
        return total

    monkeypatch.setattr(np, "matmul", product)


class Kernels:
    """What the kernels need around them, and random tensors."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, *, is_invariant: bool = False) -> None:
        self.dtype = dtype
        self.device = Device.of(DEVICE, is_invariant=is_invariant)
        self.workspace = Workspace(DEVICE)
        self.rng = random.Random(seed)
        self.generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return a random tensor."""
        return (torch.randn(shape, generator=self.generator, device=DEVICE) * scale).to(self.dtype)

    def assert_close(self, got: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
        """Compare; `scale` is the size of what was summed."""
        assert got.dtype == expected.dtype
        assert got.isfinite().all()
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(got, expected, atol=tolerance * scale, rtol=tolerance)

    def assert_errs_little_more(self, got: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> None:
        """Compare with what 32 bits give: the error may be twice torch's, at the worst place of millions four times.

        For results of many rounded products; a scan in chunks rounds more of them to 16 bits than torch's recurrence.
        """
        errors = [(each.float() - exact).abs() for each in (got, expected)]
        assert got.isfinite().all()
        of_all, torchs = (error.square().mean().sqrt().item() for error in errors)
        worst, torchs_worst = (error.max().item() for error in errors)
        floor = TOLERANCE[torch.float32]
        rounding, most = floor * exact.square().mean().sqrt().item(), floor * exact.abs().max().item()
        assert of_all <= 2 * torchs + rounding, f"an error of {of_all:.2e}, where torch's is {torchs:.2e}"
        assert worst <= 4 * torchs_worst + most, f"an error of {worst:.2e}, where torch's worst is {torchs_worst:.2e}"

    def assert_narrowed(
        self, got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 0.0
    ) -> None:
        """Compare what was handed on in 8 bits: a step of the format apart at most; `scale` as above.

        Where rounding up reaches a power of two, Triton's interpreter (3.7) returns half of it.
        """
        assert got.dtype == dtype
        info = torch.finfo(dtype)
        expected = expected.float().clamp(info.min, info.max)
        atol = 2 * info.tiny * info.eps + TOLERANCE[self.dtype] * scale
        torch.testing.assert_close(got.float(), expected, atol=atol, rtol=info.eps if IS_GPU else 0.51)


def check_norms(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    """Norm, with a weight and without, also as another type."""
    kernels = Kernels(dtype)
    x, weight = kernels.normal(num_tokens, size), kernels.normal(size)
    got = between_products.rms_norm(x, weight, 1e-5, kernels.device)
    kernels.assert_close(got, reference.rms_norm(x, weight, 1e-5), 4)
    got = between_products.rms_norm(x, None, 1e-5, kernels.device)
    kernels.assert_close(got, reference.rms_norm(x, torch.ones_like(weight), 1e-5), 4)
    got = between_products.rms_norm(x, None, 1e-5, kernels.device, torch.float16)
    assert got.dtype == torch.float16
    Kernels(torch.float16).assert_close(got, reference.rms_norm(x.float(), None, 1e-5).half())
    for narrow_type in NARROW:
        got = between_products.rms_norm(x, None, 1e-5, kernels.device, narrow_type)
        kernels.assert_narrowed(got, reference.rms_norm(x.float(), None, 1e-5), narrow_type)


def check_narrow(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    """Fewer bits, up to beyond the range, and what is no number."""
    kernels = Kernels(dtype)
    x = kernels.normal(num_tokens, size, scale=100.0)
    for narrow_type in NARROW:
        kernels.assert_narrowed(narrow(x, narrow_type, kernels.device), x, narrow_type)
    extremes = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, torch.nan], dtype=dtype, device=DEVICE)
    ends = torch.finfo(torch.float8_e4m3fn).max
    got = narrow(extremes, torch.float8_e4m3fn, kernels.device).float().tolist()
    assert got[:2] == [ends, -ends]
    assert got[2] != got[2] or not IS_GPU  # the interpreter does not know of it


def check_joined_norms(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    """Tokens and states side by side, and the product of them, which has both norms' weights in its own."""
    kernels = Kernels(dtype)
    embedding, states = kernels.normal(11, size), kernels.normal(num_tokens, size)
    token_ids = torch.randint(0, 11, (num_tokens,), device=DEVICE, dtype=torch.int32)
    sides = [reference.rms_norm(x, None, 1e-5) for x in (embedding[token_ids.long()], states)]
    joined = between_products.join_norms(embedding, token_ids, states, 1e-5, kernels.device)
    kernels.assert_close(joined, torch.cat(sides, 1), 4)
    norm_weights = kernels.normal(size), kernels.normal(size)
    weight, bias = kernels.normal(48, 2 * size, scale=size**-0.5), kernels.normal(48)
    folded = weight.clone()
    for columns, norm_weight in zip(folded.chunk(2, 1), norm_weights, strict=True):
        fold_norm(columns, norm_weight)
    kernel_set = CudaKernels(DEVICE, dtype, block_size=16, max_query_len=1, num_ring_entries=1)
    got = kernel_set.joined_norms_linear(embedding, norm_weights, 1e-5, Weight(weight.clone()), bias)(token_ids, states)
    kernels.assert_close(got, reference.linear(joined, folded, bias=bias), 4)
    reads = input_type_in_8_bits(num_tokens, is_normed=True)
    if reads is not None:
        joined = between_products.join_norms(embedding, token_ids, states, 1e-5, kernels.device, reads)
        if reads in NARROW:
            kernels.assert_narrowed(joined, torch.cat(sides, 1), reads)
        folded, scale = quantize_rows(folded)
        in_8_bits = kernel_set.in_8_bits().joined_norms_linear(embedding, norm_weights, 1e-5, Weight(weight), bias)
        expected = reference.linear(joined.to(dtype), folded, scale=scale, bias=bias)
        kernels.assert_close(in_8_bits(token_ids, states), expected, 4)


def check_gate(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    """Gate of an MLP."""
    kernels = Kernels(dtype)
    gate_up = kernels.normal(num_tokens, 2 * size)
    kernels.assert_close(silu_and_mul(gate_up, kernels.device), reference.silu_and_mul(gate_up), 2)


def check_vision_heads(dtype: torch.dtype, num_patches: int, num_heads: int, head_dim: int) -> None:
    """Rotation of queries and keys in place; values stay."""
    kernels = Kernels(dtype, seed=num_patches)
    qkv = kernels.normal(num_patches, 3, num_heads, head_dim)
    angles = kernels.normal(num_patches, head_dim // 2, scale=30.0).float()
    expected = vision.rotate_qk_(qkv.clone(), angles.cos(), angles.sin())
    values = qkv[:, 2].clone()
    assert rotate_qk_(qkv, angles.cos(), angles.sin(), kernels.device) is qkv
    kernels.assert_close(qkv, expected, 2)
    assert torch.equal(qkv[:, 2], values)


Scales = tuple[float, float]
"""Of keys and values in a cache of 8 bits."""


def made_heads(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm: HeadNorm | None = None,
    scales: Scales | None = None,
    *,
    has_sinks: bool = False,
    **settings: Any,
) -> Heads:
    """Return heads with settings of `Heads`; sinks are as large as scores, and differ."""
    sinks = torch.linspace(-2.0, 3.0, num_heads, device=DEVICE) if has_sinks else None
    return Heads(num_heads, num_kv_heads, head_dim, norm, *(scales or ()), sinks=sinks, **settings)


def of_sides(change: Callable[[torch.Tensor], torch.Tensor], cache: LayerCache) -> LayerCache:
    """Return a cache whose keys and values are changed."""
    return LayerCache(*map(change, cache))


def as_read(cache: LayerCache, scales: Scales | None) -> LayerCache:
    """Return what a cache holds, as numbers that can be computed with."""
    if scales is None:
        return cache
    return LayerCache(*(side.float() * scale for side, scale in zip(cache, scales, strict=True)))


def assert_cached(kernels: Kernels, cache: LayerCache, expected: LayerCache, scales: Scales | None) -> None:
    """Compare a cache with what was to be written; in 8 bits as `Kernels.assert_narrowed`."""
    if scales is None:
        for side, expected_side in zip(cache, expected, strict=True):
            kernels.assert_close(side, expected_side, 8)
        return
    for side, expected_side, scale in zip(cache, expected, scales, strict=True):
        kernels.assert_narrowed(side, expected_side.float() / scale, FP8, 0.01 / scale)


def check_heads(
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    scales: Scales | None = None,
    v_dim: int | None = None,
    rotary_dim: int | None = None,
    has_gate: bool = False,
    values_are_keys: bool = False,
) -> None:
    """Norm, rotation and append, at positions up to 100,000; with scales to a cache in 8 bits.

    Values that are keys have a norm, too.
    """
    kernels = Kernels(dtype, seed=num_tokens)
    norm = HeadNorm(kernels.normal(head_dim), kernels.normal(head_dim), 1e-6, values_are_keys) if has_norm else None
    others = {"rotary_dim": rotary_dim, "has_gate": has_gate, "values_are_keys": values_are_keys}
    heads = made_heads(num_heads, num_kv_heads, head_dim, norm, scales, v_dim=v_dim, **others)
    block_size, num_blocks = 16, 1 + num_tokens
    qkv = kernels.normal(num_tokens, heads.width)
    positions = torch.tensor([kernels.rng.choice((0, 1, 77, 4095, 100_000)) for _ in range(num_tokens)], device=DEVICE)
    slots = kernels.rng.sample(range(block_size, num_blocks * block_size), num_tokens)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    rotated = rotary_dim or head_dim
    frequencies = (1.0 / 10000.0 ** (torch.arange(0, rotated, 2) / rotated)).to(DEVICE)
    cache = normal_cache(kernels, num_blocks, block_size, heads)
    cache = cache if scales is None else of_sides(to_fp8, cache)
    expected_cache = of_sides(torch.clone, as_read(cache, scales))
    expected = reference.append_heads(qkv, heads, positions, frequencies, slot_mapping, expected_cache)
    by = rotation_table(positions, frequencies, kernels.device)
    got = append_heads(qkv, heads, by, slot_mapping, cache, kernels.device)
    scale = 8 if positions.max() > 10_000 else 4  # sines of large angles differ by more than a rounding
    kernels.assert_close(got, expected, scale)
    assert_cached(kernels, cache, expected_cache, scales)
    if has_gate:
        gates = qkv[:, : 2 * num_heads * head_dim].unflatten(1, (num_heads, 2, head_dim))[:, :, 1]
        gated = (got.float() * torch.sigmoid(gates.float())).to(dtype)
        gate_heads_(got, qkv, kernels.device)
        kernels.assert_close(got, gated)


def check_gated_delta(
    dtype: torch.dtype, shape: RowState, block_size: int, max_drafts: int, *, num_steps: int = 12, most_tokens: int = 40
) -> None:
    """Steps of decode rows, of which drafts are rejected, and of chunks of prompts, over memory that others left."""
    kernels = Kernels(dtype, seed=block_size + max_drafts)
    rng, num_rows = kernels.rng, 4
    heads = DeltaHeads(
        shape,
        kernels.normal(shape.conv_dim, shape.kernel_size, scale=0.5),
        kernels.normal(shape.num_v_heads).float(),
        kernels.normal(shape.num_v_heads).float(),
        kernels.normal(shape.v_dim),
        1e-6,
    )
    delta = CudaGatedDelta(heads, block_size=block_size, device=kernels.device)
    sizes = (shape, num_rows, block_size, max_drafts, dtype, DEVICE)
    left = [kernels.normal(*part.shape).to(part.dtype) for part in allocate_layer_state(*sizes, has_snapshots=True)]
    got_state, expected_state = (LayerState(*(part.clone() for part in left)) for _ in range(2))
    exact_state = LayerState(*(part.float() for part in left))
    in_32_bits = {name: getattr(heads, name).float() for name in ("conv_weight", "norm_weight")}
    exact_twin = TorchGatedDelta(replace(heads, **in_32_bits))
    twin, checkpoints = TorchGatedDelta(heads), Checkpoints(num_rows, block_size, DEVICE)
    known, prompts, lates = (
        [0] * num_rows,
        [rng.randint(1, 3 * most_tokens) for _ in range(num_rows)],
        [True] * num_rows,
    )
    for _ in range(num_steps):
        chosen = [row for row in range(num_rows) if rng.random() < 0.7] or [0]
        decoding = [row for row in chosen if known[row] >= prompts[row]]
        reading = [row for row in chosen if known[row] < prompts[row]]
        query_len = rng.randint(1, 1 + max_drafts)
        for row in decoding:
            lates[row] = lates[row] and known[row] == prompts[row] and rng.random() < 0.5
        starts = [known[row] - lates[row] for row in decoding] + [known[row] for row in reading]
        chunks = [rng.randint(1, min(most_tokens, prompts[row] - known[row])) for row in reading]
        counts = [query_len] * len(decoding) + chunks
        begins = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
        if new := [row for row in reading if not known[row]]:
            checkpoints.start(torch.tensor(new, device=DEVICE))
        rows = torch.tensor(decoding + reading, device=DEVICE)
        starts_there = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        token_rows = torch.repeat_interleave(torch.tensor(counts)).to(DEVICE)
        spans = checkpoints.spans(rows, starts_there, begins, token_rows, len(decoding))
        ends = [start + count for start, count in zip(starts, counts, strict=True)][len(decoding) :]
        batch = AttentionBatch(len(decoding), query_len, begins, [], [], chunks, ends, spans=spans)
        batch.plans[ScanPlan] = plan_scan(batch, block_size, DEVICE)
        num_tokens = sum(counts)
        width = shape.conv_dim + shape.num_v_heads * shape.v_dim
        projected = kernels.normal(num_tokens + 2, width), kernels.normal(num_tokens + 2, 2 * shape.num_v_heads)
        got, expected = delta(projected, got_state, batch), twin(projected, expected_state, batch)
        exact = exact_twin([part.float() for part in projected], exact_state, batch)
        kernels.assert_errs_little_more(*(each[:num_tokens] for each in (got, expected, exact)))
        for parts in zip(got_state, expected_state, exact_state, strict=True):
            counts_there = rows if parts[0] is not got_state.states else rows[spans.kept > 0]
            if len(counts_there):
                kernels.assert_errs_little_more(*(part.index_select(0, counts_there) for part in parts))
        for row, start in zip(decoding, starts, strict=False):
            known[row] = max(known[row], start + rng.randint(0, query_len))
        for row, count in zip(reading, chunks, strict=True):
            known[row] += count


def normal_cache(kernels: Kernels, num_blocks: int, block_size: int, heads: Heads) -> LayerCache:
    """Return a cache of random numbers."""
    sizes = num_blocks, heads.num_kv_heads, block_size
    return LayerCache(kernels.normal(*sizes, heads.head_dim), kernels.normal(*sizes, heads.value_dim))


def check_gather(
    dtype: torch.dtype,
    seq_lens: list[int],
    num_kv_heads: int,
    scales: Scales | None = None,
    v_dim: int | None = None,
) -> None:
    """Rows' keys and values come out of shuffled blocks, one after the other, and nothing else comes."""
    kernels = Kernels(dtype, seed=len(seq_lens))
    block_size, head_dim = 16, 64
    heads = made_heads(num_kv_heads, num_kv_heads, head_dim, None, scales, v_dim=v_dim)
    _, cache, _, tables = decode_step(kernels, seq_lens, 1, heads, block_size)
    cache = cache if scales is None else of_sides(to_fp8, cache)
    starts = torch.tensor([0, *itertools.accumulate(seq_lens)], dtype=torch.int32, device=DEVICE)
    sizes = sum(seq_lens) + 3, num_kv_heads
    out = [torch.full((*sizes, dim), 7.0, dtype=dtype, device=DEVICE) for dim in (head_dim, heads.value_dim)]
    gather_heads(cache, tables, starts, -(-max(seq_lens) // block_size), heads, out[0], out[1], kernels.device)
    expected = [torch.full_like(side, 7.0) for side in out]
    for row, (begin, length) in enumerate(zip(starts.tolist(), seq_lens, strict=False)):
        of_row = LayerCache(*(side[tables[row].long()] for side in cache))
        for side, read in zip(expected, as_read(of_row, scales), strict=True):
            side[begin : begin + length] = read.transpose(1, 2).flatten(0, 1)[:length].to(dtype)
    for side, expected_side in zip(out, expected, strict=True):
        assert torch.equal(side, expected_side)


def check_decode(
    dtype: torch.dtype,
    seq_lens: list[int],
    query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tuning: DecodeTuning | None = None,
    block_size: int = 16,
    scales: Scales | None = None,
    **settings: Any,
) -> None:
    """Split decode attention over shuffled blocks; run twice, since the counters must be back at 0."""
    kernels = Kernels(dtype, seed=len(seq_lens))
    heads = made_heads(num_heads, num_kv_heads, head_dim, None, scales, **settings)
    sizes = num_heads, num_kv_heads, head_dim, query_len
    decode = TritonDecode(*sizes, kernels.device, kernels.workspace, heads.value_dim)
    kernels.workspace.reserve(1 << 20)
    q, cache, lens, tables = decode_step(kernels, seq_lens, query_len, heads, block_size)
    cache = cache if scales is None else of_sides(to_fp8, cache)
    expected = reference.decode_attention(q, as_read(cache, scales), lens, tables, query_len, heads)
    first, second = (torch.full_like(expected, torch.nan) for _ in range(2))
    decode(q, cache, lens, tables, query_len, heads, first, tuning)
    decode(q, cache, lens, tables, query_len, heads, second, tuning)
    kernels.assert_close(first, expected, heads.v_scale)
    assert torch.equal(first, second)
    in_8_bits = torch.empty_like(expected, dtype=torch.float8_e5m2)
    decode(q, cache, lens, tables, query_len, heads, in_8_bits, tuning)
    kernels.assert_narrowed(in_8_bits, first, torch.float8_e5m2, 0.25)
    assert not kernels.workspace.counters.any()


def check_fused_decode(
    dtype: torch.dtype,
    seq_lens: list[int],
    query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    tuning: DecodeTuning | None = None,
    scales: Scales | None = None,
    **settings: Any,
) -> None:
    """Attention from the projection on, against norm, rotation and append, then attention.

    Values that are keys have a norm, too.
    """
    kernels = Kernels(dtype, seed=len(seq_lens))
    of_values = settings.get("values_are_keys", False)
    norm = HeadNorm(kernels.normal(head_dim), kernels.normal(head_dim), 1e-6, of_values) if has_norm else None
    heads = made_heads(num_heads, num_kv_heads, head_dim, norm, scales, **settings)
    sizes = num_heads, num_kv_heads, head_dim, query_len
    decode = TritonDecode(*sizes, kernels.device, kernels.workspace, heads.value_dim)
    kernels.workspace.reserve(1 << 20)
    block_size = 16
    q, cache, lens, tables = decode_step(kernels, seq_lens, query_len, heads, block_size)
    positions = torch.cat([torch.arange(length - query_len, length) for length in seq_lens]).to(DEVICE)
    rows = torch.arange(len(seq_lens), device=DEVICE).repeat_interleave(query_len)
    slot_mapping = tables[rows, positions // block_size].long() * block_size + positions % block_size
    qkv = kernels.normal(len(q), heads.width)
    frequencies = (1.0 / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)).to(DEVICE)
    poison(cache, [length - query_len for length in seq_lens], tables)  # the step's own are still to be written
    cache = cache if scales is None else of_sides(to_fp8, cache)
    expected_cache = of_sides(torch.clone, as_read(cache, scales))
    q = reference.append_heads(qkv, heads, positions, frequencies, slot_mapping, expected_cache)
    by = rotation_table(positions, frequencies, kernels.device)
    outputs = [torch.full((*q.shape[:2], heads.value_dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    for out in outputs:
        decode.from_projection(qkv, heads, by, slot_mapping, cache, lens, tables, query_len, out, tuning)
    read, clean, expected_clean = as_read(cache, scales), [], []
    for side, read_side, expected_side in zip(cache, read, expected_cache, strict=True):
        is_poisoned = ~expected_side.isfinite()
        assert torch.equal(~read_side.isfinite(), is_poisoned)
        clean.append((side if scales is None else side.float()).masked_fill(is_poisoned, 0).to(side.dtype))
        expected_clean.append(expected_side.masked_fill(is_poisoned, 0))
    assert_cached(kernels, LayerCache(*clean), LayerCache(*expected_clean), scales)
    # The step's own tokens are attended to as the cache holds them.
    attended = expected_cache if scales is None else read
    expected = reference.decode_attention(q, attended, lens, tables, query_len, heads)
    kernels.assert_close(outputs[0], expected, 2 * heads.v_scale)
    assert torch.equal(*outputs)
    assert not kernels.workspace.counters.any()


def decode_step(
    kernels: Kernels,
    seq_lens: list[int],
    query_len: int,
    heads: Heads,
    block_size: int,
) -> tuple[torch.Tensor, LayerCache, torch.Tensor, torch.Tensor]:
    """Return queries, cache, lengths and tables of decode rows.

    What does not belong to a row is infinite or no number: places behind its length, and the null block, in which every
    table ends, and to which entries lead that lie wholly before what a window shows.
    """
    width = -(-max(seq_lens) // block_size) + 1
    blocks = kernels.rng.sample(range(1, 1 + width * len(seq_lens)), width * len(seq_lens))
    tables = torch.tensor(blocks, dtype=torch.int32, device=DEVICE).view(len(seq_lens), width)
    cache = normal_cache(kernels, 1 + len(blocks), block_size, heads)
    tables[:, -1] = 0
    poison(cache, seq_lens, tables)
    if heads.window is not None:
        for table, length in zip(tables, seq_lens, strict=True):
            table[: max(0, length - query_len + 1 - heads.window) // block_size] = 0
    q = kernels.normal(len(seq_lens) * query_len, heads.num_heads, heads.head_dim)
    return q, cache, torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE), tables


def prefill_batch(
    kernels: Kernels, prefill: Sequence[tuple[int, int]], heads: Heads, block_size: int
) -> tuple[AttentionBatch, LayerCache]:
    """Return a batch of prefill rows, given as (tokens, length), behind one decode row, and its cache.

    The null block holds no number; with a window entries before it name that block.
    """
    lengths = [40, *(length for _, length in prefill)]
    width = -(-max(lengths) // block_size)
    blocks = kernels.rng.sample(range(1, 1 + width * len(lengths)), width * len(lengths))
    tables = torch.tensor(blocks, dtype=torch.int32, device=DEVICE).view(len(lengths), width)
    cache = normal_cache(kernels, 1 + len(blocks), block_size, heads)
    for side in cache:
        side[0] = torch.nan
    counts = [1, *(count for count, _ in prefill)]
    if heads.window is not None:
        for table, count, length in zip(tables, counts, lengths, strict=True):
            table[: max(0, length - count + 1 - heads.window) // block_size] = 0
    slots = [
        int(tables[row, position // block_size]) * block_size + position % block_size
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True))
        for position in range(length - count, length)
    ]
    batch = AttentionBatch(
        num_decode_rows=1,
        decode_query_len=1,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        block_tables=[tables],
        slot_mappings=[torch.tensor(slots, device=DEVICE)],
        prefill_query_lens=counts[1:],
        prefill_seq_lens=lengths[1:],
    )
    return batch, cache


def check_mixed_step(
    kernels: Kernels,
    chosen: KernelSet,
    prefill: Sequence[tuple[int, int]],
    heads: Heads,
    block_size: int = 16,
    spans: Sequence[Sequence[Span]] | None = None,
) -> None:
    """The kernel set's attention as a whole, in the step's own size, and padded as a piecewise step is.

    `spans` are those of the rows of `prefill`, see `AttentionBatch.prefill_spans`.
    """
    batch, cache = prefill_batch(kernels, prefill, heads, block_size)
    batch.prefill_spans = spans
    num_tokens = len(batch.slot_mappings[0])
    qkv = kernels.normal(num_tokens, heads.width)
    positions = torch.randint(0, 4000, (num_tokens,), device=DEVICE)
    frequencies = 1.0 / 1e6 ** (torch.arange(0, heads.head_dim, 2, device=DEVICE) / heads.head_dim)
    expected_cache = of_sides(torch.clone, cache)
    q = reference.append_heads(qkv, heads, positions, frequencies, batch.slot_mappings[0], expected_cache)
    k, v = (side.transpose(1, 2).flatten(0, 1)[batch.slot_mappings[0]] for side in expected_cache)
    expected = paged_attention(q, k, v, of_sides(torch.clone, expected_cache), batch, heads).flatten(1)

    assert isinstance(chosen, CudaKernels)
    attention = chosen.attention(heads)
    chosen.plan_attention(batch, 0)
    padded_cache = of_sides(torch.clone, cache)
    got = attention(qkv, chosen.rotation(positions, frequencies), cache, batch)
    for side, expected_side in zip(cache, expected_cache, strict=True):
        kernels.assert_close(side[1:], expected_side[1:], 4)
    kernels.assert_close(got, expected, 2)

    num_padded = num_tokens + 5
    out = torch.full((num_padded, heads.num_heads * heads.value_dim), 7.0, dtype=kernels.dtype, device=DEVICE)
    batch.padded_out, nowhere = {out.shape[1]: out}, torch.zeros(5, dtype=torch.int64, device=DEVICE)
    batch.slot_mappings = [torch.cat((batch.slot_mappings[0], nowhere))]
    rope = chosen.rotation(torch.cat((positions, nowhere)), frequencies)
    padded_qkv = torch.cat((qkv, qkv.new_zeros(5, qkv.shape[1])))
    assert attention(padded_qkv, rope, padded_cache, batch, out) is out
    kernels.assert_close(out[:num_tokens], expected, 2)
    assert (out[num_tokens:] == 7.0).all()


def check_invariant_attention(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    lengths: Sequence[int],
    query_len: int,
    scales: Scales | None = None,
    **settings: Any,
) -> None:
    """Tokens have the same bits as decode rows, alone or not, as drafts, and in a prompt that is cut anywhere."""
    kernels = Kernels(dtype, is_invariant=True)
    layer_heads, block_size = made_heads(*heads, None, scales, **settings), 16
    attention = InvariantAttention(layer_heads, kernels.device, kernels.workspace)
    q, cache, lens, tables = decode_step(kernels, list(lengths), query_len, layer_heads, block_size)
    cache = cache if scales is None else of_sides(to_fp8, cache)
    expected = reference.decode_attention(q, as_read(cache, scales), lens, tables, query_len, layer_heads)
    together = torch.full_like(expected, torch.nan)
    attention(q, cache, lens, tables, query_len, layer_heads, together)
    kernels.assert_close(together, expected, layer_heads.v_scale)
    for row, length in enumerate(lengths):  # alone, by one program and by several
        of_row = slice(row * query_len, (row + 1) * query_len)
        alone = torch.full_like(expected[of_row], torch.nan)
        attention(q[of_row], cache, lens[row : row + 1], tables[row : row + 1], query_len, layer_heads, alone)
        assert torch.equal(alone, together[of_row])
        for count in sorted({1, query_len - 1, query_len} - {0}):  # the last tokens, as a prompt's
            batch = AttentionBatch(0, 1, lens[row : row + 1], [tables[row : row + 1]], [], [count], [length])
            tokens = slice((row + 1) * query_len - count, (row + 1) * query_len)
            prompt = torch.full_like(expected[tokens], torch.nan)
            attention.run(attention.plan(batch, 0), q[tokens], cache, layer_heads, prompt)
            assert torch.equal(prompt, together[tokens])
    assert not kernels.workspace.counters.any()


def check_rotation(num_tokens: int, head_dim: int, scale: float) -> None:
    """Cosines and sines, multiplied as a stretched embedding has it."""
    kernels = Kernels(torch.float32, seed=num_tokens)
    positions = torch.arange(num_tokens, device=DEVICE) * 7
    frequencies = (1.0 / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)).to(DEVICE)
    angles = positions.unsqueeze(1) * frequencies
    for axes in (1, 3):
        shapes = (positions, frequencies)
        if axes > 1:
            shapes = (positions.unsqueeze(1).repeat(1, axes), frequencies.repeat(axes, 1) / axes)
        by = rotation_table(*shapes, kernels.device, scale)
        kernels.assert_close(by.cos, angles.cos() * scale, 4)
        kernels.assert_close(by.sin, angles.sin() * scale, 4)


def check_cut_lengths(dtype: torch.dtype) -> None:
    """A row that claims more tokens than its table holds attends to those of the table, and hurts no other row."""
    kernels, sizes, block_size = Kernels(dtype), (4, 2, 64), 16
    heads = Heads(*sizes)
    q, cache, lens, tables = decode_step(kernels, [64, 64], 1, heads, block_size)
    cache = of_sides(
        lambda side: side.nan_to_num(1.0, 1.0, -1.0), cache
    )  # the table's last block, the null block, is attended to here
    decode = TritonDecode(*sizes, 1, kernels.device, kernels.workspace)
    expected = reference.decode_attention(q, cache, lens.new_tensor([64, 80]), tables, 1, heads)
    out = torch.empty_like(q)
    decode(q, cache, lens.new_tensor([64, 10_000]), tables, 1, heads, out)
    kernels.assert_close(out, expected)


def to_fp8(side: torch.Tensor) -> torch.Tensor:
    return side.to(FP8)


def poison(cache: LayerCache, seq_lens: Sequence[int], tables: torch.Tensor) -> None:
    """Put numbers that are none, and infinite ones, behind each row's length and into the null block."""
    block_size, bad = cache.keys.shape[2], itertools.cycle((torch.nan, torch.inf, -torch.inf))
    for side in cache:
        side[0] = torch.nan
    for table, length in zip(tables.tolist(), seq_lens, strict=True):
        for position in range(length, len(table) * block_size):
            value = next(bad)
            for side in cache:
                side[table[position // block_size], :, position % block_size] = value


def check_block_moves(widths: Sequence[tuple[int, int]], num_blocks: int, num_moved: int, dtype: torch.dtype) -> None:
    """Blocks in any order, gathered into one piece each, and scattered into other blocks; planes of several widths."""
    generator = torch.Generator().manual_seed(num_moved)
    caches = [
        LayerCache(
            *(torch.randint(0, 100, (num_blocks, 1, 1, width), dtype=dtype, generator=generator) for width in of_layer)
        )
        for of_layer in widths
    ]
    blocks, others = (torch.randperm(num_blocks, generator=generator)[:num_moved] for _ in range(2))
    found = []
    for mover, device in ((TorchBlockMover(), torch.device("cpu")), (KernelBlockMover(), DEVICE)):
        moved = [LayerCache(*(side.to(device, copy=True) for side in cache)) for cache in caches]
        planes = Planes(moved)
        staged = planes.pieces(num_moved).zero_()
        mover.gather(planes, blocks.to(device), staged)
        mover.scatter(planes, others.to(device), staged)
        found.append(([side.cpu() for side in sides(moved)], staged.cpu()))
    (expected, pieces), (got, ours) = found
    assert torch.equal(ours, pieces)
    for side, ours_side, theirs in zip(sides(caches), got, expected, strict=True):
        assert torch.equal(ours_side, theirs)
        assert torch.equal(theirs[others], side[blocks])


def check_row_inputs(
    num_rows: int, query_len: int, num_entries: int, width: int, *, has_prompts: bool, num_groups: int = 1
) -> None:
    """The inputs of rows in any order, and the tables with their new entries."""
    kernels = Kernels(torch.float32, seed=num_rows)
    block_size, max_rows = 4, num_rows + 3
    cells = [kernels.rng.randrange(1000) for _ in range(num_groups * max_rows * width)]
    tables = torch.tensor(cells, dtype=torch.int32, device=DEVICE).view(num_groups, max_rows, width)
    rows = torch.tensor(kernels.rng.sample(range(max_rows), num_rows), device=DEVICE)
    # Entries of the step's own rows and of others, one of them written twice with the same.
    entry_rows = [kernels.rng.randrange(num_groups * max_rows) for _ in range(num_entries)]
    places = dict.fromkeys((row, kernels.rng.randrange(width)) for row in entry_rows)
    entries = [(row, position, 1000 + index) for index, (row, position) in enumerate(places)]
    entries += entries[:1]
    columns = zip(*entries, strict=True) if entries else ((), (), ())
    new = NewEntries(*(torch.tensor(column, dtype=torch.int64, device=DEVICE) for column in columns))
    # Lengths up to past the end of the table.
    computed = torch.tensor(
        [kernels.rng.randrange(block_size * width + 5) for _ in range(num_rows)], dtype=torch.int32, device=DEVICE
    )
    counts = [kernels.rng.randrange(1, 1100) if has_prompts and row % 3 == 2 else query_len for row in range(num_rows)]
    begins = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
    queries = Queries(begins, sum(counts), max(counts, default=0))
    sizes = {"block_size": block_size, "max_len": block_size * width - 2}
    expected_tables = tables.cpu()
    new_on_cpu, queries_on_cpu = NewEntries(*(t.cpu() for t in new)), queries._replace(query_start_loc=begins.cpu())
    expected = row_inputs(expected_tables, new_on_cpu, rows.cpu(), computed.cpu(), queries_on_cpu, **sizes)
    got = row_inputs_kernel(tables, new, rows, computed, queries, *sizes.values())
    assert torch.equal(tables.cpu(), expected_tables)
    for ours, theirs in zip(got, expected, strict=True):
        by_group = torch.stack(theirs) if isinstance(theirs, tuple) else theirs
        assert ours.dtype == by_group.dtype
        assert torch.equal(ours.cpu(), by_group)


def check_projection(
    dtype: torch.dtype,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    tuning: Tuning,
    *,
    has_norm: bool = False,
    is_gated: bool = False,
    has_bias: bool = False,
    has_residual: bool = False,
    has_8_bits: bool = False,
    reads: torch.dtype | None = None,
) -> None:
    """A product with what goes before and after; twice, with the same bits.

    In 8 bits x is, with more than few rows, in 8 bits too, as `reads`.
    """
    kernels = Kernels(dtype, seed=num_rows)
    kernels.workspace.reserve(1 << 22)
    num_weight_rows = num_outputs * (2 if is_gated else 1)
    x = kernels.normal(num_rows, num_inputs)
    product = Product(
        Weight(kernels.normal(num_weight_rows, num_inputs, scale=num_inputs**-0.5)),
        kernels.normal(num_weight_rows) if has_bias else None,
        1e-5 if has_norm else None,
        is_gated,
    )
    if has_8_bits:
        product = replace(product, weight=rounded_to_8_bits(product.weight.data))
        reads = reads or (dtype if num_rows <= FEW_ROWS else torch.float8_e5m2)
        x = x.to(reads).to(dtype)
    residual = kernels.normal(num_rows, num_outputs) if has_residual else None
    expected = reference.linear(
        x,
        product.weight.data,
        scale=None if product.weight.scale is None else product.weight.scale[:, 0],
        bias=product.bias,
        norm_weight=torch.ones(num_inputs, device=DEVICE) if has_norm else None,
        eps=1e-5,
        is_gated=is_gated,
        residual=residual,
    )
    x = x if reads is None else x.to(reads)
    got = project(x, product, residual, tuning, kernels.device, kernels.workspace, dtype)
    kernels.assert_close(got, expected, 4)
    assert torch.equal(got, project(x, product, residual, tuning, kernels.device, kernels.workspace, dtype))
    if tuning.inputs == HELD_INPUTS and num_rows > FEW_ROWS:  # programs of many rows sum in the same order
        for inputs in (HELD_INPUTS, HELD_INPUTS // 2):
            in_turn = replace(tuning, num_splits=1, num_turns=tuning.num_splits, inputs=inputs)
            summed = project(x, product, residual, in_turn, kernels.device, kernels.workspace, dtype)
            if inputs == HELD_INPUTS or torch.cuda.is_available():  # tensor cores add 16 inputs after the other
                assert torch.equal(got, summed)
            kernels.assert_close(summed, expected, 4)
    assert not kernels.workspace.counters.any()


def check_products_in_8_bits(dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    """Some rows meet the rounded weight, into which the norm's was folded, more rows the exact one."""
    random = Kernels(dtype)
    plain = CudaKernels(DEVICE, dtype, block_size=16, max_query_len=1, num_ring_entries=1)
    weight, norm_weight = random.normal(num_outputs, num_inputs, scale=num_inputs**-0.5), random.normal(num_inputs)
    folded = weight.clone()
    fold_norm(folded, norm_weight)
    quantized, scale = quantize_rows(folded)
    in_8_bits = plain.in_8_bits().norm_linear(norm_weight, 1e-6, Weight(weight.clone()))
    as_given = plain.norm_linear(norm_weight, 1e-6, Weight(weight.clone()))
    for num_rows in (1, FEW_ROWS, FEW_ROWS + 1, MAX_ROWS_IN_8_BITS, MAX_ROWS_IN_8_BITS + 1, MAX_ROWS, MAX_ROWS + 1):
        x = random.normal(num_rows, num_inputs)
        normalized = reference.rms_norm(x, None, 1e-6)
        rounded, exact = reference.linear(normalized, quantized, scale=scale), reference.linear(normalized, folded)
        assert (rounded - exact).abs().max() > 0.05  # so that one is not taken for the other
        if FEW_ROWS < num_rows <= MAX_ROWS_IN_8_BITS:  # there x is rounded as well
            read = between_products.rms_norm(x, None, 1e-6, random.device, torch.float8_e4m3fn)
            rounded = reference.linear(read.to(dtype), quantized, scale=scale)
        random.assert_close(in_8_bits(x), rounded if num_rows <= MAX_ROWS_IN_8_BITS else exact, 4)
        random.assert_close(as_given(x), exact, 4)


def check_mlp_in_8_bits(dtype: torch.dtype, hidden: int, intermediate: int) -> None:
    """What a gate hands to the product behind it is of a type that both know."""
    random = Kernels(dtype)
    plain = CudaKernels(DEVICE, dtype, block_size=16, max_query_len=1, num_ring_entries=1)
    gate_up, norm_weight = random.normal(2 * intermediate, hidden, scale=hidden**-0.5), random.normal(hidden)
    down = random.normal(hidden, intermediate, scale=intermediate**-0.5)
    folded = gate_up.clone()
    fold_norm(folded, norm_weight)
    (gate_weight, gate_scale), (down_weight, down_scale) = quantize_rows(folded), quantize_rows(down)
    in_8_bits = plain.in_8_bits()
    gated, add = in_8_bits.norm_gated_linear(norm_weight, 1e-6, Weight(gate_up)), in_8_bits.add_linear(Weight(down))
    for num_rows in (1, FEW_ROWS, FEW_ROWS + 1, 8, 17, MAX_ROWS_IN_8_BITS):
        x, residual = random.normal(num_rows, hidden), random.normal(num_rows, hidden)
        normalized = reference.rms_norm(x, None, 1e-6)
        if num_rows > FEW_ROWS:
            normalized = between_products.rms_norm(x, None, 1e-6, random.device, torch.float8_e4m3fn).to(dtype)
        inner, expected = gated(x), reference.linear(normalized, gate_weight, scale=gate_scale, is_gated=True)
        if num_rows > FEW_ROWS:
            random.assert_narrowed(inner, expected, torch.float8_e5m2, 0.25)
        else:
            random.assert_close(inner.to(dtype), expected, 4)
        expected = reference.linear(inner.to(dtype), down_weight, scale=down_scale, residual=residual)
        random.assert_close(add(inner, residual.clone()), expected, 4)
        scales = hidden**-0.5, 2e3
        inner = torch.cat([random.normal(intermediate, hidden, scale=scale) for scale in scales])
        huge = in_8_bits.norm_gated_linear(norm_weight, 1e-6, Weight(inner))
        assert add(huge(x), residual).isfinite().all()  # the smaller range is not left


def quantized_weight(
    kernels: Kernels,
    kind: str,
    num_outputs: int,
    num_inputs: int,
    block: tuple[int, int],
    *,
    has_zeros: bool = False,
    has_order: bool = False,
) -> Weight:
    """Return a quantized weight whose products of normal numbers are about 1. A block's inputs may be 0: all."""
    rows, columns = block[0], block[1] or num_inputs
    blocks = -(-num_outputs // rows), -(-num_inputs // columns)
    scale = (0.5 + kernels.normal(*blocks).float().sigmoid()) * num_inputs**-0.5
    if kind == "fp8":
        data = kernels.normal(num_outputs, num_inputs).to(torch.float8_e4m3fn)
        return Weight(data, scale.to(kernels.dtype) if columns == num_inputs else scale, block=(rows, columns))

    def integers(high: int, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, device=DEVICE, generator=kernels.generator) * high).to(torch.uint8)

    order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(0)).to(DEVICE) if has_order else None
    zero = integers(16, *blocks) if has_zeros else None
    data = integers(256, num_outputs, num_inputs // 2)
    if kind == "fp4":
        return Weight(data.view(FP4), (scale / 3).to(torch.float8_e8m0fnu), block=(rows, columns), order=order)
    return Weight(data, (scale / 4).to(kernels.dtype), zero, (rows, columns), order)


def check_quantized_projections(
    dtype: torch.dtype,
    weight: Weight,
    row_counts: Sequence[int],
    *,
    has_norm: bool = False,
    is_gated: bool = False,
    has_bias: bool = False,
    has_residual: bool = False,
    x_scale: float = 1.0,
) -> None:
    """Products as the kernel set makes them, against the dequantized weight and x as tensor cores read it."""
    random = Kernels(dtype, seed=weight.num_outputs)
    kernels = CudaKernels(DEVICE, dtype, block_size=16, max_query_len=1, num_ring_entries=1)
    num_outputs, num_inputs = weight.num_outputs // (2 if is_gated else 1), weight.num_inputs
    bias = random.normal(weight.num_outputs) if has_bias else None
    norm_weight = 1 + random.normal(num_inputs, scale=0.1)
    matrix = weight.dequantized(torch.float32)
    for num_rows in row_counts:
        x = random.normal(num_rows, num_inputs, scale=x_scale)
        residual = random.normal(num_rows, num_outputs) if has_residual else None
        read = x.float()
        if has_norm:
            read = reference.rms_norm(read, norm_weight, 1e-6)
            read = read if num_rows == 1 and weight.kind == "fp8" else read.to(dtype).float()
        if weight.kind == "fp8" and (num_rows > 1 or weight.block[1] < num_inputs):
            norm = TokenNorm(norm_weight, 1e-6) if has_norm else None
            block = min(weight.block[1], num_inputs)
            tokens = quantize_tokens(x, block, random.device, norm)
            columns = torch.arange(num_inputs, device=DEVICE) // block
            read = tokens.tokens.float() * tokens.scale.t()[:num_rows, columns]
        expected = reference.linear(
            read, matrix, bias=bias, is_gated=is_gated, residual=None if residual is None else residual.float()
        ).to(dtype)
        if has_residual:
            product = kernels.add_linear(weight, bias)
        elif is_gated:
            product = kernels.norm_gated_linear(norm_weight, 1e-6, weight, bias)
        elif has_norm:
            product = kernels.norm_linear(norm_weight, 1e-6, weight, bias)
        else:
            product = kernels.linear(weight, bias)
        times = range(20 if IS_GPU else 1)  # races show in some runs alone
        got, *others = (product(x) if residual is None else product(x, residual.clone()) for _ in times)
        assert all(torch.equal(got, other) for other in others)
        # Tensor cores of compute capability 9.0 keep 14 bits of a sum of products in 8 bits.
        summed = 8 if weight.kind == "fp8" and num_rows > 1 else 4
        random.assert_close(got, expected, summed * max(1.0, x_scale))


def check_quantized_tokens(dtype: torch.dtype, num_tokens: int, size: int, block: int) -> None:
    """Tokens in 8 bits: by itself, of its norm, of its gate."""
    random = Kernels(dtype)
    weight = random.normal(size)
    for norm, is_gated in ((None, False), (TokenNorm(weight, 1e-5), False), (None, True)):
        x = random.normal(num_tokens, size * (2 if is_gated else 1), scale=30.0)
        value = reference.silu_and_mul(x.float()) if is_gated else x.float()
        if norm is not None:
            value = reference.rms_norm(value, weight, 1e-5)
        if num_tokens:
            value[0, :block] = 0
            if not is_gated and norm is None:
                x[0, :block] = 0
        tokens = quantize_tokens(x, block, random.device, norm, is_gated=is_gated)
        quantized, scale = tokens.tokens, tokens.scale.t()[:num_tokens]
        block = min(block, size)
        blocks = torch.nn.functional.pad(value, (0, -size % block)).unflatten(1, (-1, block))
        expected = (blocks.abs().amax(2) / 448).clamp(min=1e-30)
        first = 0 if is_gated or norm is not None else None
        rows = slice(1, None) if first == 0 else slice(None)
        torch.testing.assert_close(scale[rows], expected[rows], rtol=1e-5, atol=0)
        columns = torch.arange(size, device=DEVICE) // min(block, size)
        random.assert_narrowed(quantized[rows], (value / expected[:, columns])[rows], torch.float8_e4m3fn)


def check_lm_head(dtype: torch.dtype, vocab_size: int, hidden: int, row_counts: Sequence[int]) -> None:
    """Logits are float32 and not rounded before, whoever computes them; in a given place they are the same."""
    random = Kernels(dtype)
    kernels = CudaKernels(DEVICE, dtype, block_size=16, max_query_len=1, num_ring_entries=1)
    weight, norm_weight = random.normal(vocab_size, hidden, scale=hidden**-0.5), 1 + random.normal(hidden, scale=0.1)
    folded = weight.clone()
    fold_norm(folded, norm_weight)
    plain, shared = kernels.lm_head(Weight(weight)), kernels.lm_head(Weight(weight), norm_weight, 1e-6, is_shared=True)
    normed = kernels.lm_head(Weight(weight.clone()), norm_weight, 1e-6)
    for num_rows in row_counts:
        x = random.normal(num_rows, hidden)
        exact = reference.linear(x.float(), weight)
        torch.testing.assert_close(plain(x), exact, atol=4 * TOLERANCE[torch.float32], rtol=TOLERANCE[torch.float32])
        separate = between_products.rms_norm(x, norm_weight, 1e-6, random.device)
        torch.testing.assert_close(shared(x), plain(separate), atol=0, rtol=0)
        expected = reference.linear(reference.rms_norm(x, None, 1e-6).float(), folded)
        random.assert_close(normed(x), expected, 4)
        for head in (plain, shared, normed):
            places = torch.zeros(num_rows + 1, vocab_size, device=DEVICE)
            assert torch.equal(head(x, places[:num_rows]), head(x))
            assert torch.equal(places[:num_rows], head(x))
            assert not places[num_rows].any()


def check_products_of_no_rows(dtype: torch.dtype) -> None:
    """A step that only begins prompts has no logits."""
    kernels = CudaKernels(DEVICE, dtype, block_size=16, max_query_len=1, num_ring_entries=1)
    weight, norm = torch.ones(48, 32, dtype=dtype, device=DEVICE), torch.ones(32, dtype=dtype, device=DEVICE)
    x, residual = norm.new_zeros(0, 32), norm.new_zeros(0, 48)
    for of_set in (kernels, kernels.in_8_bits()):
        assert of_set.linear(Weight(weight))(x).shape == (0, 48)
        assert of_set.norm_linear(norm, 1e-6, Weight(weight))(x).shape == (0, 48)
        assert of_set.norm_gated_linear(norm, 1e-6, Weight(weight))(x).shape == (0, 24)
        assert of_set.add_linear(Weight(weight))(x, residual).shape == (0, 48)


def check_sampling(dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    """Greedy tokens and draws equal the twin's; a draw may differ where two tokens are equal but for rounding."""
    kernels = Kernels(dtype, seed=num_rows)
    chooser = KernelTokenChoice(num_rows, kernels.device, kernels.workspace)
    logits, rows = kernels.normal(num_rows, vocab_size, scale=3.0), torch.arange(num_rows, device=DEVICE)
    lowest_best = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(chooser.greedy(AdjustedLogits(logits)), lowest_best)
    temperature = torch.tensor([kernels.rng.choice((0.0, 0.2, 0.8, 1.5)) for _ in range(num_rows)], device=DEVICE)
    seeds = torch.tensor([kernels.rng.randrange(-(2**63), 2**63) for _ in range(num_rows)], device=DEVICE)
    positions = torch.tensor([kernels.rng.randrange(100_000) for _ in range(num_rows)], device=DEVICE)
    greedy = temperature == 0

    def some(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([kernels.rng.choice(values) for _ in range(num_rows)], dtype=dtype, device=DEVICE)

    most = vocab_size * 3 // 4
    for counts, shares, least in (
        ((0,), (1.0,), (0.0,)),
        ((0, 1, 20, most), (1.0, 0.7, 0.999, 1e-6), (0.0, 0.05, 0.5)),
    ):
        truncation = (some(*counts, dtype=torch.int32), some(*shares), some(*least))
        # Also where likely tokens lie beside each other, and where all are equally likely.
        for values in (logits, logits.sort(descending=True).values, torch.zeros_like(logits)):
            tables = _draw_tables(temperature, truncation, seeds)
            drawn = chooser.draw(AdjustedLogits(values), rows, positions, tables)
            expected = sample(values, temperature, seeds, positions, truncation)
            differing = int((drawn[~greedy] != expected[~greedy]).sum())
            assert differing <= num_rows // 100, f"{differing} of {num_rows} draws differ"
            assert torch.equal(drawn[greedy], chooser.greedy(AdjustedLogits(values))[greedy])
    assert not kernels.workspace.counters.any()


def _draw_tables(temperature: torch.Tensor, truncation: tuple[torch.Tensor, ...], seed: torch.Tensor) -> RowTables:
    top_k, top_p, min_p = truncation
    return RowTables(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def check_distribution(num_draws: int, vocab_size: int) -> None:
    """Draws of each kind have the distribution that is left of the softmax, by a chi-square test."""
    from scipy import stats  # which takes seconds

    kernels = Kernels(torch.float32, seed=5)
    logits = kernels.normal(1, vocab_size, scale=1.5)
    rows, positions = torch.zeros(512, dtype=torch.int64, device=DEVICE), torch.arange(num_draws, device=DEVICE)
    chooser = KernelTokenChoice(512, kernels.device, kernels.workspace)
    for kind in ((0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.1), (40, 0.8, 0.05)):
        top_k, top_p, min_p = (torch.tensor([value], device=DEVICE) for value in kind)
        truncation = (top_k.to(torch.int32), top_p, min_p)
        temperature = torch.tensor([0.8], device=DEVICE)
        tables = _draw_tables(temperature, truncation, torch.tensor([77], device=DEVICE))
        of_draws = AdjustedLogits(logits.expand(512, -1).contiguous())
        counts = torch.zeros(vocab_size, dtype=torch.int64, device=DEVICE)
        for part in positions.split(512):
            drawn = chooser.draw(of_draws, rows[: len(part)], part, tables)[: len(part)]
            counts += torch.bincount(drawn, minlength=vocab_size)
        is_left = mask_truncated(logits, temperature, truncation)[0].isfinite()
        left = (logits[0].double() / 0.8).masked_fill(~is_left, -torch.inf).softmax(-1)
        expected, observed = (left * num_draws).cpu().numpy(), counts.cpu().numpy()
        assert observed[expected == 0].sum() == 0, "a token of probability 0 was drawn"
        large = expected >= 5
        observed = np.append(observed[large], observed[~large].sum())
        expected = np.append(expected[large], expected[~large].sum())
        some = expected > 0
        p_value = stats.chisquare(observed[some], expected[some] * observed[some].sum() / expected[some].sum()).pvalue
        print(f"{kind}: {some.sum()} groups of tokens, p = {p_value:.3f}")
        assert p_value > 1e-4, kind


def _some_tables(kernels: Kernels, num_rows: int, vocab_size: int, widths: Widths, word_len: int) -> RowTables:
    """Return tables of rows of which most ask for something."""
    rng = kernels.rng

    def ints(*shape: int, low: int, high: int) -> torch.Tensor:
        return torch.tensor([rng.randrange(low, high) for _ in range(math.prod(shape))], dtype=torch.int32).view(shape)

    def some(*values: float) -> torch.Tensor:
        return torch.tensor([rng.choice(values) for _ in range(num_rows)])

    def tokens(count: int) -> list[int]:
        return rng.sample(range(vocab_size), min(count, vocab_size))

    num_biased, num_words = ints(num_rows, low=1, high=widths.biased + 1), ints(num_rows, low=0, high=widths.bad_words)
    biased = torch.zeros(num_rows, widths.biased, dtype=torch.int32)
    bias = torch.zeros(num_rows, widths.biased)
    words = torch.full((num_rows, widths.bad_words, word_len), ANY_TOKEN, dtype=torch.int32)
    ends = torch.full((num_rows, widths.end_tokens), NO_TOKEN, dtype=torch.int32)
    for row in range(num_rows):
        some_tokens = torch.tensor(tokens(int(num_biased[row])), dtype=torch.int32)
        num_biased[row] = len(some_tokens)
        biased[row], biased[row, : len(some_tokens)] = some_tokens[-1], some_tokens
        bias[row, : len(some_tokens)] = torch.randn(len(some_tokens))
        bias[row, len(some_tokens) :] = bias[row, len(some_tokens) - 1]
        for word in range(int(num_words[row])):
            length = rng.randint(1, 3)
            words[row, word, -length:] = ints(length, low=0, high=4)
        few = tokens(rng.randint(0, widths.end_tokens))
        ends[row, : len(few)] = torch.tensor(few, dtype=torch.int32)
    needs = ints(num_rows, low=0, high=256)
    for need, table, neutral in (
        (Needs.BIAS, bias, 0.0),
        (Needs.BAD_WORDS, words, ANY_TOKEN),
        (Needs.MIN_TOKENS, ends, NO_TOKEN),
    ):
        table[(needs & need) == 0] = neutral  # type: ignore[call-overload]
    penalizes, allows = (needs & Needs.PENALTIES) != 0, (needs & Needs.ALLOWED) != 0
    mask_words = -(-vocab_size // 32)
    allowed = ints(num_rows, mask_words, low=-(2**31), high=2**31)
    tables = RowTables(
        needs=needs,
        bias_token_ids=biased,
        bias=bias,
        num_biased=num_biased,
        repetition_penalty=torch.where(penalizes, some(1.0, 0.7, 1.3), 1.0),
        frequency_penalty=torch.where(penalizes, some(0.0, -0.4, 0.3), 0.0),
        presence_penalty=torch.where(penalizes, some(0.0, 0.9), 0.0),
        min_length=ints(num_rows, low=0, high=80),
        end_token_ids=ends,
        bad_words=words,
        num_bad_words=num_words,
        allowed=torch.where(allows.unsqueeze(1), allowed, -1),
        num_reported=ints(num_rows, low=0, high=22),
    )
    return RowTables(**{name: tensor.to(DEVICE) for name, tensor in vars(tables).items()})


def check_adjust(num_rows: int, num_drafts: int, vocab_size: int) -> None:
    """Changed logits equal the twin's bit by bit, over steps whose drafts are accepted in part."""
    kernels = Kernels(torch.float32, seed=num_rows + num_drafts)
    rng, width, num_tables, word_len = kernels.rng, 1 + num_drafts, num_rows + 2, 8
    widths = Widths(biased=16, end_tokens=4, bad_words=32)
    tables = _some_tables(kernels, num_tables, vocab_size, widths, word_len)
    history, expected_history = (
        TokenHistory(RowTokens(num_tables, row_tokens_width(0, num_drafts), DEVICE), vocab_size, num_drafts, DEVICE)
        for _ in range(2)
    )
    lengths = [rng.randint(1, 70) for _ in range(num_tables)]
    for row, length in enumerate(lengths):
        known = np.array([rng.randrange(5) for _ in range(length)], np.int32)
        for of in (history, expected_history):
            new = StepTokens(*(torch.tensor(values, device=DEVICE) for values in ([row], [0], [known.tolist()])))
            of.tokens.write(new)
            of.start(row, known, rng.randint(1, length) if of is history else length, counts=True)
    for name in ("output_counts", "in_prompt"):
        getattr(expected_history, name).copy_(getattr(history, name))
    rows_of_step = rng.sample(range(num_tables), num_rows)
    rows = torch.tensor(rows_of_step, device=DEVICE)
    adjuster = LogitAdjuster(num_rows * width, vocab_size, kernels.device)
    for _ in range(3):
        first = torch.tensor([lengths[row] for row in rows_of_step], device=DEVICE)
        drafts = torch.tensor([[rng.randrange(5) for _ in range(num_drafts)] for _ in rows_of_step], device=DEVICE)
        if num_drafts:
            of_rows = StepTokens(rows, first, drafts)
            remember(of_rows, tables.needs, history, kernels.device, counts=False)
            expected_history.remember(of_rows, counts=False)
        at_rows = rows.repeat_interleave(width)
        positions = (first.unsqueeze(1) + torch.arange(width, device=DEVICE)).flatten()
        logits = kernels.normal(num_rows * width, vocab_size, scale=3.0)
        given = logits.clone()
        mask_of = torch.tensor([rng.randrange(-1, 2) for _ in at_rows], dtype=torch.int32, device=DEVICE)
        bits = torch.randint(-(2**31), 2**31, (2, tables.allowed.shape[1]), dtype=torch.int32, device=DEVICE)
        for masks in (None, PositionMasks(mask_of, bits)):
            asked = Adjustments(at_rows, positions, tables, history, Needs.ALL, widths, masks)
            got, expected = adjuster.adjust(logits, asked), adjusted(logits, replace(asked, history=expected_history))
            assert torch.equal(logits, given)
            assert got.changed is not None
            assert got.is_changed is not None
            asks = (tables.needs[at_rows] & Needs.CHANGES) != 0
            asks |= False if masks is None else mask_of >= 0
            assert torch.equal(got.is_changed != 0, asks)
            assert torch.equal(expected[~asks], given[~asks])
            assert torch.equal(got.changed[asks], expected[asks])
        yielded = torch.tensor([[rng.randrange(5) for _ in range(width)] for _ in rows_of_step], device=DEVICE)
        kept = [rng.randint(0, width) for _ in rows_of_step]
        num_valid = torch.tensor(kept, dtype=torch.int32, device=DEVICE)
        of_rows = StepTokens(rows, first, yielded, num_valid)
        remember(of_rows, tables.needs, history, kernels.device, counts=True)
        expected_history.remember(of_rows, counts=True)
        for row, count in zip(rows_of_step, kept, strict=True):
            lengths[row] += count
    tokens = KernelTokenChoice(num_rows * width, kernels.device, kernels.workspace)
    assert torch.equal(tokens.greedy(got), sample_greedy(expected))
    draws = RowTables(
        temperature=torch.full((num_tables,), 0.7, device=DEVICE),
        top_k=torch.full((num_tables,), 9, dtype=torch.int32, device=DEVICE),
        top_p=torch.full((num_tables,), 0.9, device=DEVICE),
        min_p=torch.zeros(num_tables, device=DEVICE),
        seed=torch.arange(num_tables, device=DEVICE),
    )
    truncation = (draws.top_k[at_rows], draws.top_p[at_rows], draws.min_p[at_rows])
    drawn = sample(expected, draws.temperature[at_rows], draws.seed[at_rows], positions, truncation)
    assert (tokens.draw(got, at_rows, positions, draws) != drawn).sum() <= len(drawn) // 100


def check_logprobs(num_rows: int, vocab_size: int) -> None:
    """Log-probabilities equal the twin's, also of flat rows and of rows in which little is left."""
    kernels = Kernels(torch.float32, seed=num_rows)
    rng = kernels.rng
    chooser = KernelTokenChoice(num_rows, kernels.device, kernels.workspace)
    num_reported = [rng.randrange(2 + MAX_REPORTED) for _ in range(num_rows - 1)] + [1 + MAX_REPORTED]
    table = torch.tensor(num_reported, dtype=torch.int32, device=DEVICE)
    rows = torch.randperm(num_rows).to(DEVICE)
    for scale in (3.0, 0.0):
        logits = kernels.normal(num_rows, vocab_size, scale=scale)
        logits[-1, 3:] = -torch.inf
        chosen = torch.tensor([rng.randrange(vocab_size) for _ in range(num_rows - 1)] + [1], device=DEVICE)
        got, expected = chooser.report(logits, rows, chosen, table), top_logprobs(logits, chosen, MAX_REPORTED)
        ordered = logits.sort(dim=1, descending=True, stable=True).indices
        for at, row in enumerate(rows.tolist()):
            if not num_reported[row]:
                continue
            columns = slice(0, num_reported[row])
            torch.testing.assert_close(got.logprobs[at, columns], expected.logprobs[at, columns], atol=2e-5, rtol=1e-5)
            assert got.token_ids[at, 0] == chosen[at]
            assert torch.equal(got.token_ids[at, 1 : num_reported[row]].long(), ordered[at, : num_reported[row] - 1])
            assert got.ranks[at] == expected.ranks[at]


def check_rows_without_a_best(vocab_size: int) -> None:
    """Logits that are not finite give no token, greedy or drawn, and leave the other rows as they are."""
    kernels = Kernels(torch.float32)
    chooser = KernelTokenChoice(6, kernels.device, kernels.workspace)
    logits = kernels.normal(6, vocab_size)
    expected = sample_greedy(logits)
    logits[0], logits[1] = torch.nan, -torch.inf
    logits[2, vocab_size - 1], logits[3, vocab_size // 2], logits[4, 0] = torch.inf, torch.nan, -torch.inf
    tokens = chooser.greedy(AdjustedLogits(logits))
    assert tokens[[0, 2, 3]].tolist() == [-1, -1, -1]
    assert 0 <= tokens[1] < vocab_size
    assert torch.equal(tokens[4:], expected[4:])
    assert torch.equal(tokens, sample_greedy(logits))
    rows, draws_of = torch.arange(6, device=DEVICE), torch.full((6,), 0.7, device=DEVICE)
    for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.9)):
        ones = torch.ones(6, device=DEVICE)
        truncation = (torch.full((6,), top_k, dtype=torch.int32, device=DEVICE), ones * top_p, ones * 0)
        drawn = chooser.draw(AdjustedLogits(logits), rows, rows, _draw_tables(draws_of, truncation, rows))
        assert drawn[[0, 2, 3]].tolist() == [-1, -1, -1]
        assert 0 <= drawn[1] < vocab_size
        assert torch.equal(drawn[4:], sample(logits, draws_of, rows, rows, truncation)[4:])
        assert sample(logits, draws_of, rows, rows, truncation)[[0, 2, 3]].tolist() == [-1, -1, -1]


def random_weight(
    kernels: Kernels, shape: tuple[int, int, int], kind: WeightKind, block: tuple[int, int], has_zero: bool = False
) -> Weight:
    """Return the weights of experts, [E, N, K], whose products have the size of the inputs; scales differ much."""
    num_experts, num_outputs, num_inputs = shape
    if kind == "plain":
        return Weight(kernels.normal(*shape, scale=num_inputs**-0.5))
    scales = num_experts, -(-num_outputs // block[0]), -(-num_inputs // block[1])
    scale = (2.0 ** kernels.normal(*scales).float()) * num_inputs**-0.5 / 2
    if kind == "fp8":
        return Weight(kernels.normal(*shape).to(torch.float8_e4m3fn), scale, block=block)
    codes = torch.randint(0, 256, (num_experts, num_outputs, num_inputs // 2), device=DEVICE, dtype=torch.uint8)
    if kind == "fp4":
        return Weight(codes.view(FP4), (scale / 3).to(torch.float8_e8m0fnu), block=block)
    zero = torch.randint(0, 16, scales, device=DEVICE, dtype=torch.uint8) if has_zero else None
    return Weight(codes, (scale / 5).to(kernels.dtype), zero, block)


def check_experts(
    dtype: torch.dtype,
    num_tokens: int,
    shape: ExpertShape,
    cut: ExpertCut | None = None,
    *,
    blocks: tuple[tuple[int, int], tuple[int, int]] = ((1, 1), (1, 1)),
    has_zero: bool = False,
    normalizes: bool = True,
    same_experts: bool = False,
    is_gemma: bool = False,
    own: range | None = None,
) -> None:
    """The sparse MLP equals its twin; a row of no numbers changes no other; the bits are the same every time.

    Gemma's gate is GELU, its router has a norm of its own, and a factor for each expert's weight. Experts that are not
    a member's `own` add nothing.
    """
    kernels = Kernels(dtype, seed=num_tokens)
    experts, hidden, intermediate = shape.num_experts, shape.hidden, shape.intermediate
    x, norm_weight = kernels.normal(num_tokens, hidden), 1 + kernels.normal(hidden, scale=0.1)
    router = kernels.normal(experts, hidden, scale=4 * hidden**-0.5)
    if same_experts:
        x = x[:1].repeat(num_tokens, 1)
    gate_up = random_weight(kernels, (experts, 2 * intermediate, hidden), shape.kinds[0], blocks[0], has_zero)
    down = random_weight(kernels, (experts, hidden, intermediate), shape.kinds[1], blocks[1], has_zero)
    routing, gate = Routing(shape.num_chosen, normalizes), GELU if is_gemma else SILU
    of_router = 1 + kernels.normal(hidden, scale=0.1).float() if is_gemma else None
    scales = 1 + kernels.normal(experts, scale=0.3).float() if is_gemma else None
    kernel_set = CudaKernels(DEVICE, dtype, block_size=16, max_query_len=1, num_ring_entries=1)
    chooses = Router(router, routing, None, None, of_router, scales)
    matrices = [weight.dequantized(torch.float32) for weight in (gate_up, down)]
    weights = _of_member(ExpertWeights(gate_up, down, gate=gate), matrices, own)
    layer = kernel_set.experts(norm_weight, 1e-6, chooses, weights)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return layer(rows.clone()) if cut is None else layer.run(rows.clone(), cut)

    expected = reference.experts(x, norm_weight, 1e-6, router, *matrices, routing, gate, of_router, scales)
    got = run(x)
    assert got.isfinite().all()
    assert got.dtype == dtype
    if num_tokens:
        used = cut or choose_cut(num_tokens, shape, kernels.device)
        error, size = got.float() - expected, (expected - x.float()).abs().max()
        atol = 4 * TOLERANCE[dtype] * max(1.0, size)
        if used.tile_rows and "fp8" in shape.kinds:  # tokens are rounded to 8 bits, and see `assert_narrowed`
            atol = (0.15 if IS_GPU else 0.5) * size
        # A token whose experts are nearly equally likely may go through others.
        assert (error.abs().amax(1) > atol).sum() <= (0 if dtype == torch.float32 else num_tokens // 20), error
    if IS_GPU:  # the interpreter runs one program after the other
        assert torch.equal(got, run(x))
    if num_tokens > 1:
        spoilt = x.clone()
        spoilt[0] = torch.nan
        assert torch.equal(run(spoilt)[1:], got[1:])


def _of_member(weights: ExpertWeights, matrices: list[torch.Tensor], own: range | None) -> ExpertWeights:
    """Return a member's experts, and let the others' last products be zeros."""
    if own is None:
        return weights
    num_experts, part = len(weights.down.data), slice(own.start, own.stop)
    is_others = torch.ones(num_experts, dtype=torch.bool, device=DEVICE)
    is_others[part] = False
    matrices[1] = matrices[1].masked_fill(is_others[:, None, None], 0.0)
    return replace(
        weights,
        gate_up=weights.gate_up.of_experts(part),
        down=weights.down.of_experts(part),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias[part],
        down_bias=None if weights.down_bias is None else weights.down_bias[part],
        first=own.start,
        num_others=num_experts - len(own),
    )


def check_chosen_experts(
    dtype: torch.dtype,
    num_tokens: int,
    shape: ExpertShape,
    *,
    block: tuple[int, int] = (1, 32),
    own: range | None = None,
) -> None:
    """Experts with biases and gpt-oss's gate equal plain torch in float32; those that are not `own` add nothing."""
    kernels = Kernels(dtype, seed=num_tokens)
    experts, hidden, inner = shape.num_experts, shape.hidden, shape.intermediate
    x = 3 * kernels.normal(num_tokens, hidden)  # so that limits are met
    gate_up = random_weight(kernels, (experts, 2 * inner, hidden), shape.kinds[0], block)
    down = random_weight(kernels, (experts, hidden, inner), shape.kinds[1], block)
    biases = kernels.normal(experts, 2 * inner), kernels.normal(experts, hidden)
    weights = ExpertWeights(gate_up, down, *biases, Gate(1.702, 2.0, 1.0))
    chosen = torch.rand(num_tokens, experts, device=DEVICE).topk(shape.num_chosen).indices
    shares = torch.rand(num_tokens, shape.num_chosen, device=DEVICE)
    kernel_set = CudaKernels(DEVICE, dtype, block_size=16, max_query_len=1, num_ring_entries=1)
    matrices = [weight.dequantized(torch.float32) for weight in (gate_up, down)]
    layer = kernel_set.chosen_experts(_of_member(weights, matrices, own))
    got = layer(x, chosen, shares)
    if IS_GPU:
        assert all(torch.equal(got, layer(x, chosen, shares)) for _ in range(20))  # races show in some runs alone
    expected = torch.zeros(num_tokens, hidden, device=DEVICE)
    for expert in own or range(experts):  # one by one: the matrices of all tokens' experts fit no card
        tokens, places = (chosen == expert).nonzero().unbind(1)
        between = x[tokens].float() @ matrices[0][expert].t() + biases[0][expert].float()
        y = weights.gate(*between.chunk(2, -1)) @ matrices[1][expert].t() + biases[1][expert].float()
        expected.index_add_(0, tokens, y * shares[tokens, places, None])
    error = 4 * TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got.float(), expected, atol=error, rtol=0)


def check_routing(
    num_tokens: int, num_experts: int, routing: Routing, *, has_bias: bool = False, has_correction: bool = False
) -> None:
    """Experts and weights equal those of the twin, ties and hashes of bits included: nothing is rounded here."""
    kernels = Kernels(torch.float16, seed=num_experts)
    size = 64
    x = (kernels.normal(num_tokens, size) > 0).to(torch.float16) * 2 - 1  # its root mean square is 1
    router = (kernels.normal(num_experts, size) * 2).round() / 64
    router[num_experts // 2] = router[0]  # equally likely
    bias = (kernels.normal(num_experts) * 4).round() / 4 if has_bias else None
    correction = (kernels.normal(num_experts) * 4).round().float() / 64 if has_correction else None
    got = route(x, Router(router, routing, bias, correction), 0.0, kernels.device, kernels.workspace)
    logits = x.float() @ router.float().T
    expected = choose_experts(logits if bias is None else logits + bias.float(), routing, correction)
    assert torch.equal(got.experts.long(), expected[0])
    torch.testing.assert_close(got.weights, expected[1], atol=1e-6, rtol=1e-5)


def check_arrangement(num_tokens: int, num_experts: int, num_chosen: int, tile_rows: int, spread: int) -> None:
    """Each pair is in one place, pairs of an expert are side by side in order, and tiles cover them.

    Pairs of experts behind the last, up to `spread`, are in none.
    """
    kernels = Kernels(torch.float16, seed=spread)
    x, norm_weight = kernels.normal(num_tokens, 40), kernels.normal(40)
    experts = torch.randint(0, spread, (num_tokens, num_chosen), device=DEVICE, dtype=torch.int32)
    routed = Routed(experts, torch.zeros_like(experts, dtype=torch.float32))
    got = arrange(x, norm_weight, 1e-6, routed, num_experts, tile_rows, "plain", kernels.device)
    expected_norm = reference.rms_norm(x, norm_weight, 1e-6)
    kernels.assert_close(got.normed.values, expected_norm, 4)
    of_fp8 = arrange(x, norm_weight, 1e-6, routed, num_experts, tile_rows, "fp8", kernels.device).normed
    scale = expected_norm.float().abs().amax(1, keepdim=True) / 448
    torch.testing.assert_close(of_fp8.scale, scale, atol=0, rtol=4 * TOLERANCE[torch.float16])
    kernels.assert_narrowed(of_fp8.values, expected_norm / scale, torch.float8_e4m3fn, 448)
    of_pair = experts.flatten()
    num_own = int((of_pair < num_experts).sum())
    assert torch.equal(got.pairs[:num_own].long(), torch.sort(of_pair, stable=True).indices[:num_own])
    expected, at = [], 0
    for expert in range(num_experts):
        end = at + int((of_pair == expert).sum())
        expected += [[expert, first, min(tile_rows, end - first)] for first in range(at, end, tile_rows)]
        at = end
    tiles = got.tiles.T.tolist()
    assert [tile for tile in tiles if tile[0] >= 0] == expected
    assert len(tiles) == most_tiles(len(of_pair), num_experts, tile_rows)
