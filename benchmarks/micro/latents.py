"""Attention over latents at the sizes of DeepSeek-V3 and GLM-4.7-Flash: microseconds per layer, and shares of limits.

    python benchmarks/micro/latents.py [--out FILE]

Decode rows: all of a layer's attention (append, queries to latents, cache, latents to values), the kernel over the
cache alone, and the best of other cuts; the limit is the slower of what the cache's bytes and the products take. Rows
of a stage's member have its share of the heads. Prompts: chunks behind a context. Caches are cold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graph_timer import require_gpu, try_us

from raypp.ops.attention import AttentionBatch, Heads, LatentHeads
from raypp.ops.cuda.heads import rotation_table
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.latent_attention import CudaLatentAttention
from raypp.ops.cuda.latent_kernels import LatentTuning, TritonLatents, tune_latents
from raypp.ops.cuda.step_attention import PrefillSpace
from raypp.ops.kv_cache import LayerCache

SIZES = {
    "deepseek-v3": (128, 128, 128),
    "deepseek-v3, one of 8 members": (16, 128, 128),
    "glm-4.7-flash": (20, 192, 256),
}
"""Heads, elements of a key that are not rotated, of a value."""
RANK, ROTARY, BLOCK_SIZE, BF16 = 512, 64, 16, torch.bfloat16
BYTES_PER_US, FLOPS_PER_US = 3.35e6, 989e6  # of an H100
COLD_BYTES = 200 << 20
ROWS, CONTEXTS = (1, 16, 64, 128), (1024, 8192, 32768)


def made_latents(num_heads: int, key_dim: int, value_dim: int) -> LatentHeads:
    scale = (key_dim + ROTARY) ** -0.5
    heads = Heads(num_heads, 1, RANK + ROTARY, v_dim=RANK, scale=scale, rotary_dim=ROTARY, has_latents=True)
    expand = torch.randn(num_heads, key_dim + value_dim, RANK, device="cuda", dtype=BF16) * 0.02
    return LatentHeads(heads, expand, value_dim, torch.ones(RANK, device="cuda", dtype=BF16), 1e-6)


def made_step(
    latents: LatentHeads, num_rows: int, context: int, query_len: int, num_prompt_tokens: int
) -> tuple[AttentionBatch, list[LayerCache], tuple[torch.Tensor, torch.Tensor]]:
    width = -(-context // BLOCK_SIZE)
    tables = 1 + torch.randperm(num_rows * width, device="cuda").int().view(num_rows, width)
    count = max(1, min(16, COLD_BYTES // (num_rows * context * (RANK + ROTARY) * 2) + 1))
    sizes = 1 + num_rows * width, 1, BLOCK_SIZE
    caches = [
        LayerCache(*(torch.randn(*sizes, size, device="cuda", dtype=BF16) for size in (ROTARY, RANK)))
        for _ in range(count)
    ]
    num_tokens = num_rows * (num_prompt_tokens or query_len)
    key_dim = latents.key_dim + ROTARY
    projected = (
        torch.randn(num_tokens, latents.heads.num_heads * key_dim, device="cuda", dtype=BF16),
        torch.randn(num_tokens, RANK + ROTARY, device="cuda", dtype=BF16),
    )
    is_prompt = bool(num_prompt_tokens)
    batch = AttentionBatch(
        num_decode_rows=0 if is_prompt else num_rows,
        decode_query_len=query_len,
        seq_lens=torch.full((num_rows,), context, dtype=torch.int32, device="cuda"),
        block_tables=[tables],
        slot_mappings=[torch.arange(num_tokens, device="cuda") % BLOCK_SIZE],
        prefill_query_lens=[num_prompt_tokens] * num_rows if is_prompt else [],
        prefill_seq_lens=[context] * num_rows if is_prompt else [],
    )
    return batch, caches, projected


def measure_decode(name: str, num_rows: int, context: int, query_len: int = 1) -> dict[str, Any]:
    num_heads, key_dim, value_dim = SIZES[name]
    latents, device = made_latents(num_heads, key_dim, value_dim), Device.of(torch.device("cuda"))
    workspace = Workspace(torch.device("cuda"))
    workspace.reserve(64 << 20)
    attention = make_attention(latents, device, workspace, query_len)
    batch, caches, projected = made_step(latents, num_rows, context, query_len, 0)
    by = rotation_table(torch.arange(len(projected[0]), device="cuda"), torch.ones(ROTARY // 2, device="cuda"), device)
    decode = TritonLatents(latents, query_len, device, workspace)
    absorbed = torch.randn(num_heads, num_rows * query_len, RANK, device="cuda", dtype=BF16)
    ends = projected[0].unflatten(1, (num_heads, -1))[:, :, key_dim:]
    step = (batch.seq_lens, batch.block_tables[0], query_len, latents)
    whole = try_us([partial(attention.run, projected, latents, by, cache, batch, None) for cache in caches])
    own = try_us([partial(decode.attend, absorbed, ends, cache, *step) for cache in caches])
    chosen, tried = tune_latents(num_rows, num_heads, query_len, device), list[tuple[float, str]]()
    least = chosen.num_shares
    for splits, shares, (tile, warps, stages) in itertools.product(
        sorted({1, chosen.num_splits, 2 * chosen.num_splits}),
        (least, 2 * least),
        ((32, 4, 2), (32, 8, 2), (32, 8, 3), (64, 8, 1), (64, 8, 2), (64, 4, 2)),
    ):
        tuning = LatentTuning(splits, shares, tile, warps, stages)
        if splits * num_heads * num_rows * query_len * (RANK + 1) > workspace.floats.numel() and splits > 1:
            continue
        us = try_us([partial(decode.attend, absorbed, ends, cache, *step, tuning) for cache in caches])
        if isinstance(us, float):
            tried.append((us, str((splits, shares, tile, warps, stages))))
    num_bytes = num_rows * context * (RANK + ROTARY) * 2
    flops = 2 * num_rows * query_len * num_heads * context * (2 * RANK + ROTARY)
    limit = max(num_bytes / BYTES_PER_US, flops / FLOPS_PER_US)
    found = {"layer_us": whole, "kernel_us": own, "limit_us": round(limit, 2), "best": sorted(tried)[:3]}
    if isinstance(own, float):
        found["share_of_limit"] = round(limit / own, 2)
    print(f"{name:<30}{num_rows:>4} x {context:<6} {query_len} {found} {chosen}", flush=True)
    return found


def measure_prompt(name: str, num_tokens: int, context: int) -> dict[str, Any]:
    num_heads, key_dim, value_dim = SIZES[name]
    latents, device = made_latents(num_heads, key_dim, value_dim), Device.of(torch.device("cuda"))
    attention = make_attention(latents, device, Workspace(torch.device("cuda")), 1)
    batch, caches, projected = made_step(latents, 1, context, 1, num_tokens)
    by = rotation_table(torch.arange(num_tokens, device="cuda"), torch.ones(ROTARY // 2, device="cuda"), device)
    attention.plan(batch, 0)
    us = try_us([partial(attention.run, projected, latents, by, cache, batch, None) for cache in caches[:2]])
    pairs = num_tokens * context - num_tokens * (num_tokens - 1) / 2
    flops = 2 * pairs * num_heads * (key_dim + ROTARY + value_dim)
    flops += 2 * context * num_heads * RANK * (key_dim + value_dim)  # what expands latents
    found = {"layer_us": us, "limit_us": round(flops / FLOPS_PER_US, 2)}
    print(f"{name:<30} prompt {num_tokens:>5} of {context:<6} {found}", flush=True)
    return found


def make_attention(
    latents: LatentHeads, device: Device, workspace: Workspace, max_query_len: int
) -> CudaLatentAttention:
    space = PrefillSpace(torch.device("cuda"))
    return CudaLatentAttention(
        latents,
        block_size=BLOCK_SIZE,
        dtype=BF16,
        max_query_len=max_query_len,
        num_ring_entries=1,
        device=device,
        workspace=workspace,
        space=lambda: space,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    require_gpu()
    figures: dict[str, Any] = {}
    for name, num_rows, context in itertools.product(SIZES, ROWS, CONTEXTS):
        if num_rows * context <= math.prod((128, 8192)):
            figures[f"{name}: {num_rows} x {context}"] = measure_decode(name, num_rows, context)
    figures["deepseek-v3: 16 x 8192, 4 tokens"] = measure_decode("deepseek-v3", 16, 8192, 4)
    for name, (num_tokens, context) in itertools.product(SIZES, ((2048, 2048), (2048, 8192), (512, 32768))):
        figures[f"{name}: {num_tokens} of {context}"] = measure_prompt(name, num_tokens, context)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
