"""What a KV cache in 8 bits gains on a GPU: decode and prefill attention over both kinds of cache, in CUDA graphs.

    python benchmarks/micro/kv_dtypes.py                     decode rows of Qwen3-8B, half a minute
    python benchmarks/micro/kv_dtypes.py --prefill           prefill rows, both ways; FlashInfer may have to compile

Figures are medians in microseconds per layer. Caches go round through more bytes than the second-level cache holds. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graph_timer import compile_ahead, require_gpu, try_us

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

from raypp.ops.attention import AttentionBatch, HeadNorm, Heads
from raypp.ops.cuda.decode_attention import DecodeTuning, TritonDecode
from raypp.ops.cuda.heads import append_heads, rotation_table
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.step_attention import MAX_FUSED_TOKENS, FlashInferPrefill
from raypp.ops.kv_cache import FP8, LayerCache

BF16 = torch.bfloat16
KV_DTYPES = {"bf16": BF16, "fp8": FP8}
BYTES_PER_US = 4.3e6  # what an H200 reads in long stretches
COLD_BYTES = 400 << 20
BLOCK_SIZE = 16
HEADS = (32, 8, 128)
CUTS = [
    DecodeTuning(splits, *cut)
    for splits, cut in itertools.product((1, 2, 4, 8, 16), ((64, 4, 2), (128, 4, 2), (128, 4, 3), (256, 8, 2)))
]
CUTS += [
    DecodeTuning(splits, *cut, max_registers)
    for splits, (cut, *bounds) in itertools.product((1, 2), (((64, 4, 2), 72, 80), ((128, 4, 2), 100, 112, 128)))
    for max_registers in bounds
]
PREFILLS = [
    [(2048, 2048)],
    [(512, 512)] * 4,
    [(1024, 8192)],
    [(256, 8192)],
    [(512, 8192)],
    [(2048, 16384)],
    [(2048, 32768)],
    [(4096, 32768)],
]


class Rows:
    """Decode rows of one length, and caches of one type."""

    def __init__(self, num_rows: int, context: int, kv_dtype: torch.dtype) -> None:
        self.heads = Heads(*HEADS, HeadNorm(*torch.ones(2, 128, device="cuda", dtype=BF16), 1e-6))
        width = math.ceil(context / BLOCK_SIZE)
        sides = 2, 1 + num_rows * width, HEADS[1], BLOCK_SIZE, HEADS[2]
        self.num_bytes = num_rows * context * 2 * HEADS[1] * HEADS[2] * kv_dtype.itemsize
        count = max(2, min(16, math.ceil(COLD_BYTES / self.num_bytes)))
        self.caches = [LayerCache(*torch.randn(sides, device="cuda", dtype=BF16).to(kv_dtype)) for _ in range(count)]
        self.tables = (torch.randperm(num_rows * width, device="cuda").int() + 1).view(num_rows, width)
        self.lens = torch.full((num_rows,), context, dtype=torch.int32, device="cuda")
        self.lens[0] = context - 3
        self.qkv = torch.randn(num_rows, (HEADS[0] + 2 * HEADS[1]) * HEADS[2], device="cuda", dtype=BF16)
        self.q = torch.randn(num_rows, HEADS[0], HEADS[2], device="cuda", dtype=BF16)
        self.out = torch.empty_like(self.q)
        self.slots = torch.arange(num_rows, device="cuda")
        self.device = Device.of(torch.device("cuda"))
        self.by = rotation_table(self.slots, torch.ones(HEADS[2] // 2, device="cuda"), self.device)

    def attend(self, decode: TritonDecode, cache: torch.Tensor, tuning: DecodeTuning | None = None) -> None:
        """Attend to what the cache holds."""
        decode(self.q, cache, self.lens, self.tables, 1, self.heads, self.out, tuning)

    def step(self, decode: TritonDecode, cache: torch.Tensor) -> None:
        """Do what a layer does: in one launch for few rows, else in two."""
        if len(self.q) <= MAX_FUSED_TOKENS:
            decode.from_projection(
                self.qkv, self.heads, self.by, self.slots, cache, self.lens, self.tables, 1, self.out
            )
            return
        q = append_heads(self.qkv, self.heads, self.by, self.slots, cache, self.device)
        decode(q, cache, self.lens, self.tables, 1, self.heads, self.out)


def measure_decode(rows: list[int], contexts: list[int], names: list[str]) -> dict[str, Any]:
    """Return the times of decode rows over both kinds of cache: as chosen, a layer's step, and the best other cuts."""
    workspace, figures = Workspace(torch.device("cuda")), dict[str, Any]()
    workspace.reserve(64 << 20)
    decode = TritonDecode(*HEADS, 1, Device.of(torch.device("cuda")), workspace)
    assert workspace.counters is not None
    small = [Rows(1, 512, kv_dtype) for kv_dtype in (KV_DTYPES[name] for name in names)]
    compile_ahead([partial(each.attend, decode, each.caches[0], cut) for each in small for cut in CUTS])
    for num_rows, context, name in itertools.product(rows, contexts, names):
        kv_dtype = KV_DTYPES[name]
        made = Rows(num_rows, context, kv_dtype)
        chosen = try_us([partial(made.attend, decode, cache) for cache in made.caches])
        step = try_us([partial(made.step, decode, cache) for cache in made.caches])
        best = []
        for cut in CUTS:
            if cut.num_splits <= 2 * math.ceil(context / cut.tile_tokens):
                us = try_us([partial(made.attend, decode, cache, cut) for cache in made.caches])
                if isinstance(us, float):
                    best.append((us, dataclasses.astuple(cut)))
        best, floor = sorted(best, key=lambda each: each[0])[:6], round(made.num_bytes / BYTES_PER_US, 2)
        taken = dataclasses.astuple(decode.cut(num_rows, 1, kv_dtype.itemsize))
        print(f"{num_rows:>4} x {context:<5} {name} {chosen} {taken} step {step} floor {floor} best {best}", flush=True)
        figures[f"{num_rows} x {context} {name}"] = {"us": chosen, "step_us": step, "floor_us": floor, "best": best}
    return figures


def measure_prefill(names: list[str]) -> dict[str, Any]:
    """Return the times of prefill rows over both kinds of cache, block by block and over copies of keys and values."""
    figures, device = dict[str, Any](), torch.device("cuda")
    heads = Heads(*HEADS)
    for prefill, name in itertools.product(PREFILLS, names):
        width = max(length for _, length in prefill) // BLOCK_SIZE
        tables = torch.randperm(width * len(prefill), dtype=torch.int32, device=device).view(len(prefill), width) + 1
        cache = torch.randn(2, 1 + tables.numel(), HEADS[1], BLOCK_SIZE, HEADS[2], device=device, dtype=BF16)
        cache, num_tokens = cache.to(KV_DTYPES[name]), sum(count for count, _ in prefill)
        batch = AttentionBatch(
            num_decode_rows=0,
            decode_query_len=1,
            seq_lens=torch.tensor([length for _, length in prefill], dtype=torch.int32, device=device),
            block_tables=[tables],
            slot_mappings=[torch.zeros(num_tokens, dtype=torch.int64, device=device)],
            prefill_query_lens=[count for count, _ in prefill],
            prefill_seq_lens=[length for _, length in prefill],
        )
        q = torch.randn(num_tokens, HEADS[0], HEADS[2], device=device, dtype=BF16)
        num_pairs = sum(count * length - count * (count - 1) // 2 for count, length in prefill)
        for way, least_queries in (("blocks", math.inf), ("copies", 0)):
            attention = FlashInferPrefill(heads, BLOCK_SIZE, BF16, cache.dtype, 1, device, least_queries)
            plan = attention.plan(batch, 0)
            us = try_us([partial(attention.run, plan, q, cache, heads, torch.empty_like(q))] * 4)
            speed = f"{4 * num_pairs * HEADS[0] * HEADS[2] / us / 1e6:.0f} TFLOP/s" if isinstance(us, float) else ""
            print(f"prefill {prefill} {name} {way} {us} {speed}", flush=True)
            figures[f"{prefill} {name} {way}"] = us
    return figures


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[640, 1024])
    parser.add_argument("--kv-dtypes", nargs="+", choices=list(KV_DTYPES), default=list(KV_DTYPES))
    parser.add_argument("--prefill", action="store_true")
    args = parser.parse_args()
    require_gpu()
    figures = (
        measure_prefill(args.kv_dtypes) if args.prefill else measure_decode(args.rows, args.contexts, args.kv_dtypes)
    )
    print_report("kv_dtypes", vars(args), figures)


if __name__ == "__main__":
    main()
