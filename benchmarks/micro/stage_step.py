"""Where a step of one stage spends its time on a GPU: in one graph, with prompts called, and in which kernels.

    python benchmarks/micro/stage_step.py --model DIR --layers 0 18 --rows 1 16 32 --contexts 640 8192
    python benchmarks/micro/stage_step.py --model DIR --layers 18 36                 the last stage, with its head
    python benchmarks/micro/stage_step.py --model DIR --layers 0 19 --rows 90 --prompts 700 740         a mixed step
    python benchmarks/micro/stage_step.py --model DIR --layers 0 36 --members 2          one of two, without the sums

Layers with random weights, every decode row as long as one of `--contexts`, prompts whole, no links. Beside it, of
steps that only decode, the share of the limit: what reading the weights that so many rows need and their KV takes at
best, or the arithmetic. Kernels overlap, so that their times may add up to more than the step. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from graph_timer import kernels_of, require_gpu, step_ms

sys.path.insert(0, str(Path(__file__).parents[1]))
from device_speed import DeviceSpeed
from report import print_report
from stage_limit import StageLimit, Work

from raypp.models.config import load_model_config
from raypp.models.decoder import DecoderModel
from raypp.models.member_sizes import of_one_member
from raypp.models.registry import build_model
from raypp.models.weights import DummyWeights
from raypp.ops.attention import AttentionBatch
from raypp.ops.device_kernels import choose_kernels, choose_token_choice
from raypp.ops.kv_cache import FP8, LayerCache, allocate_layer_cache, sides
from raypp.ops.sample.tables import AdjustedLogits

SPEEDS = {"H200": DeviceSpeed(4.3e12, 780e12), "H100": DeviceSpeed(3.0e12, 780e12)}
"""What they read in long stretches, and multiply."""
BLOCK_SIZE = 16


class StageStep:
    """A step of some layers: in one graph if it only decodes."""

    def __init__(
        self,
        model: DecoderModel,
        caches: list[LayerCache],
        rows: int,
        context: int,
        is_last: bool,
        query_len: int = 1,
        prompts: Sequence[int] = (),
        num_groups: int = 1,
    ) -> None:
        device, num_tokens = torch.device("cuda"), rows * query_len + sum(prompts)
        width, num_rows = -(-max(context, *prompts, 1) // BLOCK_SIZE), rows + len(prompts)
        tables = (torch.randperm(num_rows * width, device=device).int() + 1).view(num_rows, width)
        starts = [context - query_len] * rows + [0] * len(prompts)
        ends = [context] * rows + list(prompts)
        spans = [torch.arange(start, end, device=device) for start, end in zip(starts, ends, strict=True)]
        slots = [
            table[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE
            for table, span in zip(tables.long(), spans, strict=True)
        ]
        batch = AttentionBatch(
            num_decode_rows=rows,
            decode_query_len=query_len,
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            block_tables=[tables] * num_groups,
            slot_mappings=[torch.cat(slots)] * num_groups,
            prefill_query_lens=list(prompts),
            prefill_seq_lens=list(prompts),
        )
        positions = torch.cat(spans)
        entering = torch.randn(num_tokens, model.hidden_size, device=device, dtype=torch.bfloat16)
        ends_at = torch.tensor(
            [*range(rows * query_len), *(rows * query_len + n - 1 for n in itertools.accumulate(prompts))]
        )
        ends_at = ends_at.to(device)
        choice = choose_token_choice(device, len(ends_at))

        def step() -> None:
            model.plan_attention(batch, 0)
            hidden = model.forward(entering.clone(), positions, batch, caches)
            if is_last:
                choice.greedy(AdjustedLogits(model.compute_logits(hidden[ends_at] if prompts else hidden)))

        self.step = step  # a graph reads the tensors that it holds
        self.run: Callable[[], object] = step
        if prompts:
            step()
            return
        torch.cuda.synchronize()  # what was made so far was made in another stream
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                step()
        self.run = graph.replay


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int, nargs=2, required=True, metavar=("START", "END"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[640])
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="tokens of prompts beside the decode rows")
    parser.add_argument("--members", type=int, default=1, help="the sizes of one of so many, see `member_sums.py`")
    parser.add_argument("--query-len", type=int, default=1, help="tokens of a row: 1 and its drafts")
    parser.add_argument("--kernels", type=int, default=14, help="how many are printed, the longest first")
    parser.add_argument("--kv-cache-dtype", choices=["model", "fp8"], default="model")
    parser.add_argument("--batch-invariant", action="store_true", help="with sums that do not depend on other rows")
    args = parser.parse_args()
    require_gpu()
    kv_dtype = FP8 if args.kv_cache_dtype == "fp8" else torch.bfloat16
    config = of_one_member(load_model_config(Path(args.model)), args.members)
    device, (start, end) = torch.device("cuda"), args.layers
    is_last, max_rows = end == config.num_layers, max(args.rows)
    kernels = choose_kernels(
        device,
        torch.bfloat16,
        block_size=BLOCK_SIZE,
        max_query_len=args.query_len,
        num_ring_entries=2,
        kv_dtype=kv_dtype,
        is_invariant=args.batch_invariant,
    )
    model = build_model(config, start_layer=start, end_layer=end, dtype=torch.bfloat16, device=device, kernels=kernels)
    model.load_weights(DummyWeights(0, device))
    most_tokens = max(*args.contexts, *args.prompts, 1)
    num_blocks = 1 + (max_rows + len(args.prompts)) * -(-most_tokens // BLOCK_SIZE)
    sizes = [(keeps.num_kv_heads, keeps.k_dim, keeps.v_dim) for keeps in (of.cache for of in config.attention)]
    caches = [allocate_layer_cache(num_blocks, BLOCK_SIZE, *each, kv_dtype, device) for each in sizes[start:end]]
    for side in sides(caches):
        side.copy_(torch.randn(side.shape, device=device, dtype=torch.bfloat16))
    speed = next((of for name, of in SPEEDS.items() if name in torch.cuda.get_device_name()), SPEEDS["H200"])
    limit = StageLimit(config, start, end, is_last, torch.bfloat16.itemsize, speed, kv_dtype.itemsize)
    figures, num_groups = dict[str, Any](), len(config.windows)
    with torch.inference_mode():
        for context, rows in itertools.product(args.contexts, args.rows):
            step = StageStep(model, caches, rows, context, is_last, args.query_len, args.prompts, num_groups)
            tokens, kv_tokens = rows * args.query_len, rows * context
            limit_ms = limit.seconds(Work(tokens, kv_tokens, kv_tokens * args.query_len, tokens, rows)) * 1e3
            (device_ms, host_ms), found = step_ms(step.run), kernels_of(step.run) if args.kernels else []
            name = f"{rows} rows of {context}"
            share = "" if args.prompts else f", limit {limit_ms:.3f} ms, {limit_ms / device_ms:.2f} of it"
            print(f"{name}: {device_ms:.3f} ms ({host_ms:.3f} to launch){share}", flush=True)
            for kernel, number, us in found[: args.kernels]:
                print(f"    {us:9.1f} us  {number:5.0f} x {us / number:8.2f} us  {kernel[:90]}")
            figures[name] = {"step_ms": device_ms, "host_ms": host_ms, "kernels": found[:14]}
            if not args.prompts:
                figures[name]["limit_ms"] = limit_ms
    print_report("stage_step", vars(args), figures)


if __name__ == "__main__":
    main()
