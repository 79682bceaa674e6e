"""The two parts of drafting by an EAGLE-3 head, as CUDA graphs and operation by operation: a dummy head on one GPU.

    python benchmarks/micro/eagle_parts.py --rows 1 8 32 --num-drafts 4

    follow    a decode step's 1 + K tokens of every row enter the head
    propose   its layer runs K times; weights are read K times, the bound is what that takes at 4.3 TB/s

Per number of rows: milliseconds of the device and of the host, for both ways; with the head's weights in 8 bits, and as
the model's; with --kernels also where they go. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from graph_timer import kernels_of, require_gpu, step_ms
from head_drafts import HeadDrafts
from report import print_report

from raypp.graphs.graph_manager import CudaGraphManager, graph_maker

_BYTES_PER_MS = 4.3e9


def measure(weights: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return times in milliseconds with the head's weights in 8 bits ("fp8") or as the model's ("model")."""
    drafts = HeadDrafts("qwen3-8b-eagle3", weights, max(args.rows), args.num_drafts, args.context)
    graphs = CudaGraphManager(graph_maker(torch.device("cuda")))
    num_bytes = drafts.config.drafting_bytes(args.num_drafts, 2)
    figures: dict[str, dict[str, float]] = {f"{weights} bound": {"device_ms": num_bytes / _BYTES_PER_MS}}
    print(f"{weights:5s} bound {num_bytes / _BYTES_PER_MS:.3f} ms: {num_bytes / 2**20:.0f} MiB of weights")
    with torch.inference_mode(), graphs.recording():
        for rows in sorted(args.rows, reverse=True):
            programs: dict[str, Callable[[], object]] = {
                "follow": drafts.follow(rows),
                "propose": drafts.proposal(rows),
            }
            for name, program in programs.items():
                graphs.record(name, (name, rows), program)
                for way, run in (("eager", program), ("graph", lambda key=(name, rows): graphs.run(key))):
                    device_ms, host_ms = step_ms(run)
                    point = f"{weights} {name} {rows} rows {way}"
                    figures[point] = {"device_ms": device_ms, "host_ms": host_ms}
                    print(f"{point:32s} device {device_ms:.3f} ms, host {host_ms:.3f} ms", flush=True)
                    if args.kernels and way == "graph":
                        for kernel, number, us in kernels_of(run)[:16]:
                            print(f"    {us:9.1f} us  {number:5.0f} x {us / number:8.2f} us  {kernel[:90]}", flush=True)
    print(json.dumps({name: [cost.num_graphs, round(cost.seconds, 2)] for name, cost in graphs.costs.items()}))
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--kernels", action="store_true", help="print each recording's, too")
    parser.add_argument("--head-weights", nargs="+", choices=("fp8", "model"), default=["fp8", "model"])
    args = parser.parse_args()
    require_gpu()
    figures: dict[str, dict[str, float]] = {}
    for weights in args.head_weights:
        figures |= measure(weights, args)
    print_report("eagle_parts", vars(args), figures)


if __name__ == "__main__":
    main()
