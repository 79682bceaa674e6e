"""The GPU's kernels in Triton's interpreter, against their twins; on a GPU the same checks run compiled."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import kernel_checks as checks
import reference_ops as reference
import torch
from sizes import sized

from raypp.errors import ConfigError
from raypp.ops.attention import Heads
from raypp.ops.backend import Routing
from raypp.ops.cuda import router_kernels, step_attention
from raypp.ops.cuda.cuda_kernels import CudaKernels, CudaProjection, _log_dequantized
from raypp.ops.cuda.decode_attention import DecodeTuning, TritonDecode
from raypp.ops.cuda.experts import ExpertCut, ExpertShape
from raypp.ops.cuda.int4_products import (
    _BF16_FLOATS,
    _FP16_FLOATS,
    Int4Product,
    Int4Tuning,
    int4_shared_bytes,
    project_int4,
)
from raypp.ops.cuda.invariant_attention import part_of, part_start
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.packed_int4 import FP4_ORDER, _moved, pack, unpack
from raypp.ops.cuda.product_tuning import choose_projection, tune_fp8, tune_int4
from raypp.ops.cuda.projection import FEW_ROWS, Product, Tuning, shared_bytes
from raypp.ops.state_sizes import RowState
from raypp.ops.weight import Weight

# The strictest comparison; tensor cores on a GPU multiply 16 bits.
EXACT = torch.float16 if checks.IS_GPU else torch.float32


def full(*values):
    """Return values of a parameter that the interpreter is too slow for in CI: with TEST_SIZES=all, and on a GPU."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (3, 100), (0, 64)])
def test_norms(num_tokens, size):
    checks.check_norms(EXACT, num_tokens, size)


@pytest.mark.parametrize(("num_processors", "num_kv_heads"), [(1, 8), (4, 2), (132, 8), (132, 1), (142, 16)])
def test_every_cut_has_room_in_the_workspace(num_processors, num_kv_heads):
    device = Device(torch.device("cpu"), num_processors, has_dependent_launch=False)
    for query_len in (1, 2, 5, 17):
        workspace = Workspace(torch.device("cpu"))
        decode = TritonDecode(4 * num_kv_heads, num_kv_heads, 128, query_len, device, workspace)
        num_floats = workspace.floats.numel()
        for used_len in {1, query_len}:
            queries = 1 << (4 * used_len - 1).bit_length()
            for num_rows in range(1, 520):
                for cache_bytes in (1, 2):
                    num_splits = decode.cut(num_rows, used_len, cache_bytes).num_splits
                    if num_splits > 1:
                        assert num_rows * num_kv_heads * num_splits * queries * (128 + 2) <= num_floats


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
def test_every_product_fits_the_shared_memory(shared_kib):
    """Of compute capability 8.9, 8.0 and 9.0; where there is enough, nothing is cut."""
    device = Device(torch.device("cpu"), 128, has_dependent_launch=False, shared_bytes=shared_kib << 10)
    roomy = replace(device, shared_bytes=1 << 30)
    for num_outputs, num_inputs, is_gated in ((6144, 4096, False), (4096, 12288, False), (12288, 2048, True)):
        shape = num_outputs * (2 if is_gated else 1), num_inputs
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            scale = torch.ones(shape[0], 1) if dtype.itemsize == 1 else None
            weight = Weight(torch.empty(shape, dtype=dtype, device="meta"), scale, block=(1, shape[1]))
            product = Product(weight, is_gated=is_gated)
            for num_rows in range(FEW_ROWS + 1, 65):
                if (tuning := choose_projection(num_rows, product, device)) is not None:
                    assert shared_bytes(num_rows, product, tuning) <= device.shared_bytes
                    assert shared_kib < 227 or tuning == choose_projection(num_rows, product, roomy)


@pytest.mark.parametrize(
    ("head_dim", "shared_kib", "num_stages"), [(128, 227, 2), (256, 227, 2), (128, 99, 2), (256, 99, 1)]
)
def test_large_tiles_of_attention_fit_the_shared_memory(head_dim, shared_kib, num_stages):
    """Compiled they take 16 KiB besides: 80 and 140 KiB with two stages."""
    device = Device(torch.device("cpu"), 128, has_dependent_launch=False, shared_bytes=shared_kib << 10)
    decode = TritonDecode(8, 8, head_dim, 5, device, Workspace(torch.device("cpu")))
    tuning = decode.cut(64, 5)
    assert tuning.tile_tokens == 128
    assert tuning.num_stages == num_stages


@pytest.mark.parametrize(
    ("heads", "query_len", "cut"),
    [
        ((32, 4, 128), 17, (64, 2)),
        ((64, 4, 128), 16, (64, 2)),
        ((16, 8, 256), 17, (64, 1)),
        ((32, 8, 256), 17, (32, 1)),
    ],
)
def test_attention_of_many_drafts_fits_the_shared_memory(heads, query_len, cut):
    """Of compute capability 8.6, 8.9 and 12.0; where there is more, nothing is cut."""
    roomy = Device(torch.device("cpu"), 128, has_dependent_launch=False, shared_bytes=1 << 30)
    for shared_kib in (99, 163, 227):
        device, workspace = replace(roomy, shared_bytes=shared_kib << 10), Workspace(torch.device("cpu"))
        tuning = TritonDecode(*heads, query_len, device, workspace).cut(32, query_len)
        assert (tuning.tile_tokens, tuning.num_stages) == (cut if shared_kib == 99 else (64, 2))


def test_attention_of_too_many_drafts_says_how_many_fit():
    def decode(kib):
        device = Device(torch.device("cpu"), 128, has_dependent_launch=False, shared_bytes=kib << 10)
        return TritonDecode(64, 4, 128, 17, device, Workspace(torch.device("cpu")))

    assert decode(99).cut(1, 17).num_shares == 2  # programs that have eight heads each
    with pytest.raises(ConfigError) as raised:
        decode(12).cut(1, 17)
    assert raised.value.got == "16 drafts, 12 KiB"
    assert raised.value.expected == "at most 15 drafts, with heads of 128"


def test_fewer_bits():
    checks.check_narrow(EXACT, 3, 700)


def test_joined_norms():
    checks.check_joined_norms(EXACT, 3, 100)


def test_gate():
    checks.check_gate(EXACT, 3, 48)
    checks.check_gate(EXACT, 1, 1100)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 1, 24), (2, 2, 8)])
def test_heads(heads, has_norm):
    checks.check_heads(EXACT, 5, *heads, has_norm)


@pytest.mark.parametrize(("num_patches", "num_heads", "head_dim"), [(3, 2, 72), (1, 5, 16), (0, 2, 16)])
def test_heads_of_a_vision_tower(num_patches, num_heads, head_dim):
    checks.check_vision_heads(EXACT, num_patches, num_heads, head_dim)


@pytest.mark.parametrize(
    ("tuning", "query_len"),
    [
        (None, 1),
        full(None, 3),
        full(DecodeTuning(1, 16), 1),
        full(DecodeTuning(1, 16), 3),
        full(DecodeTuning(2, 32), 1),
        (DecodeTuning(2, 32), 3),
        full(DecodeTuning(8, 16), 1),
        full(DecodeTuning(8, 16), 3),
    ],
)
def test_decode(query_len, tuning):
    checks.check_decode(EXACT, [33, query_len, 70, 16, 17], query_len, 4, 2, 16, tuning, block_size=8)


def test_decode_of_odd_heads():
    checks.check_decode(EXACT, [40, 5], 2, 6, 2, 24)
    checks.check_decode(EXACT, [40, 5], 5, 8, 1, 16)  # 40 queries per KV head


def test_decode_of_many_drafts_with_little_shared_memory():
    device = Device(torch.device("cpu"), 128, has_dependent_launch=False, shared_bytes=99 << 10)
    tuning = TritonDecode(4, 1, 256, 17, device, Workspace(torch.device("cpu"))).cut(200, 17)
    assert (tuning.tile_tokens, tuning.num_stages) == (32, 1)
    checks.check_decode(EXACT, [50, 17], 17, 4, 1, 256, tuning)


def test_decode_of_more_queries_than_a_program_can_have():
    device = Device(torch.device("cpu"), 128, has_dependent_launch=False, shared_bytes=227 << 10)

    def num_shares(heads, query_len):
        num_heads, num_kv_heads, *sizes = heads
        decode = TritonDecode(num_heads, num_kv_heads, sizes[0], 17, device, Workspace(torch.device("cpu")), sizes[-1])
        return decode.cut(2, query_len).num_shares

    assert [num_shares((8, 2, 512), query_len) for query_len in (1, 16, 17)] == [1, 1, 2]
    assert [num_shares((16, 1, 512), query_len) for query_len in (1, 4, 5, 17)] == [1, 1, 2, 8]
    assert num_shares((64, 4, 192, 128), 17) == 2  # 272 queries per KV head
    tuning = DecodeTuning(2, 16, num_shares=2)
    settings = {"window": 20, "has_sinks": True, "v_dim": 8}
    checks.check_decode(EXACT, [75, 3, 33], 3, 8, 2, 16, tuning, 8, **settings)
    checks.check_fused_decode(EXACT, [75, 3, 33], 3, 8, 2, 16, False, tuning, **settings)
    checks.check_fused_decode(EXACT, [33, 1], 1, 6, 2, 24, True, DecodeTuning(1, 32, num_shares=3), (0.03, 2.0))


@pytest.mark.parametrize(("heads", "scales"), [full((4, 2, 16), (0.03, 2.0)), ((3, 1, 24), (1.0, 1.0))])
def test_fp8_kv(heads, scales):
    checks.check_heads(EXACT, 5, *heads, True, scales)
    for query_len, tuning in ((1, DecodeTuning(2, 32)), (3, DecodeTuning(1, 16))):
        checks.check_decode(EXACT, [33, query_len, 40], query_len, *heads, tuning, 8, scales)
        checks.check_fused_decode(EXACT, [33, query_len, 40], query_len, *heads, query_len == 1, tuning, scales)


@pytest.mark.parametrize(
    ("lens", "query_len", "settings"),
    [
        ([75, 3, 33], 3, {"window": 20}),  # the first rows' queries do not see each other's window
        ([75, 40], 5, {"window": 2}),  # shorter than the drafts
        ([75, 16, 1], 1, {"window": 17, "has_sinks": True, "soft_cap": 2.0}),
        ([20, 40], 2, {"window": 100, "has_sinks": True}),  # longer than all rows
        ([50, 7], 1, {"v_dim": 32, "soft_cap": 5.0, "scale": 0.7}),
        ([50, 7], 3, {"v_dim": 8, "window": 9, "has_sinks": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tuning", [DecodeTuning(1, 16), DecodeTuning(4, 16)], ids=["1", "4"])
def test_decode_of_all_kinds(lens, query_len, settings, tuning):
    heads = 4, 2, 16
    checks.check_decode(EXACT, lens, query_len, *heads, tuning, 8, **settings)
    checks.check_fused_decode(EXACT, lens, query_len, *heads, query_len == 1, tuning, **settings)


@pytest.mark.parametrize(
    ("heads", "lens", "query_len", "settings"),
    [
        ((4, 2, 16), [700, 3, 256, 300], 3, {}),
        ((4, 1, 16), [75, 600], 20, {}),  # more tokens than a program has
        ((4, 2, 16), [700, 16, 1], 1, {"window": 300, "has_sinks": True, "soft_cap": 2.0}),
        ((2, 2, 24), [600, 257], 2, {"window": 20}),
        full((2, 1, 16), [5200, 40], 1, {"v_dim": 32}),  # parts of two lengths
        full((3, 1, 24), [300, 7], 3, {"scales": (0.03, 2.0)}),
    ],
    ids=str,
)
def test_attention_whose_bits_depend_on_positions_alone(heads, lens, query_len, settings, monkeypatch):
    if not checks.IS_GPU:
        checks.sum_products_in_order(monkeypatch)  # a library's order depends on the processor, and on where a row is
    checks.check_invariant_attention(EXACT, heads, lens, query_len, **settings)


def test_parts_of_invariant_attention_follow_each_other():
    starts = [part_start(part) for part in range(60)]
    assert starts == sorted(set(starts))
    assert starts[:2] == [0, 256]
    assert all(start % 64 == 0 for start in starts)
    for part, start in enumerate(starts):
        assert part_of(start) == part
        assert part_of(max(0, start - 1)) == max(0, part - 1)


def test_windows_of_many_splits():
    """Only what lies in a window is split; queries whose window does not reach into a split take nothing from it."""
    tuning = DecodeTuning(4, 16)
    checks.check_decode(EXACT, [900, 300], 3, 2, 1, 16, tuning, window=450, has_sinks=True)
    checks.check_decode(EXACT, [600], 40, 1, 1, 16, tuning, window=2)


@pytest.mark.parametrize(
    ("heads", "rotary_dim", "has_gate"), [((4, 2, 16), 4, True), ((3, 1, 24), 12, False), ((2, 2, 8), None, True)]
)
def test_heads_that_are_rotated_in_part_or_gated(heads, rotary_dim, has_gate):
    checks.check_heads(EXACT, 5, *heads, True, rotary_dim=rotary_dim, has_gate=has_gate)


@pytest.mark.parametrize("scales", [None, (0.5, 2.0)], ids=["32 bits", "fp8_kv"])
def test_values_that_are_keys(scales):
    heads = 6, 2, 16
    for has_norm in (True, False):
        checks.check_heads(EXACT, 5, *heads, has_norm, scales, values_are_keys=True)
        checks.check_fused_decode(EXACT, [33, 3], 3, *heads, has_norm, None, scales, values_are_keys=True)
    checks.check_heads(EXACT, 5, 4, 1, 24, True, scales, rotary_dim=12, has_gate=True, values_are_keys=True)


@pytest.mark.parametrize(
    ("shape", "block_size", "max_drafts"),
    [
        ((1, 3, 8, 12, 4), 4, 0),
        ((2, 2, 16, 16, 3), 16, 3),
        full((2, 4, 12, 8, 2), 8, 7),
        full((1, 1, 16, 20, 4), 4, 16),
    ],
)
def test_gated_delta(shape, block_size, max_drafts):
    checks.check_gated_delta(EXACT, RowState(*shape, "float32"), block_size, max_drafts)


def test_fp8_kv_of_all_kinds():
    settings = {"window": 19, "soft_cap": 3.0, "has_sinks": True, "v_dim": 24}
    checks.check_heads(EXACT, 5, 4, 2, 16, True, (0.5, 2.0), v_dim=24)
    checks.check_decode(EXACT, [60, 3], 2, 4, 2, 16, DecodeTuning(2, 16), 8, (0.5, 2.0), **settings)
    checks.check_fused_decode(EXACT, [60, 3], 2, 4, 2, 16, True, DecodeTuning(2, 16), (0.5, 2.0), **settings)


@pytest.mark.parametrize("v_dim", [8, 24])
def test_heads_of_values_may_have_another_size(v_dim):
    checks.check_heads(EXACT, 5, 4, 2, 16, True, v_dim=v_dim)


@pytest.mark.parametrize("settings", [{"window": 5, "has_sinks": True, "v_dim": 24}, {"soft_cap": 2.0}, {}], ids=str)
def test_attention_of_mixed_steps_of_all_kinds(settings):
    kernels, device = checks.Kernels(EXACT), checks.DEVICE
    chosen = CudaKernels(device, EXACT, block_size=8, max_query_len=1, num_ring_entries=1)
    chosen.attention(Heads(2, 2, 8))  # of another kind: plans are by kind
    for prefill in ([], [(7, 7), (3, 30)]):
        checks.check_mixed_step(kernels, chosen, prefill, checks.made_heads(4, 2, 16, **settings), 8)
    spans = [[(0, 3), (3, 6)], [(2, 13)], []]
    for each in (None, spans):
        heads = checks.made_heads(4, 2, 16, **settings)
        checks.check_mixed_step(kernels, chosen, [(7, 7), (14, 40), (5, 20)], heads, 8, spans=each)


@pytest.mark.parametrize("settings", [{}, {"window": 5, "has_sinks": True}, {"values_are_keys": True}], ids=str)
def test_prompts_of_wide_heads_go_through_the_kernel_of_decode_rows(settings, monkeypatch):
    """Piece by piece, and token by token what is left; several launches where pieces are many."""
    for name, value in {"MOST_OF_TORCH": 8, "PIECE_TOKENS": 4, "NUM_COUNTERS": 12}.items():
        monkeypatch.setattr(step_attention, name, value)
    monkeypatch.setattr(step_attention, "_on_host", lambda values: torch.tensor(values, dtype=torch.int32))
    for prefill in ([(7, 7), (3, 30)], [(16, 40), (1, 1)]):
        chosen = CudaKernels(checks.DEVICE, EXACT, block_size=8, max_query_len=1, num_ring_entries=1)
        checks.check_mixed_step(checks.Kernels(EXACT), chosen, prefill, checks.made_heads(4, 2, 16, **settings), 8)


@pytest.mark.parametrize("scales", [None, (0.03, 2.0)])
def test_keys_and_values_of_prompts_are_copied(scales):
    checks.check_gather(EXACT, [40, 5, 16, 1], 3, scales)
    checks.check_gather(EXACT, [40, 5], 2, scales, v_dim=24)


def test_rotation_is_scaled():
    checks.check_rotation(5, 24, 1.25)
    checks.check_rotation(1, 128, 1.0)


def test_lengths_past_the_table_are_cut():
    checks.check_cut_lengths(EXACT)


@pytest.mark.parametrize(("query_len", "has_norm"), [(1, True), full(1, False), full(3, True), (3, False)])
def test_decode_from_projection(query_len, has_norm):
    seq_lens = [33, query_len, 70, 16, 17]  # one has no context yet
    checks.check_fused_decode(EXACT, seq_lens, query_len, 4, 2, 16, has_norm, DecodeTuning(4, 16))
    checks.check_fused_decode(EXACT, seq_lens[:2], query_len, 6, 2, 24, has_norm)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("sizes", [(((16, 16), (16, 16)), 9, 5), (((1030, 6), (6, 24)), 5, 2), (((3, 3),), 3, 1)])
def test_block_moves(sizes, dtype):
    checks.check_block_moves(*sizes, dtype)


@pytest.mark.parametrize(
    ("num_rows", "query_len", "num_entries", "width", "has_prompts"),
    [(1, 1, 1, 5, False), (4, 3, 9, 20, False), (7, 1, 7, 3, False), (3, 1, 0, 4, False), (5, 3, 300, 90, True)],
)
def test_row_inputs(num_rows, query_len, num_entries, width, has_prompts):
    for num_groups in (1, 3):
        sizes = num_rows, query_len, num_entries, width
        checks.check_row_inputs(*sizes, has_prompts=has_prompts, num_groups=num_groups)


@pytest.mark.parametrize("num_rows", [full(1), 3, full(17)])  # more rows are in the tests that follow
def test_projections(num_rows):
    for has_norm, is_gated, has_bias, has_residual, has_8_bits in itertools.product((False, True), repeat=5):
        if not ((is_gated and has_residual) or (has_norm and num_rows > FEW_ROWS)):
            checks.check_projection(
                EXACT,
                num_rows,
                40,
                96,
                Tuning(16, 32),
                has_norm=has_norm,
                is_gated=is_gated,
                has_bias=has_bias,
                has_residual=has_residual,
                has_8_bits=has_8_bits,
            )


@pytest.mark.parametrize("reads", checks.NARROW)
def test_projections_of_8_bits_in_8_bits(reads):
    for is_gated, num_splits in ((True, 1), (False, 1), (False, 3)):
        tuning = Tuning(16, 32, num_splits)
        checks.check_projection(
            EXACT, 5, 40, 200, tuning, is_gated=is_gated, has_residual=not is_gated, has_8_bits=True, reads=reads
        )


@pytest.mark.parametrize("num_inputs", [full(32), full(64), 80, full(200)])
def test_projections_of_uneven_pieces(num_inputs):
    checks.check_projection(EXACT, 1, 24, num_inputs, Tuning(4, 128), has_norm=True)
    checks.check_projection(EXACT, 1, 24, num_inputs, Tuning(4, 64, num_stages=1), has_residual=True)
    checks.check_projection(EXACT, 2, 24, num_inputs, Tuning(4, 64), has_norm=True, is_gated=True)
    for num_splits in (1, 2, 4):  # also more parts than pieces
        checks.check_projection(EXACT, 5, 24, num_inputs + 200, Tuning(16, 128, num_splits), is_gated=num_splits == 1)
        checks.check_projection(EXACT, 5, 24, num_inputs, Tuning(16, 32, num_splits), has_bias=True, has_residual=True)


@pytest.mark.full
def test_in_8_bits_some_rows_are_rounded_and_many_are_not():
    checks.check_products_in_8_bits(EXACT, 96, 200)
    checks.check_mlp_in_8_bits(torch.float16, 96, 64)


QUANTIZED = [
    full("fp8", (1, 0)),  # as in test_quantized_models.py
    ("fp8", (32, 32)),
    full("fp8", (1, 32)),
    ("int4", (1, 32)),
    full("int4", (1, 64)),
    full("int4", (1, 0)),  # as those of many rows
    ("fp4", (1, 32)),
]


@pytest.mark.parametrize(("kind", "block"), QUANTIZED)
def test_quantized_projections(kind, block):
    random = checks.Kernels(EXACT)
    for num_outputs, num_inputs, has_zeros in ((40, 96, True), (72, 160, False)):
        if num_inputs % (block[1] or 1) and kind != "fp8":
            continue
        weight = checks.quantized_weight(random, kind, num_outputs, num_inputs, block, has_zeros=has_zeros)
        rows = (0, 1, 2, 3, 17)
        checks.check_quantized_projections(EXACT, weight, rows, has_norm=True, has_bias=has_zeros)
        checks.check_quantized_projections(EXACT, weight, rows, has_residual=True, has_bias=not has_zeros)
        checks.check_quantized_projections(EXACT, weight, (1, 2, 5), is_gated=True, has_norm=True, has_bias=has_zeros)
        checks.check_quantized_projections(EXACT, weight, (1, 5), x_scale=1e4)


@pytest.mark.parametrize("group", [full(32), 64])
def test_cuts_of_int4(group):
    """Rounds of several pieces that end past the inputs, splits without a piece, gates in splits, folded scales."""
    random = checks.Kernels(EXACT)
    random.workspace.reserve(1 << 20)
    weight = checks.quantized_weight(random, "int4", 160, 192, (1, group), has_zeros=True)
    x = random.normal(11, 192)
    for is_gated in (False, True):
        product = Int4Product(pack(weight, 2 if is_gated else 1), is_gated=is_gated)
        expected = reference.linear(x, weight.dequantized(EXACT), is_gated=is_gated)
        for cut in (Int4Tuning(1, 3, pieces=2), Int4Tuning(2, 4, most_rows=8), Int4Tuning(2, 2, pieces=4, folds=True)):
            for _ in range(2):  # the counters are at 0 again
                y = project_int4(x, product, None, cut, random.device, random.workspace)
                random.assert_close(y, expected, 4)


@pytest.mark.parametrize(("kind", "group"), [full("fp8", 0), ("int4", 0), full("fp4", 32)])
def test_quantized_projections_of_many_rows(kind, group):
    weight = checks.quantized_weight(checks.Kernels(EXACT), kind, 40, 64, (1, group), has_order=True)
    checks.check_quantized_projections(EXACT, weight, (65, 257), has_norm=True, is_gated=True, has_bias=True)
    checks.check_quantized_projections(EXACT, weight, (129, 257), has_residual=True)


def test_weights_without_a_kernel_become_16_bits(caplog):
    """Of an older device, of blocks that no kernel knows, of a draft head."""
    random = checks.Kernels(EXACT)
    _log_dequantized.cache_clear()
    for kind, block, has_fp8 in (("fp8", (1, 0), False), ("fp8", (1, 12), True), ("int4", (2, 32), True)):
        weight = checks.quantized_weight(random, kind, 24, 96, block)
        kernels = CudaKernels(checks.DEVICE, EXACT, block_size=16, max_query_len=1, num_ring_entries=1)
        kernels._device = replace(kernels._device, has_fp8=has_fp8)
        x = random.normal(3, 96)
        expected = reference.linear(x, weight.dequantized(EXACT))
        caplog.clear()
        for _ in range(2):
            projection = kernels.linear(weight)
            assert isinstance(projection, CudaProjection)
            random.assert_close(projection(x), expected, 4)
        assert len(caplog.records) == 1
    weight = checks.quantized_weight(random, "fp8", 24, 96, (1, 0))
    assert isinstance(kernels.in_8_bits().linear(weight), CudaProjection)


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
def test_every_quantized_product_fits_shared_memory_and_workspace(shared_kib):
    """Of compute capability 8.9, 8.0 and 9.0. Only so many rows reserve workspace: more have no splits."""
    device = Device(torch.device("meta"), 132, has_dependent_launch=False, shared_bytes=shared_kib << 10)
    for num_outputs, num_inputs, is_gated in ((6144, 4096, False), (1024, 512, False), (2048, 1024, True)):
        for block in ((1, num_inputs), (128, 128)):
            data = torch.empty(num_outputs, num_inputs, dtype=torch.float8_e4m3fn, device="meta")
            scale = torch.ones(num_outputs // block[0], num_inputs // block[1], device="meta")
            fp8 = Product(Weight(data, scale, block=block), is_gated=is_gated)
            for num_rows in (2, 16, 17, 33, 65, 128, 129, 200):
                tuning = tune_fp8(num_rows, fp8, device)
                assert shared_bytes(num_rows, fp8, tuning) <= device.shared_bytes
                assert num_rows <= 128 or tuning.num_splits == 1
        for group in (32, 128):
            data = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8, device="meta")
            scale = torch.ones(num_outputs, num_inputs // group, device="meta")
            int4 = Int4Product(pack(Weight(data, scale, block=(1, group)), 2 if is_gated else 1), is_gated=is_gated)
            for num_rows in (1, 8, 32, 33, 128, 256):
                assert int4_shared_bytes(num_rows, int4, tune_int4(num_rows, int4, device)) <= device.shared_bytes


def test_instructions_that_expand_floats():
    """Carried out here, as no interpreter of Triton does: each number of eight bytes gives the 16 floats it was."""
    nibbles = torch.randint(0, 256, (50, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    numbers = _moved(nibbles.view(torch.int64), FP4_ORDER)
    for asm, low_bit in ((_BF16_FLOATS.value, 6), (_FP16_FLOATS.value, 9)):
        for eight, number in zip(nibbles.tolist(), numbers.flatten().tolist(), strict=True):
            codes = [byte & 15 for byte in eight] + [byte >> 4 for byte in eight]
            assert floats_of(asm, number) == [(code >> 3) << 15 | (code & 7) << low_bit for code in codes]


def floats_of(asm: str, number: int) -> list[int]:
    """Return what registers $0 to $15 hold after the instructions of PTX."""
    registers: dict[str, int] = {}
    for instruction in re.findall(r"(?:mov|shl|shf|and|lop3)\.[^;]*;", asm):
        name, *words = re.findall(r"0x\w+|[$\w.]+", instruction)
        if name == "mov.b64":
            registers[words[0]], registers[words[1]] = number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF
        elif name == "mov.b32" and len(words) == 3:
            registers[words[0]], registers[words[1]] = registers[words[2]] & 0xFFFF, registers[words[2]] >> 16
        else:
            target, *operands = words
            values = [registers[word] if word in registers else int(word, 0) for word in operands]
            registers[target] = OPERATIONS[name](*values) & 0xFFFFFFFF
    return [registers[f"${index}"] for index in range(16)]


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, places: a << places,
    "shf.l.wrap.b32": lambda a, b, places: a >> (32 - places) | b << places,
    "shf.r.wrap.b32": lambda a, b, places: a >> places | b << (32 - places),
    "lop3.b32": lambda a, b, c, table: sum(
        (table >> (4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)) & 1) << bit for bit in range(32)
    ),
}


def test_packed_codes_unpack():
    for kind, num_outputs, num_inputs, group, num_parts, has_zeros in (
        ("int4", 130, 192, 64, 2, True),
        ("int4", 64, 256, 128, 1, False),
        ("int4", 96, 96, 32, 1, True),
        ("int4", 70, 160, 0, 1, False),
        ("fp4", 96, 96, 32, 1, False),
    ):
        random = checks.Kernels(EXACT)
        weight = checks.quantized_weight(random, kind, num_outputs, num_inputs, (1, group), has_zeros=has_zeros)
        packed = pack(weight, num_parts)
        assert packed.num_bytes < 2.1 * max(128 * num_parts, num_outputs) * (num_inputs + 64)
        unpacked = unpack(packed)
        assert torch.equal(unpacked.data.view(torch.uint8), weight.data.view(torch.uint8))
        assert torch.equal(unpacked.dequantized(EXACT), weight.dequantized(EXACT))
    weight = checks.quantized_weight(checks.Kernels(EXACT), "fp4", 70, 160, (1, 32))
    assert torch.equal(unpack(pack(weight)).dequantized(EXACT), weight.dequantized(EXACT))


@pytest.mark.parametrize(("size", "block"), [(96, 32), (96, 96), (1100, 128), (1100, 2000)])
def test_quantized_tokens(size, block):
    checks.check_quantized_tokens(EXACT, 3, size, block)
    checks.check_quantized_tokens(EXACT, 0, size, block)


def test_lm_head():
    checks.check_lm_head(EXACT, 48, 64, sized((0, 1, 3, checks.MAX_ROWS + 1), (0, 1, 2, 3, checks.MAX_ROWS + 1)))


@pytest.mark.parametrize(
    ("num_experts", "routing"),
    [(3, Routing(1, True)), (5, Routing(4, False)), (60, Routing(6, True)), (60, Routing(6, True, is_even=True))],
)
def test_routing(num_experts, routing):
    for num_tokens in (1, 11):
        checks.check_routing(num_tokens, num_experts, routing)


@pytest.mark.parametrize(
    ("num_experts", "routing", "has_bias", "has_correction"),
    [
        (32, Routing(4, True), True, False),  # gpt-oss
        (128, Routing(8, True, has_sigmoid=True), False, True),  # GLM-4.5-Air, MiniMax-M2
        (64, Routing(8, True, False, True, 8, 4, 2, 2.5), False, True),  # DeepSeek-V3, smaller
        (60, Routing(6, False, False, False, 6, 3, 1, 16.0), True, False),  # DeepSeek-V2
        (60, Routing(6, True, True, True, 6, 3, 2), True, True),
    ],
)
def test_routing_of_other_kinds(num_experts, routing, has_bias, has_correction):
    for num_tokens in (1, 11):
        checks.check_routing(num_tokens, num_experts, routing, has_bias=has_bias, has_correction=has_correction)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "tile_rows", "spread"),
    [
        (1, 5, 2, 8, 5),
        (20, 3, 1, 4, 3),
        full(9, 60, 6, 8, 60),
        (40, 5, 2, 16, 1),
        (7, 4, 3, 1, 2),
        (20, 3, 2, 4, 6),  # as a member of two has it
        (7, 1, 3, 1, 500),  # without a pair
    ],
)
def test_arrangement(num_tokens, num_experts, num_chosen, tile_rows, spread):
    checks.check_arrangement(num_tokens, num_experts, num_chosen, tile_rows, spread)


@pytest.mark.parametrize("cut", [ExpertCut(0, Tuning(4, 32), Tuning(4, 16)), None], ids=["few", "chosen"])
def test_experts_of_gemma(cut):
    for num_tokens, shape in ((1, ExpertShape(64, 48, 5, 2)), (sized(5, 11), ExpertShape(96, 40, 12, 3))):
        checks.check_experts(EXACT, num_tokens, shape, cut, is_gemma=True)


def test_arrangement_of_many_pairs(monkeypatch):
    """By several programs per expert, which do not count the pairs of others."""
    for limit, value in {"_SEGMENT": 32, "_MOST_SORTED_AT_ONCE": 16, "_MOST_COMPARED": 0}.items():
        monkeypatch.setattr(router_kernels, limit, value)
    checks.check_arrangement(45, 5, 2, 8, 4)
    checks.check_arrangement(45, 5, 2, 8, 9)


FEW, TILES = ExpertCut(0, Tuning(4, 32), Tuning(4, 16)), ExpertCut(8, Tuning(16, 32), Tuning(16, 32))
SPLIT = ExpertCut(16, Tuning(64, 128, num_splits=2), Tuning(64, 64, num_splits=3))
"""Of products of 4 bits."""


@pytest.mark.parametrize("cut", [FEW, TILES, None], ids=["few", "tiles", "chosen"])
@pytest.mark.parametrize(
    ("num_tokens", "shape"),
    [
        (1, ExpertShape(64, 48, 5, 2)),
        (2, ExpertShape(96, 40, 3, 1)),
        full(3, ExpertShape(100, 24, 12, 6)),
        (0, ExpertShape(64, 48, 5, 2)),
    ],
)
def test_experts(num_tokens, shape, cut):
    checks.check_experts(EXACT, num_tokens, shape, cut)


EXPERTS_IN_FEWER_BITS = (
    (("fp8", "fp8"), ((128, 128), (128, 128)), False),
    (("fp8", "fp8"), ((1, 160), (1, 192)), False),  # a scale per output
    (("int4", "int4"), ((1, 32), (1, 64)), True),
    (("int4", "int4"), ((1, 160), (1, 128)), False),
    (("plain", "fp8"), ((1, 1), (192, 192)), False),
    (("fp8", "int4"), ((40, 32), (1, 32)), False),  # the first is widened
    (("fp4", "fp4"), ((1, 32), (1, 32)), False),
)
EXPERTS_IN_CI = ((TILES, EXPERTS_IN_FEWER_BITS[0]), (FEW, EXPERTS_IN_FEWER_BITS[3]), (SPLIT, EXPERTS_IN_FEWER_BITS[2]))


of_experts_in_fewer_bits = pytest.mark.parametrize(
    ("cut", "kinds", "blocks", "has_zero"),
    [
        pytest.param(cut, *values, marks=[] if (cut, values) in EXPERTS_IN_CI else pytest.mark.full)
        for cut in (FEW, TILES, SPLIT)
        for values in EXPERTS_IN_FEWER_BITS
        if cut is not SPLIT or values[0] in (("int4", "int4"), ("fp4", "fp4"))
    ],
)


@of_experts_in_fewer_bits
def test_experts_in_fewer_bits(cut, kinds, blocks, has_zero):
    if cut is not SPLIT:
        cut = replace(cut, gate_up=Tuning(32, 32), down=Tuning(32, 16))
    checks.check_experts(EXACT, 2, ExpertShape(160, 192, 3, 2, kinds), cut, blocks=blocks, has_zero=has_zero)


@pytest.mark.parametrize(("kind", "num_tokens"), [("fp4", 2), ("fp4", 20), full("plain", 2), full("plain", 20)])
def test_experts_with_biases_and_limits(kind, num_tokens):
    """Two tokens go element by element, twenty by tensor cores."""
    checks.check_chosen_experts(EXACT, num_tokens, ExpertShape(64, 32, 3, 2, (kind, kind)))


@pytest.fixture
def nothing_is_read_unwritten():
    """Memory that is not written holds no numbers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("cut", [FEW, TILES, None], ids=["few", "tiles", "chosen"])
@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "same_experts"), [(1, 2, False), (9, 1, True), full(3, 4, False), full(33, 2, False)]
)
@pytest.mark.usefixtures("nothing_is_read_unwritten")
def test_experts_of_a_member(num_tokens, num_chosen, same_experts, cut):
    """Of three: with some pairs, with none, and with all where each token has one and the same."""
    if same_experts and cut is not TILES:  # which have eight rows
        num_tokens = sized(4, num_tokens)
    for first in (0, 2, 4):
        shape, own = ExpertShape(64, 40, 6, num_chosen), range(first, first + 2)
        checks.check_experts(EXACT, num_tokens, shape, cut, same_experts=same_experts, own=own)


@of_experts_in_fewer_bits
def test_experts_of_a_member_in_fewer_bits(cut, kinds, blocks, has_zero):
    if cut is not SPLIT:
        cut = replace(cut, gate_up=Tuning(32, 32), down=Tuning(32, 16))
    shape = ExpertShape(160, 192, 4, 2, kinds)
    checks.check_experts(EXACT, 3, shape, cut, blocks=blocks, has_zero=has_zero, own=range(2, 4))


@pytest.mark.parametrize(("kind", "num_tokens"), [("fp4", 20), ("plain", 2), full("fp4", 2), full("plain", 20)])
@pytest.mark.usefixtures("nothing_is_read_unwritten")
def test_experts_of_a_member_with_biases(kind, num_tokens):
    """Two tokens of one member's experts: others' biases are theirs."""
    for own in (range(2), range(2, 4)):
        checks.check_chosen_experts(EXACT, num_tokens, ExpertShape(64, 32, 4, 2, (kind, kind)), own=own)


def test_experts_that_all_tokens_choose():
    checks.check_experts(EXACT, 9, ExpertShape(64, 40, 3, 2), TILES, normalizes=False, same_experts=True)


def test_products_of_no_rows():
    checks.check_products_of_no_rows(EXACT)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 100), full(5, 5000), full(3, 9001), (2, 4500)])
def test_sampling(num_rows, vocab_size):
    checks.check_sampling(EXACT, num_rows, vocab_size)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3, 300), (4, 17000)])
def test_logprobs(num_rows, vocab_size):
    checks.check_logprobs(num_rows, vocab_size)


@pytest.mark.parametrize(("num_rows", "num_drafts", "vocab_size"), [(4, 0, 300), full(3, 2, 9000), (2, 1, 4500)])
def test_adjusted_logits(num_rows, num_drafts, vocab_size):
    checks.check_adjust(num_rows, num_drafts, vocab_size)


def test_rows_without_a_best():
    checks.check_rows_without_a_best(300)


@pytest.mark.full
def test_half_precision():
    half = torch.float16
    checks.check_norms(half, 3, 100)
    checks.check_gate(half, 3, 48)
    checks.check_heads(half, 5, 4, 2, 16, True)
    checks.check_decode(half, [33, 5], 2, 4, 2, 16)
    checks.check_fused_decode(half, [33, 5], 2, 4, 2, 16, True)
    checks.check_projection(half, 1, 24, 96, Tuning(4, 64), has_norm=True, is_gated=True)
    checks.check_projection(half, 2, 24, 96, Tuning(4, 64), has_norm=True, has_residual=True)
    checks.check_projection(half, 6, 24, 96, Tuning(16, 32, 2), has_bias=True, has_residual=True)
    checks.check_projection(half, 1, 24, 96, Tuning(4, 64), has_8_bits=True)
    checks.check_projection(half, 2, 24, 96, Tuning(4, 64), is_gated=True, has_8_bits=True)
    checks.check_projection(half, 5, 24, 96, Tuning(16, 32, 2), has_residual=True, has_8_bits=True)
    checks.check_projection(half, 9, 24, 96, Tuning(16, 32), is_gated=True, has_8_bits=True)
    checks.check_experts(half, 3, ExpertShape(64, 48, 5, 2), FEW)
    checks.check_experts(half, 3, ExpertShape(64, 48, 5, 2), TILES)
    int4, blocks = ExpertShape(64, 64, 3, 2, ("int4", "int4")), ((1, 32), (1, 32))
    checks.check_experts(half, 3, int4, TILES, blocks=blocks, has_zero=True)
    checks.check_sampling(half, 4, 600)
