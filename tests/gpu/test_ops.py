"""Each kernel against its twin on shapes of real models, and inside CUDA graphs; FlashInfer's attention against its."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import kernel_checks as checks
import reference_ops as reference

from raypp.ops.attention import AttentionBatch, HeadNorm, Heads
from raypp.ops.backend import Routing
from raypp.ops.block_store import Planes
from raypp.ops.cpu.torch_kernels import TorchKernels
from raypp.ops.cuda.block_kernels import KernelBlockMover
from raypp.ops.cuda.cuda_kernels import CudaProjection
from raypp.ops.cuda.decode_attention import DecodeTuning, TritonDecode
from raypp.ops.cuda.experts import ExpertCut, ExpertShape
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.product_tuning import MAX_ROWS, choose_projection, input_type_in_8_bits
from raypp.ops.cuda.projection import FEW_ROWS, Product, Tuning, fold_norm
from raypp.ops.cuda.step_attention import FlashInferPrefill, SdpaPrefill, missing_for_flashinfer
from raypp.ops.device_kernels import choose_kernels
from raypp.ops.kv_cache import FP8, LayerCache
from raypp.ops.state_sizes import RowState
from raypp.ops.weight import Weight

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
BLOCK_SIZE = 16
HEADS_8B = (32, 8, 128)
EXPERT_SHAPES = [ExpertShape(512, 192, 60, 4), ExpertShape(2048, 768, 128, 8), ExpertShape(1024, 3584, 8, 2)]
KINDS = [
    ((32, 8, 128), {"window": 1000}),
    ((32, 8, 128), {"window": 3, "has_sinks": True}),  # shorter than drafts
    ((64, 8, 64), {"window": 128, "has_sinks": True}),  # gpt-oss
    ((64, 8, 64), {"has_sinks": True}),
    ((32, 16, 128), {"window": 600, "soft_cap": 50.0, "scale": 0.083}),  # Gemma 2
    ((16, 8, 256), {"window": 70}),
    ((64, 4, 192), {"v_dim": 128, "window": 128, "has_sinks": True}),  # MiMo: 16 query heads per KV head
    ((8, 2, 512), {"soft_cap": 30.0}),
    ((16, 1, 512), {"window": 100}),
    ((32, 4, 512), {"scale": 1 / 16}),  # Gemma 4, with a scale for keys that have no norm
]
"""Heads, and settings of `kernel_checks.made_heads`."""
needs_flashinfer = pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer-python is not installed")


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1024), (7, 4096), (300, 5120), (16, 896)])
def test_norms(dtype, num_tokens, size):
    checks.check_norms(dtype, num_tokens, size)


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(3, 12288), (40, 8192)])
def test_fewer_bits(dtype, num_tokens, size):
    checks.check_narrow(dtype, num_tokens, size)


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1024), (7, 4096), (33, 4096), (160, 896)])
def test_joined_norms(dtype, num_tokens, size):
    checks.check_joined_norms(dtype, num_tokens, size)


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 3072), (33, 12288), (5, 4864)])
def test_gate(dtype, num_tokens, size):
    checks.check_gate(dtype, num_tokens, size)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("heads", [HEADS_8B, (16, 8, 128), (14, 2, 64), (8, 8, 80)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 19, 260])
def test_heads(heads, num_tokens, has_norm):
    checks.check_heads(BF16, num_tokens, *heads, has_norm)


@pytest.mark.parametrize("num_tokens", [1, 19, 260])
@pytest.mark.parametrize("heads", [(24, 4, 256), (16, 2, 256)], ids=str)
def test_heads_that_are_rotated_in_part_and_gated(heads, num_tokens):
    checks.check_heads(BF16, num_tokens, *heads, True, rotary_dim=64, has_gate=True)


@pytest.mark.parametrize("scales", [None, (0.5, 2.0)], ids=["16 bits", "fp8_kv"])
@pytest.mark.parametrize("heads", [(32, 4, 512), (16, 2, 512)], ids=str)
def test_values_that_are_keys(heads, scales):
    for num_tokens in (1, 19, 260):
        checks.check_heads(BF16, num_tokens, *heads, True, scales, values_are_keys=True)
    for seq_lens, query_len in (([700], 1), ([700, 33, 9], 5)):
        checks.check_fused_decode(BF16, seq_lens, query_len, *heads, True, scales=scales, values_are_keys=True)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("block_size", "max_drafts"), [(16, 0), (16, 3), (16, 7), (32, 4)])
@pytest.mark.parametrize("heads", [(16, 48, 128, 128, 4), (16, 32, 128, 128, 4)], ids=str)
def test_gated_delta(heads, block_size, max_drafts, state_dtype):
    shape = RowState(*heads, state_dtype)
    checks.check_gated_delta(BF16, shape, block_size, max_drafts, num_steps=24, most_tokens=300)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [HEADS_8B, (16, 8, 128), (14, 2, 64), (64, 8, 128), (6, 6, 80)], ids=str)
@pytest.mark.parametrize("query_len", [1, 2, 5, 9])
def test_decode(heads, query_len, seed):
    rng = random.Random(seed)
    seq_lens = [rng.choice((query_len, rng.randint(query_len, 3000))) for _ in range(rng.choice((1, 3, 16, 40)))]
    checks.check_decode(BF16, seq_lens, query_len, *heads)


@pytest.mark.parametrize("num_splits", [1, 3, 16])
@pytest.mark.parametrize("tile_tokens", [16, 64, 128])
def test_decode_cuts(num_splits, tile_tokens):
    checks.check_decode(BF16, [1000, 1, 64, 129], 1, *HEADS_8B, DecodeTuning(num_splits, tile_tokens))


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("heads", [HEADS_8B, (16, 8, 128), (14, 2, 64), (6, 6, 80)], ids=str)
@pytest.mark.parametrize("query_len", [1, 5])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_decode_from_projection(heads, query_len, num_rows, has_norm):
    rng = random.Random(num_rows)
    seq_lens = [rng.choice((query_len, rng.randint(query_len, 3000))) for _ in range(num_rows)]
    checks.check_fused_decode(BF16, seq_lens, query_len, *heads, has_norm)


@pytest.mark.parametrize(("heads", "settings"), KINDS, ids=str)
@pytest.mark.parametrize("scales", [None, (0.5, 2.0)], ids=["16 bits", "fp8_kv"])
def test_decode_of_all_kinds(heads, settings, scales):
    rng = random.Random(3)
    for query_len, num_rows in ((1, 1), (1, 40), (5, 3), (5, 30), (17, 2)):
        seq_lens = [rng.choice((query_len, rng.randint(query_len, 3000))) for _ in range(num_rows)]
        checks.check_decode(BF16, seq_lens, query_len, *heads, scales=scales, **settings)
        checks.check_fused_decode(BF16, seq_lens, query_len, *heads, query_len == 1, scales=scales, **settings)
        checks.check_heads(BF16, num_rows * query_len, *heads, True, scales, v_dim=settings.get("v_dim"))


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16, 40, 128, 700])
@pytest.mark.parametrize("shape", EXPERT_SHAPES, ids=str)
def test_experts(shape, num_tokens):
    checks.check_experts(BF16, num_tokens, shape)


@pytest.mark.parametrize("num_tokens", [1, 5, 40, 700])
@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("fp8", (128, 128)),
        ("fp8", (1, 1 << 20)),
        ("int4", (1, 128)),
        ("int4", (1, 32)),
        ("int4", (1, 64)),
        ("fp4", (1, 32)),
    ],
)
def test_experts_in_fewer_bits(kind, block, num_tokens):
    for shape in EXPERT_SHAPES:
        blocks = tuple((block[0], min(block[1], inputs)) for inputs in (shape.hidden, shape.intermediate))
        shape = replace(shape, kinds=(kind, kind))
        checks.check_experts(BF16, num_tokens, shape, blocks=blocks, has_zero=kind == "int4" and block[1] > 32)


@pytest.mark.parametrize(
    ("kind", "num_tokens"),
    [("plain", number) for number in (1, 5, 40, 700)]
    + [("fp4", number) for number in (1, 2, 4, 8, 16, 64, 128, 256, 700)],  # with cuts of their own
)
def test_experts_with_biases_and_limits(kind, num_tokens):
    checks.check_chosen_experts(BF16, num_tokens, ExpertShape(2880, 2880, 32, 4, (kind, kind)))


@pytest.mark.parametrize("num_tokens", [1, 5, 40, 700])
def test_experts_of_gemma(num_tokens):
    for kinds, block in ((("plain", "plain"), (1, 1)), (("int4", "int4"), (1, 32)), (("fp8", "fp8"), (128, 128))):
        shape = ExpertShape(2816, 704, 128, 8, kinds)
        checks.check_experts(BF16, num_tokens, shape, blocks=(block, block), is_gemma=True)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 700])
@pytest.mark.parametrize("kind", ["plain", "fp8", "int4", "fp4"])
def test_experts_of_a_member(kind, num_tokens):
    """Of several with whole experts: some pairs, none where all tokens choose others, all."""
    block = {"plain": (1, 1), "fp8": (128, 128), "int4": (1, 128), "fp4": (1, 32)}[kind]
    shape = ExpertShape(2048, 768, 128, 8, (kind, kind))
    for first in (0, 96):
        checks.check_experts(BF16, num_tokens, shape, blocks=(block, block), own=range(first, first + 32))
    one = ExpertShape(2048, 768, 4, 1, (kind, kind))
    for first in range(4):
        checks.check_experts(
            BF16, num_tokens, one, blocks=(block, block), same_experts=True, own=range(first, first + 1)
        )
    chosen = ExpertShape(2880, 2880, 32, 4, (kind, kind))
    if kind in ("plain", "fp4"):
        checks.check_chosen_experts(BF16, num_tokens, chosen, own=range(8, 16))


@pytest.mark.parametrize("tile_rows", [0, 8, 16, 64])
def test_cuts_of_experts(tile_rows):
    cut = ExpertCut(tile_rows, Tuning(16, 64), Tuning(16, 64))
    for same_experts in (False, True):
        checks.check_experts(BF16, 33, EXPERT_SHAPES[0], cut, normalizes=False, same_experts=same_experts)


@pytest.mark.parametrize("is_even", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 300, 2000])
def test_routing(num_tokens, is_even):
    for num_experts, num_chosen in ((8, 2), (60, 4), (128, 8), (512, 10)):
        checks.check_routing(num_tokens, num_experts, Routing(num_chosen, True, is_even))


@pytest.mark.parametrize("num_tokens", [1, 300, 3000])
def test_arrangement(num_tokens):
    for num_experts, num_chosen, tile_rows, spread in ((8, 2, 64, 8), (60, 4, 16, 7), (128, 8, 16, 128)):
        checks.check_arrangement(num_tokens, num_experts, num_chosen, tile_rows, spread)


@pytest.mark.parametrize(
    ("dtype", "heads", "scales"),
    [
        (BF16, HEADS_8B, (0.03, 2.0)),
        (BF16, (14, 2, 64), (1.0, 1.0)),
        (BF16, (6, 6, 80), (0.5, 0.2)),
        (torch.float16, (64, 8, 128), (0.03, 2.0)),
    ],
    ids=str,
)
def test_fp8_kv(dtype, heads, scales):
    rng = random.Random(2)
    for query_len, num_rows in ((1, 3), (1, 40), (5, 9)):
        seq_lens = [rng.choice((query_len, rng.randint(query_len, 3000))) for _ in range(num_rows)]
        checks.check_heads(dtype, num_rows * query_len, *heads, query_len == 1, scales)
        checks.check_decode(dtype, seq_lens, query_len, *heads, scales=scales)
        checks.check_fused_decode(dtype, seq_lens, query_len, *heads, query_len == 1, scales=scales)


@pytest.mark.parametrize("num_splits", [1, 3, 16])
@pytest.mark.parametrize("tile_tokens", [16, 64, 128, 256])
def test_fp8_kv_cuts(num_splits, tile_tokens):
    tuning = DecodeTuning(num_splits, tile_tokens)
    checks.check_decode(BF16, [1000, 1, 64, 129], 1, *HEADS_8B, tuning, scales=(0.5, 1.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize(
    "sizes", [([(4096, 4096)] * 18, 300, 27), ([(48, 48)], 500, 499), ([(1030, 6), (1030, 1030), (6, 24)], 5, 2)]
)
def test_block_moves(sizes, dtype):
    checks.check_block_moves(*sizes, dtype)


def test_block_moves_beyond_32_bits():
    """Caches of 6 GiB, of which the last blocks move."""
    planes = torch.zeros(3, 1 << 18, 1024, dtype=torch.int64, device="cuda")
    blocks, others = (torch.arange(first, 1 << 18, 2, device="cuda") for first in ((1 << 18) - 8, (1 << 18) - 7))
    planes[:, blocks] = torch.randint(1, 1 << 60, (3, len(blocks), 1024), device="cuda")
    mover, of_layers = KernelBlockMover(), Planes([LayerCache(planes[0], planes[1]), LayerCache(planes[2], planes[2])])
    staged = of_layers.pieces(len(blocks))
    mover.gather(of_layers, blocks, staged)
    mover.scatter(of_layers, others, staged)
    assert torch.equal(planes[:, others], planes[:, blocks])
    assert int(planes[:, others].count_nonzero()) == planes[:, others].numel()
    assert not planes[:, : (1 << 18) - 8].any()


@pytest.mark.parametrize("num_rows", [1, 32, 256])
@pytest.mark.parametrize("query_len", [1, 5])
def test_row_inputs(num_rows, query_len):
    checks.check_row_inputs(num_rows, query_len, 0, 40, has_prompts=False)  # as a draft head's: no entries
    checks.check_row_inputs(num_rows, query_len, num_rows, 2049, has_prompts=False)
    checks.check_row_inputs(num_rows, query_len, 3 * num_rows, 600, has_prompts=True)


def _check_projections(num_rows, num_outputs, num_inputs, tuning, *, is_gated, has_8_bits=False, reads=None):
    for has_norm, has_bias in itertools.product((False, True), repeat=2):
        if has_norm and num_rows > FEW_ROWS:
            continue  # it is a launch of its own
        checks.check_projection(
            BF16,
            num_rows,
            num_outputs,
            num_inputs,
            tuning,
            has_norm=has_norm,
            is_gated=is_gated,
            has_bias=has_bias,
            has_residual=not is_gated,
            has_8_bits=has_8_bits,
            reads=reads,
        )


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 16, 32, 60])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1024, 3072), (6144, 4096), (896, 896), (4864, 896)])
def test_projections(num_rows, num_outputs, num_inputs, is_gated):
    tuning = Tuning(4, 1024 if num_rows < 3 else 512) if num_rows <= FEW_ROWS else Tuning(32, 128)
    _check_projections(num_rows, num_outputs, num_inputs, tuning, is_gated=is_gated)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 16, 17, 33, 64])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "is_gated"),
    [(6144, 8192, False), (4096, 12288, False), (12288, 4096, True), (32000, 4096, False), (896, 4864, False)],
)
def test_projections_in_8_bits(num_rows, num_outputs, num_inputs, is_gated):
    """As chosen for a draft head, against the twin with the same rounded weights."""
    rows = num_outputs * (2 if is_gated else 1)
    data = torch.empty(rows, num_inputs, dtype=torch.float8_e4m3fn)
    shape = Product(Weight(data, torch.ones(rows, 1), block=(1, num_inputs)), is_gated=is_gated)
    tuning = choose_projection(num_rows, shape, Device.of(CUDA))
    assert tuning is not None
    for reads in {None, *(input_type_in_8_bits(num_rows, is_normed=is_normed) for is_normed in (True, False))}:
        _check_projections(num_rows, num_outputs, num_inputs, tuning, is_gated=is_gated, has_8_bits=True, reads=reads)


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "block", "of_weight"),
    [
        ("fp8", (1, 0), {}),
        ("fp8", (128, 128), {}),
        ("fp8", (1, 128), {}),
        ("int4", (1, 128), {}),
        ("int4", (1, 64), {"has_zeros": True, "has_order": True}),
        ("int4", (1, 32), {"has_zeros": True}),
        ("int4", (1, 0), {}),
        ("fp4", (1, 32), {}),
    ],
    ids=str,
)
def test_quantized_projections(kind, block, of_weight, dtype):
    rows = (0, 1, 2, 3, 8, 17, 33, 64, 65, 130, 300)
    weight = checks.quantized_weight(checks.Kernels(dtype), kind, 3072, 1536, block, **of_weight)
    checks.check_quantized_projections(dtype, weight, rows, has_norm=True, has_bias=True)
    checks.check_quantized_projections(dtype, weight, rows, has_residual=True)
    checks.check_quantized_projections(dtype, weight, rows, has_norm=True, is_gated=True)
    odd = checks.quantized_weight(checks.Kernels(dtype), kind, 1000, 1536, block, **of_weight)
    checks.check_quantized_projections(dtype, odd, (1, 2, 5, 40, 100, 300), has_residual=True, has_bias=True)
    if dtype == BF16:
        checks.check_quantized_projections(dtype, odd, (1, 2, 16, 300), x_scale=1e4)


@pytest.mark.parametrize(("num_tokens", "size", "block"), [(1, 4096, 128), (70, 12288, 20000), (300, 1000, 128)])
def test_quantized_tokens(num_tokens, size, block):
    checks.check_quantized_tokens(BF16, num_tokens, size, block)


def test_in_8_bits_some_rows_are_rounded_and_many_are_not():
    checks.check_products_in_8_bits(BF16, 3072, 1024)


def test_an_mlp_in_8_bits():
    checks.check_mlp_in_8_bits(BF16, 1024, 3072)


@pytest.mark.parametrize("num_rows", [5, 16, 33, 128])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 4])
def test_split_projections(num_rows, num_splits):
    checks.check_projection(BF16, num_rows, 4096, 4096, Tuning(32, 128, num_splits), has_bias=True, has_residual=True)


@pytest.mark.parametrize("shape", [(6144, 4096, False), (3072, 1024, True), (1024, 3072, False)], ids=str)
def test_all_ways_of_a_product_agree(shape):
    """Own kernels up to some rows, the library beyond: as chosen, against the twin."""
    num_outputs, num_inputs, is_gated = shape
    kernels = checks.Kernels(BF16)
    weight = kernels.normal(num_outputs * (2 if is_gated else 1), num_inputs, scale=num_inputs**-0.5)
    norm_weight = 1 + kernels.normal(num_inputs, scale=0.1)
    folded = weight.clone()
    fold_norm(folded, norm_weight)
    bare = CudaProjection(Product(Weight(weight)), kernels.device, kernels.workspace)
    normed = CudaProjection(Product(Weight(folded), None, 1e-6, is_gated), kernels.device, kernels.workspace)
    for num_rows in (0, 1, 2, 4, 5, 8, 9, 16, 17, 32, 33, MAX_ROWS, MAX_ROWS + 1, 300):
        x = kernels.normal(num_rows, num_inputs)
        expected = reference.linear(x, weight, norm_weight=norm_weight, eps=1e-6, is_gated=is_gated)
        kernels.assert_close(normed(x), expected, 4)
        if not is_gated:
            residual = kernels.normal(num_rows, num_outputs)
            expected = reference.linear(x, weight, residual=residual)
            kernels.assert_close(bare.add(x, residual), expected, 4)


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize(("vocab_size", "hidden"), [(151936, 1024), (4032, 256)])
def test_lm_head(dtype, vocab_size, hidden):
    checks.check_lm_head(dtype, vocab_size, hidden, (0, 1, 2, 3, 16, MAX_ROWS, MAX_ROWS + 1, 300))


def test_products_of_no_rows():
    checks.check_products_of_no_rows(BF16)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 151936), (7, 32000), (256, 151936), (600, 1000)])
def test_sampling(dtype, num_rows, vocab_size):
    checks.check_sampling(dtype, num_rows, vocab_size)


def test_the_distribution_of_draws():
    checks.check_distribution(20480, 300)


@pytest.mark.parametrize(("num_rows", "num_drafts", "vocab_size"), [(1, 0, 151936), (64, 0, 32000), (40, 4, 151936)])
def test_adjusted_logits(num_rows, num_drafts, vocab_size):
    checks.check_adjust(num_rows, num_drafts, vocab_size)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 151936), (64, 32000), (200, 151936)])
def test_logprobs(num_rows, vocab_size):
    checks.check_logprobs(num_rows, vocab_size)


def test_rows_without_a_best():
    checks.check_rows_without_a_best(151936)


PREFILLS = [[(70, 70)], [(1, 1)], [(30, 100), (512, 512), (1, 300)], [(300, 1000), (7, 7)]]


@pytest.mark.parametrize("prefill", PREFILLS, ids=str)
@pytest.mark.parametrize("way", [*(pytest.param(way, marks=needs_flashinfer) for way in ("copy", "blocks")), "torch"])
@pytest.mark.parametrize("scales", [None, (1.0, 1.0), (0.05, 2.0)], ids=["16 bits", "fp8_kv", "fp8_kv, scaled"])
def test_prefill(way, prefill, scales):
    _check_prefill(way, prefill, checks.made_heads(*HEADS_8B, None, scales), scales)


@pytest.mark.parametrize("prefill", PREFILLS, ids=str)
@pytest.mark.parametrize(("sizes", "settings"), KINDS, ids=str)
@pytest.mark.parametrize("scales", [None, (0.5, 2.0)], ids=["16 bits", "fp8_kv"])
def test_prefill_of_all_kinds(prefill, sizes, settings, scales):
    heads = checks.made_heads(*sizes, None, scales, **settings)
    _check_prefill("torch", prefill, heads, scales)
    if missing_for_flashinfer(heads) is None:
        _check_prefill("blocks", prefill, heads, scales)
        _check_prefill("copy", prefill, heads, scales)


def _check_prefill(way, prefill, heads, scales):
    kernels = checks.Kernels(BF16)
    kv_dtype = BF16 if scales is None else FP8
    attention = (
        SdpaPrefill(heads, BLOCK_SIZE, BF16)
        if way == "torch"
        else FlashInferPrefill(heads, BLOCK_SIZE, BF16, kv_dtype, 3, CUDA, 0 if way == "copy" else math.inf)
    )
    batch, cache = checks.prefill_batch(kernels, prefill, heads, BLOCK_SIZE)
    cache = LayerCache(*(side.to(kv_dtype) for side in cache))
    q = kernels.normal(sum(batch.prefill_query_lens), heads.num_heads, heads.head_dim)
    plans = [attention.plan(batch, entry) for entry in range(3)]  # as steps in flight: each stays what it was
    for plan in plans:
        out = torch.full((*q.shape[:2], heads.value_dim), torch.nan, dtype=BF16, device=CUDA)
        attention.run(plan, q, cache, heads, out)
        begin = 0
        for row, (count, length) in enumerate(prefill, 1):
            keys, values = (
                side[batch.block_tables[0][row].long()].transpose(1, 2).flatten(0, 1)[:length]
                for side in checks.as_read(cache, scales)
            )
            tokens = slice(begin, begin + count)
            kernels.assert_close(out[tokens], reference.attention(q[tokens], keys, values, heads), heads.v_scale)
            begin += count


@needs_flashinfer
@pytest.mark.parametrize("least_queries", [0, math.inf], ids=["copy", "blocks"])
def test_plans_that_follow_each_other_in_one_entry(least_queries):
    """The device is a good while behind the host, as when a stage runs its first steps with all kernels compiled."""
    kernels = checks.Kernels(BF16)
    heads = Heads(*HEADS_8B)
    attention = FlashInferPrefill(heads, BLOCK_SIZE, BF16, BF16, 3, CUDA, least_queries)
    steps = []
    for prefill in (PREFILLS[2], PREFILLS[1], PREFILLS[3]):
        batch, cache = checks.prefill_batch(kernels, prefill, heads, BLOCK_SIZE)
        q = kernels.normal(sum(batch.prefill_query_lens), heads.num_heads, heads.head_dim)
        expected = torch.empty_like(q)
        attention.run(attention.plan(batch, 0), q, cache, heads, expected)
        torch.cuda.synchronize()
        steps.append((batch, cache, q, expected, torch.empty_like(q)))
    torch.cuda._sleep(200_000_000)
    for batch, cache, q, _, out in steps:
        attention.run(attention.plan(batch, 0), q, cache, heads, out)
    for *_, expected, out in steps:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("prefill", [[], *PREFILLS], ids=str)
def test_attention_of_a_mixed_step(prefill, has_norm):
    """The kernel set's attention as a whole, against plain torch's on the same device."""
    kernels = checks.Kernels(BF16)
    norm = HeadNorm(kernels.normal(128), kernels.normal(128), 1e-6) if has_norm else None
    checks.check_mixed_step(kernels, choose_kernels(CUDA, BF16), prefill, Heads(*HEADS_8B, norm))


@pytest.mark.parametrize(("sizes", "settings"), KINDS, ids=str)
def test_attention_of_mixed_steps_of_all_kinds(sizes, settings):
    for prefill in ([], *PREFILLS):
        heads = checks.made_heads(*sizes, **settings)
        checks.check_mixed_step(checks.Kernels(BF16), choose_kernels(CUDA, BF16), prefill, heads)


@pytest.mark.parametrize("settings", [{}, {"window": 64}, {"window": 600}], ids=str)
def test_attention_of_mixed_steps_with_images_that_are_seen_whole(settings):
    heads = checks.made_heads(32, 16, 128, **settings)
    spans = [[(20, 276)], [(0, 40), (40, 80)], []]
    chosen = choose_kernels(CUDA, BF16)
    checks.check_mixed_step(checks.Kernels(BF16), chosen, [(300, 1000), (90, 90), (50, 700)], heads, spans=spans)


def _decode_chain(kernels, num_layers, num_rows, hidden=1024, intermediate=3072, kinds=({},)):
    """Return a function from the residual stream to that after some layers, and its inputs; kinds come in turn."""
    device_kernels = choose_kernels(CUDA, BF16)
    heads, head_dim = (16, 8, 128), 128
    norm_weight = kernels.normal(hidden)
    layers, caches = [], []
    for index in range(num_layers):
        norm = HeadNorm(kernels.normal(head_dim), kernels.normal(head_dim), 1e-6)
        layer_heads = checks.made_heads(*heads, norm, **kinds[index % len(kinds)])
        kernels.rng.seed(0)  # all caches have the same tables
        _, cache, lens, tables = checks.decode_step(kernels, [100] * num_rows, 1, Heads(*heads), BLOCK_SIZE)
        caches.append(cache)
        weights = {
            "qkv": kernels.normal(layer_heads.width, hidden, scale=0.02),
            "output": kernels.normal(hidden, heads[0] * head_dim, scale=0.02),
            "gate_up": kernels.normal(2 * intermediate, hidden, scale=0.02),
            "down": kernels.normal(hidden, intermediate, scale=0.02),
        }
        layers.append(
            [
                (
                    made.norm_linear(norm_weight, 1e-6, Weight(weights["qkv"].clone())),
                    made.attention(layer_heads),
                    made.add_linear(Weight(weights["output"])),
                    made.norm_gated_linear(norm_weight, 1e-6, Weight(weights["gate_up"].clone())),
                    made.add_linear(Weight(weights["down"])),
                )
                for made in (device_kernels, TorchKernels(BF16))
            ]
        )
    frequencies = 1.0 / 1e6 ** (torch.arange(0, head_dim, 2, device=CUDA) / head_dim)

    def forward(which, start, lens, caches):
        positions = lens.long() - 1
        slots = tables.gather(1, (positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1).long() * BLOCK_SIZE
        batch = AttentionBatch(
            num_decode_rows=num_rows,
            decode_query_len=1,
            seq_lens=lens,
            block_tables=[tables],
            slot_mappings=[slots + positions % BLOCK_SIZE],
            prefill_query_lens=[],
            prefill_seq_lens=[],
        )
        made = (device_kernels, TorchKernels(BF16))[which]
        hidden, by = start.clone(), made.rotation(positions, frequencies)
        for layer, layer_cache in zip(layers, caches, strict=True):
            qkv, attention, output, gate_up, down = layer[which]
            hidden = output(attention(qkv(hidden), by, layer_cache, batch), hidden)
            hidden = down(gate_up(hidden), hidden)
        return hidden

    return forward, lens, caches


@pytest.mark.parametrize("num_rows", [1, 8, 32, 48])
@pytest.mark.parametrize("kinds", [({},), ({"window": 20, "has_sinks": True}, {"soft_cap": 20.0}, {"window": 3})])
def test_layers_in_a_graph(num_rows, kinds):
    """Captured once, replayed with other lengths: the bits of an eager run, and near plain torch."""
    kernels = checks.Kernels(BF16)
    forward, lens, caches = _decode_chain(kernels, 4, num_rows, kinds=kinds)
    start = kernels.normal(num_rows, 1024)
    forward(0, start, lens, caches)  # compiles, and allocates the workspace
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(0, start, lens, caches)
    for seed in range(3):
        lens.copy_(torch.randint(1, 101, (num_rows,), generator=torch.Generator().manual_seed(seed)).int())
        start.copy_(kernels.normal(num_rows, 1024))
        eager = forward(0, start, lens, [checks.of_sides(torch.clone, cache) for cache in caches])
        plain = forward(1, start, lens, [checks.of_sides(torch.clone, cache) for cache in caches])
        for _ in range(2):
            graph.replay()
            assert torch.equal(captured, eager)
        error = (captured.float() - plain.float()).abs().max() / plain.float().abs().max()
        assert error < 0.03


def test_overlapping_kernels_see_what_came_before():
    """A long chain of small kernels, each started before the last has ended, gives the same bits 200 times."""
    kernels = checks.Kernels(BF16)
    forward, lens, caches = _decode_chain(kernels, 12, 1)
    start = kernels.normal(1, 1024)
    expected = forward(0, start, lens, caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(0, start, lens, caches)
    for _ in range(200):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("settings", [{}, {"window": 300, "has_sinks": True}])
def test_decode_in_a_graph_follows_lengths_and_tables(settings):
    kernels, heads = checks.Kernels(BF16), checks.made_heads(*HEADS_8B, **settings)
    q, cache, lens, tables = checks.decode_step(kernels, [2000] * 6, 3, Heads(*HEADS_8B), BLOCK_SIZE)
    decode = TritonDecode(*HEADS_8B, 3, Device.of(CUDA), Workspace(CUDA))
    out = torch.empty_like(q)
    decode(q, cache, lens, tables, 3, heads, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(q, cache, lens, tables, 3, heads, out)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        lens.copy_(torch.randint(3, 2000, (6,), generator=generator).int())
        tables.copy_(tables[torch.randperm(6, generator=generator)].clone())
        graph.replay()
        kernels.assert_close(out, reference.decode_attention(q, cache, lens, tables, 3, heads))


@pytest.mark.parametrize("scales", [None, (0.05, 2.0)])
def test_keys_and_values_of_prompts_are_copied(scales):
    checks.check_gather(BF16, [4000, 5, 16, 1, 900], 8, scales)


def test_rotation_is_scaled():
    checks.check_rotation(5, 24, 1.25)
    checks.check_rotation(1, 128, 1.0)


def test_lengths_past_the_table_are_cut():
    checks.check_cut_lengths(BF16)
