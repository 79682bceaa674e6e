"""What recording the pieces of a step saves and costs: one stage's layers, operation by operation and in pieces.

    python benchmarks/micro/piecewise.py --shape qwen3-8b --num-layers 18

Per number of tokens (one prefill row): milliseconds of the device, and of the host to launch it, for both ways; at last
what the recordings took. With `--rows` the step has that many decode rows besides.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))

from graph_timer import step_ms
from model_configs import SHAPES, write_config
from report import print_report

from raypp.config.engine_config import EngineConfig
from raypp.graphs.buckets import token_buckets
from raypp.graphs.graph_manager import CudaGraphManager, graph_maker
from raypp.ops.attention import AttentionBatch
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.build_stage import allocate_kv_caches, build_stage_model
from raypp.stage.first_steps import warm_up
from raypp.stage.step_layers import PiecewiseLayers

_CONTEXT = 640


def _batch(num_rows: int, num_tokens: int, block_size: int, width: int, device: torch.device) -> AttentionBatch:
    """Return decode rows of a context, and one prefill row without any."""
    tables = torch.arange(1, 1 + (num_rows + 1) * width, dtype=torch.int32, device=device).view(-1, width)
    slots = [int(tables[row, 0]) * block_size for row in range(num_rows)]
    first = int(tables[num_rows, 0]) * block_size
    return AttentionBatch(
        num_decode_rows=num_rows,
        decode_query_len=1,
        seq_lens=torch.tensor([_CONTEXT] * num_rows + [num_tokens], dtype=torch.int32, device=device),
        block_tables=[tables],
        slot_mappings=[torch.tensor([*slots, *range(first, first + num_tokens)], device=device)],
        prefill_query_lens=[num_tokens],
        prefill_seq_lens=[num_tokens],
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--num-layers", type=int, default=18)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256, 512, 576, 1024, 1536, 2048])
    parser.add_argument("--rows", type=int, default=0)
    args = parser.parse_args()
    device, max_tokens = torch.device("cuda:0"), max(args.tokens) + args.rows
    config = EngineConfig.from_flat(
        str(write_config(args.shape, args.num_layers, Path(tempfile.mkdtemp()))),
        load_format="dummy",
        device="cuda",
        skip_tokenizer_init=True,
        max_num_seqs=args.rows + 1,
        max_num_batched_tokens=max_tokens,
        max_model_len=4096,
        num_kv_blocks=(args.rows + 2) * 256,
    )
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    plan = plan_engine(config, Hardware(8, 1 << 35, 1, "gpu", memory_bytes))
    spec = plan.stage_spec(0)
    figures = []
    with torch.inference_mode():
        model, kv_caches = build_stage_model(spec, plan.model, None), allocate_kv_caches(spec, plan.model)
        warm_up(spec, model, kv_caches)
        graphs = CudaGraphManager(graph_maker(device))
        buckets = token_buckets(max_tokens)
        layers = PiecewiseLayers(spec, model, kv_caches, graphs, buckets.sizes[::-1])
        with graphs.recording():
            layers.record()
        for num_tokens in args.tokens:
            batch = _batch(args.rows, num_tokens, spec.block_size, 256, device)
            total = args.rows + num_tokens
            hidden = torch.randn(total, model.hidden_size, dtype=torch.bfloat16, device=device)
            positions = torch.arange(total, device=device)

            def step(bucket: int | None, batch=batch, hidden=hidden, positions=positions) -> None:
                model.plan_attention(batch, 0)
                if bucket is None:
                    model.forward(hidden, positions, batch, kv_caches)
                else:
                    layers.run(hidden, positions, batch, bucket)

            ways = (None, buckets.fit(total))
            for way in ways:
                step(way)
            plain_ms, padded_ms = (step_ms(lambda way=way: step(way)) for way in ways)
            figures.append({"tokens": total, "bucket": ways[1]})
            for name, (device_ms, host_ms) in (("plain", plain_ms), ("pieces", padded_ms)):
                figures[-1] |= {f"{name}_ms": round(device_ms, 3), f"{name}_host_ms": round(host_ms, 3)}
            print(figures[-1], flush=True)
    costs = {mode: vars(cost) for mode, cost in graphs.costs.items()}
    print_report("piecewise", vars(args), {"steps": figures, "recordings": costs})


if __name__ == "__main__":
    main()
