"""Where the decode step of one stage spends its time on a GPU: one graph, and each kernel in it.

    python benchmarks/micro/stage_step.py --model DIR --layers 0 18 --rows 1 16 32 --context 640
    python benchmarks/micro/stage_step.py --model DIR --layers 18 36                 the last stage, with its head

Layers with random weights, every row `--context` tokens long, no host and no links: the floor under a stage of an
engine. Kernels overlap, so that their times add up to more than the step. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from graph_timer import kernels_of, require_gpu

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

from raypp.models.config import load_model_config
from raypp.models.decoder import DecoderModel
from raypp.models.registry import build_model
from raypp.models.sizes import kv_bytes_per_token_per_layer
from raypp.models.weights import DummyWeights
from raypp.ops.attention import AttentionBatch
from raypp.ops.device_kernels import choose_kernels, choose_token_choice
from raypp.ops.kv_cache import FP8, allocate_kv_cache
from raypp.ops.sample.tables import AdjustedLogits

BYTES_PER_MS = 4.3e9  # what an H200 reads in long stretches
BLOCK_SIZE = 16
NUM_REPLAYS = 30


class DecodeStep:
    """A decode step of some layers in one graph."""

    def __init__(
        self,
        model: DecoderModel,
        caches: list[torch.Tensor],
        rows: int,
        context: int,
        is_last: bool,
        query_len: int = 1,
    ) -> None:
        device, num_tokens = torch.device("cuda"), rows * query_len
        width = -(-context // BLOCK_SIZE)
        tables = (torch.randperm(rows * width, device=device).int() + 1).view(rows, width)
        places = torch.arange(context - query_len, context, device=device)
        batch = AttentionBatch(
            num_decode_rows=rows,
            decode_query_len=query_len,
            seq_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
            block_tables=tables,
            slot_mapping=(tables.long()[:, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE).flatten(),
            prefill_query_lens=[],
            prefill_seq_lens=[],
        )
        positions = places.repeat(rows)
        entering = torch.randn(num_tokens, model.hidden_size, device=device, dtype=torch.bfloat16)
        choice = choose_token_choice(device, num_tokens)

        def step() -> None:
            hidden = model.forward(entering.clone(), positions, batch, caches)
            if is_last:
                choice.greedy(AdjustedLogits(model.compute_logits(hidden)))

        torch.cuda.synchronize()  # what was made so far was made in another stream
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                step()

    def time_ms(self) -> float:
        """Return the median of some replays."""
        times = []
        for _ in range(NUM_REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int, nargs=2, required=True, metavar=("START", "END"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--query-len", type=int, default=1, help="tokens of a row: 1 and its drafts")
    parser.add_argument("--kv-cache-dtype", choices=["model", "fp8"], default="model")
    args = parser.parse_args()
    require_gpu()
    kv_dtype = FP8 if args.kv_cache_dtype == "fp8" else torch.bfloat16
    config = load_model_config(Path(args.model))
    device, (start, end) = torch.device("cuda"), args.layers
    is_last, max_rows = end == config.num_layers, max(args.rows)
    kernels = choose_kernels(
        device,
        torch.bfloat16,
        block_size=BLOCK_SIZE,
        max_query_len=args.query_len,
        num_ring_entries=2,
        kv_dtype=kv_dtype,
    )
    model = build_model(config, start_layer=start, end_layer=end, dtype=torch.bfloat16, device=device, kernels=kernels)
    model.load_weights(DummyWeights(0, device))
    loaded_bytes = torch.cuda.memory_allocated()
    num_blocks = 1 + max_rows * -(-args.context // BLOCK_SIZE)
    caches = [
        allocate_kv_cache(num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim, kv_dtype, device)
        for _ in range(start, end)
    ]
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, device=device, dtype=torch.bfloat16))
    embedding_bytes = 2 * config.vocab_size * config.hidden_size if start == 0 else 0
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        for rows in args.rows:
            step = DecodeStep(model, caches, rows, args.context, is_last, args.query_len)
            kv_bytes = rows * args.context * (end - start) * kv_bytes_per_token_per_layer(config, kv_dtype.itemsize)
            floor_ms = (loaded_bytes - embedding_bytes + kv_bytes) / BYTES_PER_MS
            step_ms, found = step.time_ms(), kernels_of(step.graph.replay)
            print(f"{rows} rows: {step_ms:.3f} ms, floor {floor_ms:.3f} ms, {sum(n for _, n, _ in found):.0f} kernels")
            for name, number, us in found[:10]:
                print(f"    {us:9.1f} us  {number:5.0f} x {us / number:8.2f} us  {name[:90]}")
            figures[f"{rows} rows"] = {"step_ms": step_ms, "floor_ms": floor_ms, "kernels": found[:12]}
    print_report("stage_step", vars(args), figures)


if __name__ == "__main__":
    main()
