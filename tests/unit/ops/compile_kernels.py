"""Compiles every kernel for one compute capability, as models use it, without a GPU; prints what each takes, as JSON.

CAPABILITY is 80, 86, 89, 90 (the default) or 120.

A process of its own: a driver that only pretends to have a device takes the place of Triton's, and launches compile
without running. The compiler and the assembler are those that a GPU's host has too. Products compile for some numbers
of rows; with TEST_SIZES=all for all that have kernels of their own, of experts and quantized weights, too, and
attention for 16 drafts.

KNOWN, a file, has the digests of what soak compiled for this capability: of those nothing is compiled, and no more is
printed than their names.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine_code
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from raypp.ops.attention import AttentionBatch, HeadNorm, Heads, LatentHeads
from raypp.ops.backend import GELU, ExpertWeights, Gate, Router, Routing
from raypp.ops.block_store import Planes
from raypp.ops.cuda import (
    between_products,
    block_kernels,
    decode_attention,
    heads,
    latent_kernels,
    ngram_kernel,
    projection,
    row_inputs_kernel,
    verify_kernels,
)
from raypp.ops.cuda.experts import CudaChosenExperts, CudaExperts
from raypp.ops.cuda.gated_delta import CudaGatedDelta, ScanPlan, plan_scan
from raypp.ops.cuda.invariant_attention import InvariantAttention
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.kernel_token_choice import KernelTokenChoice
from raypp.ops.cuda.member_sums import PushedSums
from raypp.ops.cuda.product_tuning import input_type_in_8_bits, own_product
from raypp.ops.cuda.quantized_projection import Fp8Projection, Int4Projection
from raypp.ops.cuda.router_kernels import route
from raypp.ops.cuda.step_attention import MOST_OF_TORCH, PIECE_TOKENS
from raypp.ops.cuda.token_quantization import TokenNorm
from raypp.ops.kv_cache import LayerCache
from raypp.ops.row_state import DeltaHeads, RowSpans, allocate_layer_state
from raypp.ops.row_tokens import RowTokens, StepTokens
from raypp.ops.sample.tables import (
    AdjustedLogits,
    Adjustments,
    PositionMasks,
    RowTables,
    StepMasks,
    Widths,
)
from raypp.ops.sample.token_history import TokenHistory
from raypp.ops.sample.vocabulary_part import VocabularyPart
from raypp.ops.state_sizes import RowState
from raypp.ops.weight import FP4, Weight
from raypp.row_params import Needs

CPU = torch.device("cpu")
CAPABILITY = int(os.environ.get("CAPABILITY", "90"))
NUM_PROCESSORS, SHARED_KB = {80: (108, 163), 86: (82, 99), 89: (128, 99), 90: (132, 227), 120: (170, 99)}[CAPABILITY]
DEVICE = Device(
    CPU,
    num_processors=NUM_PROCESSORS,
    has_dependent_launch=CAPABILITY >= 90,
    shared_bytes=SHARED_KB << 10,
    has_fp8=CAPABILITY >= 89,
)
BF16 = torch.bfloat16
IS_FULL = os.environ.get("TEST_SIZES") == "all"
KNOWN = frozenset(Path(os.environ["KNOWN"]).read_text().split()) if "KNOWN" in os.environ else frozenset()


def numbers_of_rows(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Return for how many rows products compile: for some, in full for others besides."""
    return some + others if IS_FULL else some


class PretendedDriver:
    """A GPU as far as the compiler asks."""

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        """Return the device's number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return no stream: nothing runs."""
        return 0


def compile_instead_of_launching() -> list[Any]:
    """Return the list that collects what is compiled from now on."""
    driver.set_active(PretendedDriver())
    # Digests hold it, of all kernels that are called, too: a line more in a file would compile all that follow anew.
    JITFunction.starting_line_number = property(lambda kernel: 1, lambda kernel, number: None)
    compiled = []

    def __getitem__(kernel: Any, grid: Any) -> Any:  # noqa: N807
        def launch(*args: Any, **kwargs: Any) -> None:
            digest = digest_of(kernel, args, kwargs)
            result = None if digest in KNOWN else kernel.run(*args, grid=grid, warmup=True, **kwargs)
            compiled.append((kernel.__name__, digest, result))

        return launch

    JITFunction.__getitem__ = __getitem__
    return compiled


def digest_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a digest of all that decides what is compiled, and of what is looked for in it.

    That is the compiler, sources, types, constants and settings.
    """
    launched = kernel.cache_key, [described(arg) for arg in args], sorted((k, described(v)) for k, v in kwargs.items())
    checks = [inspect.getsource(each) for each in (resources, lacks_fence, refills_too_early, machine_code)]
    return hashlib.sha256(repr((triton.__version__, CAPABILITY, launched, checks)).encode()).hexdigest()[:16]


def described(arg: Any) -> str:
    """Return what the compiler knows of an argument, and maybe more."""
    if isinstance(arg, torch.Tensor):
        return f"{arg.dtype} {arg.data_ptr() % 16}"
    if isinstance(arg, tuple):
        return f"{type(arg).__name__}({', '.join(map(described, arg))})"
    return str(getattr(arg, "cache_key", arg))


PRODUCTS = re.compile(r"(wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+k(\d+)")


def resources(kernel: Any) -> dict[str, Any]:
    """Return the registers of a thread, and the bytes of its stack, onto which registers are spilled.

    And the kinds of its products: how many inputs an instruction sums, in an order of its own.
    """
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    code = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def printed_by(*command: str | Path) -> str:
            return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout

        printed = printed_by(tools / "cuobjdump", "-res-usage")
        instructions = printed_by(tools / "nvdisasm", "-c") if "wgmma" in code else ""
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    return {
        "refills_too_early": refills_too_early(kernel.asm["ttgir"]),
        "overwrites_operands": machine_code.overwrites_operands(instructions),
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "shared_bytes": kernel.metadata.shared,
        "lacks_fence": lacks_fence(code),
        "products": sorted({f"{name}, {inputs} inputs" for name, inputs in PRODUCTS.findall(code)}),
    }


def lacks_fence(code: str) -> bool:
    """Return whether a loop multiplies what it loaded by cp.async without a fence between them."""
    after_loads = (part.split("wgmma.mma_async") for part in re.split(r"cp\.async\.wait_group \s*[1-9]", code)[1:])
    return any("fence.proxy.async" not in parts[0] for parts in after_loads if len(parts) > 1)


def refills_too_early(code: str) -> bool:
    """Return whether a buffer of a loop has fewer slots than others while products that read it are under way.

    Triton gives such a slot more to operands that only products read. Others are filled again during the product.
    """
    if not re.search(r"pendings = [1-9]", code):
        return False
    slots = dict(re.findall(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", code))
    views = dict(re.findall(r"(%\S+) = ttg\.memdesc_(?:index|trans|reshape|subslice) (%[^\s\[]+)", code))
    products = re.findall(r"ttng\.warp_group_dot (%\S+), (%\S+),.*isAsync = true", code)
    read = {operand for operands in products for operand in operands}
    while viewed := {name for name in read if name in views}:
        read = (read - viewed) | {views[name] for name in viewed}
    return len({slots[name] for name in read if name in slots}) > 1


def in_8_bits(num_outputs: int, num_inputs: int, norm_eps: float | None = None, is_gated: bool = False) -> Any:
    """Return a weight of 8 bits that holds nothing."""
    weight = torch.empty(num_outputs, num_inputs, dtype=torch.float8_e4m3fn)
    weight = Weight(weight, torch.empty(num_outputs, 1), block=(1, num_inputs))
    return projection.Product(weight, None, norm_eps, is_gated)


def draft_head_products() -> list[Any]:
    """Return the products of a draft head, in 8 bits."""
    return [
        in_8_bits(32000, 4096, 1e-6),
        in_8_bits(6144, 8192),
        in_8_bits(24576, 4096, 1e-6, is_gated=True),
        in_8_bits(4096, 12288),
    ]


def experts_of(kind: str, scale_type: torch.dtype, block: tuple[int, int], num_outputs: int, num_inputs: int) -> Weight:
    """Return the weights of 128 experts in fewer bits that hold nothing."""
    scale = torch.empty(128, num_outputs // block[0], num_inputs // block[1], dtype=scale_type, device="meta")
    if kind == "fp8":
        data = torch.empty(128, num_outputs, num_inputs, dtype=torch.float8_e4m3fn, device="meta")
        return Weight(data, scale, block=block)
    data = torch.empty(128, num_outputs, num_inputs // 2, dtype=torch.uint8, device="meta")
    return Weight(data, scale, torch.empty_like(scale, dtype=torch.uint8), block)


def attend_in_8_bits(decode: Any, layer_heads: Heads, by: Any, integers: torch.Tensor) -> None:
    """Call what writes and reads a KV cache in 8 bits."""
    cache_8 = LayerCache(*torch.zeros(2, 3, 8, 16, 128, dtype=torch.float8_e4m3fn))
    qkv = torch.zeros(32, 6144, dtype=BF16)
    heads.append_heads(qkv, layer_heads, by, integers, cache_8, DEVICE)
    for rows, query_len in ((16, 1), (256, 1), (32, 5)):
        q = torch.zeros(rows * query_len, 32, 128, dtype=BF16)
        lens, tables = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 64, dtype=torch.int32)
        decode(q, cache_8, lens, tables, query_len, layer_heads, torch.empty_like(q))
    fresh, lens, tables = qkv[:16], torch.ones(16, dtype=torch.int32), torch.zeros(16, 64, dtype=torch.int32)
    decode.from_projection(fresh, layer_heads, by, integers, cache_8, lens, tables, 1, torch.empty_like(q[:16]))
    copy, table = torch.empty(2, 64, 8, 128, dtype=BF16), torch.zeros(1, 4, dtype=torch.int32)
    heads.gather_heads(cache_8, table, torch.zeros(2, dtype=torch.int32), 4, layer_heads, copy[0], copy[1], DEVICE)


def call_all(workspace: Workspace) -> None:
    """Call each kernel as Qwen3 does, in steps of 1 to 64 rows."""
    layer_heads = Heads(32, 8, 128, HeadNorm(torch.ones(128, dtype=BF16), torch.ones(128, dtype=BF16), 1e-6))
    decode = decode_attention.TritonDecode(32, 8, 128, 5, DEVICE, workspace)
    chooser = KernelTokenChoice(32, DEVICE, workspace)
    workspace.reserve(1 << 24)
    cache = LayerCache(*torch.zeros(2, 3, 8, 16, 128, dtype=BF16))
    integers = torch.zeros(32, dtype=torch.int64)
    hidden = torch.zeros(32, 4096, dtype=BF16)
    between_products.rms_norm(hidden, hidden[0], 1e-6, DEVICE)
    if DEVICE.has_fp8:
        between_products.rms_norm(hidden, None, 1e-6, DEVICE, torch.float8_e4m3fn)
    for dtype in (torch.float16, *([torch.float8_e4m3fn] if DEVICE.has_fp8 else [])):
        between_products.join_norms(hidden, integers, hidden, 1e-6, DEVICE, dtype)
    if DEVICE.has_fp8:
        between_products.narrow(hidden, torch.float8_e5m2, DEVICE)
    between_products.silu_and_mul(hidden, DEVICE)
    by = heads.rotation_table(integers, torch.ones(64), DEVICE)
    heads.append_heads(torch.zeros(32, 6144, dtype=BF16), layer_heads, by, integers, cache, DEVICE)
    angles = torch.zeros(32, 36)
    heads.rotate_qk_(torch.zeros(32, 3, 16, 72, dtype=BF16), angles, angles, DEVICE)
    for rows, query_len in ((1, 1), (16, 1), (32, 1), (32, 5)):
        q = torch.zeros(rows * query_len, 32, 128, dtype=BF16)
        lens, tables = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 64, dtype=torch.int32)
        decode(q, cache, lens, tables, query_len, layer_heads, torch.empty_like(q))
        if query_len == 1 and DEVICE.has_fp8:  # a draft head's
            narrow_out = torch.empty_like(q, dtype=input_type_in_8_bits(rows))
            decode(q, cache, lens, tables, query_len, layer_heads, narrow_out)
    if DEVICE.has_fp8:
        attend_in_8_bits(decode, layer_heads, by, integers)
    copy, table = torch.empty(2, 64, 8, 128, dtype=BF16), torch.zeros(1, 4, dtype=torch.int32)
    heads.gather_heads(cache, table, torch.zeros(2, dtype=torch.int32), 4, layer_heads, copy[0], copy[1], DEVICE)
    odd = torch.empty(896, 3072, dtype=BF16)
    small, large = torch.empty(4096, 1024, dtype=BF16), torch.empty(24576, 4096, dtype=BF16)
    for product in (
        projection.Product(Weight(small), None, 1e-6),
        projection.Product(Weight(small), None, 1e-6, is_gated=True),
        projection.Product(Weight(small)),
        projection.Product(Weight(odd)),
        projection.Product(Weight(large), None, 1e-6, is_gated=True),
        projection.Product(Weight(torch.empty(4096, 12288, dtype=BF16))),
        *(draft_head_products() if DEVICE.has_fp8 else ()),
    ):
        for rows in numbers_of_rows((1, 32), (2, 3, 8, 9, 16, 64)):
            own = own_product(rows, product, DEVICE)
            if own is not None:
                x_type = y_type = BF16
                if product.weight.scale is not None:
                    is_normed = product.num_inputs < 12288
                    if own.product.norm_eps is None:
                        x_type = input_type_in_8_bits(rows, is_normed=is_normed) or BF16
                    y_type = input_type_in_8_bits(rows) or BF16 if product.is_gated else BF16
                x = torch.empty(rows, product.num_inputs, dtype=x_type)
                residual = None if product.is_gated else torch.empty(rows, product.num_outputs, dtype=BF16)
                projection.project(x, own.product, residual, own.tuning, DEVICE, workspace, y_type)
    tables, lengths = torch.zeros(1, 32, 65, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    for most in (1, 1000):
        queries = (lengths, 32, most)
        row_inputs_kernel.row_inputs(tables, (integers, integers, integers), integers, lengths, queries, 16, 1000)
    planes = Planes([LayerCache(*torch.zeros(2, 4, 8, 16, 128, dtype=BF16)) for _ in range(18)])
    for move in (block_kernels.KernelBlockMover().gather, block_kernels.KernelBlockMover().scatter):
        move(planes, torch.zeros(2, dtype=torch.int64), planes.pieces(2))
    logits = torch.zeros(32, 5000)
    head = projection.Product(Weight(torch.empty(5000, 4096, dtype=BF16)), None, 1e-6)
    for rows in (1, 2):
        x, y = torch.empty(rows, 4096, dtype=BF16), logits[:rows]
        projection.project(x, head, None, own_product(rows, head, DEVICE).tuning, DEVICE, workspace, out=y)
    row_tables = RowTables(
        temperature=torch.ones(32),
        top_k=lengths,
        top_p=torch.ones(32),
        min_p=torch.zeros(32),
        seed=integers,
        needs=lengths,
        bias_token_ids=torch.zeros(32, 1024, dtype=torch.int32),
        bias=torch.zeros(32, 1024),
        num_biased=lengths,
        repetition_penalty=torch.ones(32),
        frequency_penalty=torch.zeros(32),
        presence_penalty=torch.zeros(32),
        min_length=lengths,
        end_token_ids=torch.zeros(32, 64, dtype=torch.int32),
        bad_words=torch.zeros(32, 256, 64, dtype=torch.int32),
        num_bad_words=lengths,
        allowed=torch.zeros(32, 157, dtype=torch.int32),
        num_reported=lengths,
    )
    row_tokens = RowTokens(32, 80, torch.device("cpu"))
    history, masks = TokenHistory(row_tokens, 5000, 4, torch.device("cpu")), PositionMasks(lengths, row_tables.allowed)
    history.reserve()
    for of_grammars in (None, masks):
        asked = Adjustments(integers, integers, row_tables, history, Needs.ALL, Widths(1024, 64, 256), of_grammars)
        adjusted = chooser.adjust(logits, asked)
    for given in (AdjustedLogits(logits), adjusted):
        chooser.greedy(given)
        chooser.draw(given, integers, integers, row_tables)
    chooser.report(logits, integers, integers, row_tables.num_reported)
    part: Any = VocabularyPart(TwoMembers(), 2 * logits.shape[1])
    member = KernelTokenChoice(32, DEVICE, workspace, part)
    for given in (AdjustedLogits(logits), member.adjust(logits, asked)):
        member.greedy(given)
        member.draw(given, integers, integers, row_tables)
    member.report(logits, integers, integers, row_tables.num_reported)
    generated = StepTokens(integers, integers, torch.zeros(32, 5), lengths)
    chooser.remember(generated, lengths, history, counts=True)
    for width in (1, 5):
        token_ids, compared = torch.zeros(32, width, dtype=torch.int32), (lengths, lengths) if width > 1 else ()
        drafts = torch.zeros(32, 4, dtype=torch.int32)
        step_masks = StepMasks(lengths, lengths, drafts[:, : width - 1], masks)
        yielded = StepTokens(integers, integers, token_ids, lengths, None, *compared)
        chooser.hold(yielded, step_masks, row_tokens.table, drafts)
        verify_kernels.verify_and_append(token_ids, integers, integers, drafts, lengths, lengths, row_tokens.table)
    call_member_sums()
    for width in (80, 1 << 14):
        table = torch.zeros(32, width, dtype=torch.int32)
        ngram_kernel.NgramKernel(table, window=width, min_n=2, max_n=5, num_drafts=8, max_rows=32)(integers, integers)


class TwoMembers:
    """As the first of two members has them, with memory."""

    rank, count, max_bytes, is_alone = 0, 2, 2 << 20, False

    def __init__(self) -> None:
        self.memory = self
        self.addresses = torch.zeros(2, dtype=torch.int64)
        self.counts = self.stop = torch.zeros(64, dtype=torch.int32)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return it twice."""
        return torch.stack((x, x))


def call_member_sums() -> None:
    """Sum few rows and many."""
    members: Any = TwoMembers()
    sums = PushedSums(members, DEVICE)
    for rows in (1, 128):
        sums(torch.empty(rows, 4096, dtype=BF16), torch.empty(rows, 4096, dtype=BF16))
    sums(*torch.empty(2, 64, 2))  # squares of a norm over all heads
    for rows in (8, 64):  # of draws
        sums.gathered(torch.empty(rows, 1024, dtype=torch.int32))


def call_experts(workspace: Workspace) -> None:
    """Call the products of experts as Qwen3-30B-A3B does."""
    workspace.reserve(1 << 24)
    router, down = torch.empty(128, 2048, dtype=BF16), Weight(torch.empty(128, 2048, 768, dtype=BF16, device="meta"))
    gate_up = Weight(torch.empty(128, 1536, 2048, dtype=BF16, device="meta"))
    for is_even in (False, True):
        routing = Routing(8, normalizes=True, is_even=is_even)
        weights = ExpertWeights(gate_up, down)
        layer = CudaExperts(router[0], 1e-6, Router(router, routing), weights, DEVICE, workspace)
        for rows in (1,) if is_even else numbers_of_rows((1, 512), (8, 2048)):
            layer(torch.empty(rows, 2048, dtype=BF16))
    grouped = Routing(8, True, False, True, 8, 4, 2, 2.5)  # DeepSeek-V3
    for num_experts, routing, bias in ((256, grouped, None), (32, Routing(4, True), torch.empty(32, dtype=BF16))):
        correction = torch.empty(num_experts) if bias is None else None
        other = Router(torch.empty(num_experts, 2048, dtype=BF16), routing, bias, correction)
        for rows in (1, 2048):
            route(torch.empty(rows, 2048, dtype=BF16), other, 1e-6, DEVICE, workspace)
    member = (Weight(weight.data[:32]) for weight in (gate_up, down))  # one of four, with whole experts
    weights = ExpertWeights(*member, first=32, num_others=96)
    layer = CudaExperts(router[0], 1e-6, Router(router, Routing(8, True)), weights, DEVICE, workspace)
    for rows in (1, 64):
        layer(torch.empty(rows, 2048, dtype=BF16))
    of_gemma = Router(router, Routing(8, True), norm_weight=router[0].float(), expert_scales=torch.ones(128))
    weights = ExpertWeights(gate_up, down, gate=GELU)
    layer = CudaExperts(router[0], 1e-6, of_gemma, weights, DEVICE, workspace)
    for rows in (1, 64):
        layer(torch.empty(rows, 2048, dtype=BF16))
    routing = Routing(8, normalizes=True)
    for kind, scale_type, block in (("fp8", torch.float32, (128, 128)), ("int4", BF16, (1, 128))):
        if kind == "fp8" and not DEVICE.has_fp8:
            continue
        gate_up, down = (experts_of(kind, scale_type, block, *shape) for shape in ((1536, 2048), (2048, 768)))
        weights = ExpertWeights(gate_up, down)
        layer = CudaExperts(router[0], 1e-6, Router(router, routing), weights, DEVICE, workspace)
        for rows in (1, 64, 1024):
            layer(torch.empty(rows, 2048, dtype=BF16))
        member = [weight.mapped(lambda part: part[:64]) for weight in (gate_up, down)]  # one of two, with whole experts
        weights = ExpertWeights(*member, first=64, num_others=64)
        layer = CudaExperts(router[0], 1e-6, Router(router, routing), weights, DEVICE, workspace)
        for rows in (1, 64):
            layer(torch.empty(rows, 2048, dtype=BF16))


def call_experts_in_4_bits(workspace: Workspace) -> None:
    """Call the products of experts as gpt-oss-20b does."""
    of_gpt_oss = torch.empty(32, 5760, dtype=BF16), torch.empty(32, 2880, dtype=BF16)
    gate_up, down = (
        Weight(
            torch.empty(32, outputs, 1440, dtype=torch.uint8, device="meta").view(FP4),
            torch.empty(32, outputs, 90, dtype=torch.float8_e8m0fnu, device="meta"),
            block=(1, 32),
        )
        for outputs in (5760, 2880)
    )
    weights = ExpertWeights(gate_up, down, *of_gpt_oss, Gate(1.702, 7.0, 1.0))
    experts = CudaChosenExperts(weights, BF16, DEVICE, workspace)
    for rows in numbers_of_rows((1,), (2, 4, 8, 16, 64, 128, 256, 1024)):
        chosen = torch.zeros(rows, 4, dtype=torch.int32)
        experts(torch.empty(rows, 2880, dtype=BF16), chosen, torch.zeros(rows, 4))


def call_quantized(workspace: Workspace) -> None:
    """Call the products of quantized weights as Qwen3 does, smaller."""
    size = 1024
    workspace.reserve(1 << 24)
    norm = TokenNorm(torch.ones(size, dtype=BF16), 1e-6)
    data, scale = torch.zeros(2 * size, size, dtype=torch.float8_e4m3fn), torch.ones(16, 8)
    by_block, by_row = Weight(data, scale, block=(128, 128)), Weight(data, torch.ones(2 * size, 1), block=(1, size))
    for weight in (by_block, by_row) if DEVICE.has_fp8 else ():
        for rows in numbers_of_rows((1, 200), (2, 16, 64)):
            x, residual = torch.zeros(rows, size, dtype=BF16), torch.zeros(rows, 2 * size, dtype=BF16)
            Fp8Projection(weight, None, norm, DEVICE, workspace, is_gated=True)(x)
            Fp8Projection(weight, None, None, DEVICE, workspace).add(x, residual)
    codes = torch.zeros(2 * size, size // 2, dtype=torch.uint8)
    forms = [(128, False, BF16), (32, True, BF16), (64, True, torch.float16)]
    weights = []
    for group, has_zeros, dtype in forms:
        scale = torch.ones(2 * size, size // group, dtype=dtype)
        weights.append((Weight(codes, scale, scale.to(torch.uint8) if has_zeros else None, (1, group)), dtype))
    exponents = torch.zeros(2 * size, size // 32, dtype=torch.float8_e8m0fnu)
    weights.append((Weight(codes.view(FP4), exponents, block=(1, 32)), BF16))
    for weight, dtype in weights:
        for rows in numbers_of_rows((1, 200), (32, 64, 300)) if dtype == BF16 else (8, 300):
            x, residual = torch.zeros(rows, size, dtype=dtype), torch.zeros(rows, 2 * size, dtype=dtype)
            norm = TokenNorm(torch.ones(size, dtype=dtype), 1e-6)
            Int4Projection(weight, None, norm, DEVICE, workspace, is_gated=True)(x)
            Int4Projection(weight, None, None, DEVICE, workspace).add(x, residual)


def call_wide(workspace: Workspace) -> None:
    """Call decode attention with large queries of a row: 16 drafts, and heads of 256."""
    for kinds in ((32, 4, 128), (32, 8, 256)):
        attend(workspace, *kinds, query_len=17, dtype=BF16)


def call_widest(workspace: Workspace) -> None:
    """Call it with 256 queries per KV head, and with a cache in 8 bits."""
    attend(workspace, 64, 4, 128, query_len=16, dtype=BF16)
    if DEVICE.has_fp8:
        attend(workspace, 32, 4, 128, query_len=17, dtype=torch.float8_e4m3fn)


def attend(
    workspace: Workspace, num_heads: int, num_kv_heads: int, head_dim: int, query_len: int, dtype: torch.dtype
) -> None:
    """Call decode attention of 32 rows over a cache of a type."""
    decode = decode_attention.TritonDecode(num_heads, num_kv_heads, head_dim, query_len, DEVICE, workspace)
    q = torch.zeros(32 * query_len, num_heads, head_dim, dtype=BF16)
    lens, tables = torch.ones(32, dtype=torch.int32), torch.zeros(32, 64, dtype=torch.int32)
    cache = torch.zeros(2, 3, num_kv_heads, 16, head_dim, dtype=dtype)
    kind = Heads(num_heads, num_kv_heads, head_dim)
    decode(q, LayerCache(*cache), lens, tables, query_len, kind, torch.empty_like(q))


KINDS = (
    (64, 8, 64, 64, {"window": 128, "sinks": torch.zeros(64)}),  # gpt-oss
    (32, 16, 128, 128, {"window": 4096, "soft_cap": 50.0}),  # Gemma 2
    (16, 8, 256, 256, {"window": 1024, "norm": HeadNorm(*torch.ones(2, 256, dtype=BF16), 1e-6, has_values=True)}),
    (64, 4, 192, 128, {"window": 128, "sinks": torch.zeros(64)}),  # MiMo: 16 query heads per KV head
    (32, 4, 512, 512, {"norm": HeadNorm(*torch.ones(2, 512, dtype=BF16), 1e-6, True), "values_are_keys": True}),
    (16, 1, 512, 512, {"soft_cap": 30.0}),
)  # those of 256 and the first of 512 are Gemma 4's
"""Heads: how many, of queries and of keys, their sizes, of keys and of values, and settings of `Heads`."""


def call_kinds(_: Workspace) -> None:
    """Call attention with windows, sinks, soft caps, and heads of other sizes."""
    for num_heads, num_kv_heads, head_dim, value_dim, settings in KINDS if IS_FULL else KINDS[:1]:
        kind = Heads(num_heads, num_kv_heads, head_dim, v_dim=value_dim, **settings)
        workspace = Workspace(CPU)  # each kind reserves before its first use
        decode = decode_attention.TritonDecode(num_heads, num_kv_heads, head_dim, 17, DEVICE, workspace, value_dim)
        workspace.reserve(1 << 25)
        width = kind.width
        for kv_dtype in (BF16, *([torch.float8_e4m3fn] if DEVICE.has_fp8 and IS_FULL else [])):
            sizes = 3, num_kv_heads, 16
            keys, values = (torch.zeros(*sizes, dim, dtype=kv_dtype) for dim in (head_dim, value_dim))
            cache, integers = LayerCache(keys, values), torch.zeros(16, dtype=torch.int64)
            by = heads.rotation_table(integers, torch.ones(head_dim // 2), DEVICE)
            heads.append_heads(torch.zeros(16, width, dtype=BF16), kind, by, integers, cache, DEVICE)
            of_prompts = [(32, PIECE_TOKENS)] if head_dim > MOST_OF_TORCH else []
            for rows, query_len in ((1, 1), (32, 17 if IS_FULL else 5), *of_prompts):
                q = torch.zeros(rows * query_len, num_heads, head_dim, dtype=BF16)
                out = torch.zeros(rows * query_len, num_heads, value_dim, dtype=BF16)
                lens, tables = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 64, dtype=torch.int32)
                decode(q, cache, lens, tables, query_len, kind, out)
                if rows <= 16:
                    qkv = torch.zeros(rows, width, dtype=BF16)
                    decode.from_projection(qkv, kind, by, integers, cache, lens, tables, query_len, out)
            copies = [torch.empty(64, num_kv_heads, dim, dtype=BF16) for dim in (head_dim, value_dim)]
            starts, table = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
            heads.gather_heads(cache, table, starts, 4, kind, *copies, DEVICE)


def call_states(_: Workspace) -> None:
    """Call gated delta nets of the sizes of Qwen3.5-27B, and its attention: gated, rotated in part."""
    shape = RowState(16, 48, 128, 128, 4, "float32")
    ones = torch.ones(48)
    heads_of = DeltaHeads(
        shape, torch.zeros(shape.conv_dim, 4, dtype=BF16), ones, ones, torch.ones(128, dtype=BF16), 1e-6
    )
    delta = CudaGatedDelta(heads_of, block_size=16, device=DEVICE)
    for max_drafts, query_len in ((0, 1), (3, 1), (3, 4), (7, 8)) if IS_FULL else ((3, 1), (3, 4)):
        state = allocate_layer_state(shape, 1, 16, max_drafts, BF16, CPU, has_snapshots=False)
        numbers, num_tokens = torch.zeros(3, dtype=torch.int32), query_len + 24
        batch = AttentionBatch(1, query_len, numbers, [], [], [24], [24])
        batch.spans = RowSpans(torch.zeros(2, dtype=torch.int64), *[numbers] * 2, numbers.long(), numbers, numbers)
        batch.plans[ScanPlan] = plan_scan(batch, 16, CPU)
        delta((torch.zeros(num_tokens, 16384, dtype=BF16), torch.zeros(num_tokens, 96, dtype=BF16)), state, batch)
    gated = Heads(24, 4, 256, HeadNorm(*torch.ones(2, 256), 1e-6), rotary_dim=64, has_gate=True)
    cache, integers = LayerCache(*torch.zeros(2, 3, 4, 16, 256, dtype=BF16)), torch.zeros(16, dtype=torch.int64)
    qkv, by = torch.zeros(16, 14336, dtype=BF16), heads.rotation_table(integers, torch.ones(32), DEVICE)
    heads.gate_heads_(heads.append_heads(qkv, gated, by, integers, cache, DEVICE), qkv, DEVICE)


def call_latents(_: Workspace) -> None:
    """Call attention over latents as DeepSeek-V3 does, whole and one of eight members, and GLM-4.7-Flash."""
    for num_heads in (128, 16, 20) if IS_FULL else (128, 20):
        workspace, integers = Workspace(CPU), torch.zeros(32, dtype=torch.int64)
        kind = Heads(num_heads, 1, 576, v_dim=512, rotary_dim=64, has_latents=True)
        latents = LatentHeads(
            kind, torch.zeros(num_heads, 256, 512, dtype=BF16), 128, torch.ones(512, dtype=BF16), 1e-6
        )
        kernels = latent_kernels.TritonLatents(latents, 5, DEVICE, workspace)
        by = heads.rotation_table(integers, torch.ones(32), DEVICE)
        for kv_dtype in (BF16, *([torch.float8_e4m3fn] if DEVICE.has_fp8 and IS_FULL else [])):
            cache = LayerCache(*(torch.zeros(3, 1, 16, size, dtype=kv_dtype) for size in (64, 512)))
            queries, projected = torch.zeros(32, num_heads, 192, dtype=BF16), torch.zeros(32, 576, dtype=BF16)
            kernels.append(queries, projected, latents, by, integers, cache)
            for rows, query_len in ((1, 1), (8, 4)):
                absorbed = torch.zeros(num_heads, rows * query_len, 512, dtype=BF16)
                lens, tables = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 64, dtype=torch.int32)
                kernels.attend(absorbed, queries[: rows * query_len, :, 128:], cache, lens, tables, query_len, latents)


def call_invariant(workspace: Workspace) -> None:
    """Call what gives a row the same bits beside any others, with few rows and many."""
    device, rows_of = replace(DEVICE, is_invariant=True), numbers_of_rows((1, 200, 512), (16, 64))
    shapes = ((4096, 1024, False), (24576, 4096, True), (4096, 12288, False))
    products = [
        projection.Product(Weight(torch.empty(*shape, dtype=BF16)), None, 1e-6, gate) for *shape, gate in shapes
    ]
    workspace.reserve(1 << 25)
    for product in products:
        for rows in rows_of:
            own = own_product(rows, product, device)
            assert own is not None
            x = torch.empty(rows, product.num_inputs, dtype=BF16)
            residual = None if product.is_gated else torch.empty(rows, product.num_outputs, dtype=BF16)
            projection.project(x, own.product, residual, own.tuning, device, workspace)
    tables, lens = torch.zeros(200, 256, dtype=torch.int32), torch.ones(200, dtype=torch.int32)
    for sizes, settings in (((32, 8, 128), {}), ((64, 8, 64), {"window": 128}), ((16, 8, 256), {"soft_cap": 30.0})):
        kind = Heads(*sizes, **settings)
        attention = InvariantAttention(kind, device, workspace)
        cache = LayerCache(*torch.zeros(2, 3, sizes[1], 16, sizes[2], dtype=BF16))
        for rows, query_len in ((1, 1), (200, 1), (2, 5)) if IS_FULL or not settings else ((1, 1),):
            q = torch.zeros(rows * query_len, sizes[0], sizes[2], dtype=BF16)
            attention(q, cache, lens[:rows], tables[:rows], query_len, kind, torch.empty_like(q))
        batch = AttentionBatch(0, 1, lens[:1], [tables[:1]], [], [5], [5])
        attention.run(attention.plan(batch, 0), q[:5], cache, kind, torch.empty_like(q[:5]))
    if IS_FULL:
        gate_up, down = (
            Weight(torch.empty(128, *shape, dtype=BF16, device="meta")) for shape in ((1536, 2048), (2048, 768))
        )
        router = Router(torch.empty(128, 2048, dtype=BF16), Routing(8, normalizes=True))
        layer = CudaExperts(router.weight[0], 1e-6, router, ExpertWeights(gate_up, down), device, workspace)
        for rows in (1, 64, 2048):
            layer(torch.empty(rows, 2048, dtype=BF16))


def main() -> None:
    """Compile, and print a list of kernels."""
    compiled = compile_instead_of_launching()
    found = []
    in_full = [
        [call_all, call_experts, call_experts_in_4_bits, call_quantized, call_states],
        [call_wide],
        [call_widest, call_kinds, call_latents],
        [call_invariant],
    ]
    in_ci = [[call_all, call_experts_in_4_bits, call_states], [call_kinds, call_latents], [], [call_invariant]]
    for width, calls in enumerate(in_full if IS_FULL else in_ci):
        for call in calls:
            call(Workspace(CPU))
        found += [
            {"kernel": name, "digest": digest, "width": width, "is_known": kernel is None}
            | (resources(kernel) if kernel is not None else {})
            for name, digest, kernel in compiled
        ]
        compiled.clear()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
