"""Which cuts are best for the products of experts, by shape, kind of weights and tokens; writes the table of them.

    python benchmarks/micro/tune_experts.py                                    all shapes, some minutes each
    python benchmarks/micro/tune_experts.py --shapes 30b --kinds plain --tokens 1 8 32

Every candidate is timed inside of whole layers, in a CUDA graph of layers with weights of their own, so that the
second-level cache does not help: first those of the first product, then, with the best of them, those of the second.
What was found replaces its entries in `--table`, by default the one that comes with
the package, under the name of this GPU; `raypp.ops.cuda.experts` looks cuts up there. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graph_timer import require_gpu, time_us

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

from raypp.ops.backend import ExpertWeights, Router, Routing
from raypp.ops.cuda.experts import (
    TABLE,
    CudaExperts,
    ExpertCut,
    ExpertShape,
    cut_entry,
    default_cut,
    shape_entry,
)
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.projection import Tuning
from raypp.ops.weight import FP4, Weight, WeightKind

SHAPES = {
    "30b": ExpertShape(2048, 768, 128, 8),
    "235b": ExpertShape(4096, 1536, 128, 8),
    "mixtral": ExpertShape(4096, 14336, 8, 2),
    "gpt-oss": ExpertShape(2880, 2880, 32, 4),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 8192)
FEW_PAIRS = 32  # with more pairs, they are put into tiles
LAYER_BYTES = 12 << 30  # of all layers that are timed
MOST_LAYERS = 12
EPS = 1e-6
BF16 = torch.bfloat16


def few_tunings(shape: ExpertShape) -> tuple[list[Tuning], list[Tuning]]:
    """Return cuts of each product without tiles."""
    gate_up, down = shape.kinds
    if gate_up == "plain":
        cuts = [(1, 2048, 4), (2, 1024, 4), (2, 2048, 4), (4, 512, 4), (8, 512, 4), (8, 256, 4), (4, 1024, 4)]
        cuts += [(4, 2048, 8), (2, 2048, 8), (1, 2048, 2), (2, 512, 2), (2, 1024, 2), (4, 512, 2)]
        gate_ups = tunings(cuts, (1, 2, 3, 4))
    else:
        gate_ups = tunings([(outputs, 128, warps) for outputs in (4, 8, 16, 32) for warps in (1, 2, 4)], (2, 4, 6))
    if down == "plain":
        cuts = [(2, 256, 4), (2, 512, 4), (4, 256, 4), (4, 128, 4), (8, 128, 4), (8, 256, 4)]
        downs = tunings([*cuts, (1, 256, 2), (2, 256, 2), (4, 256, 8)], (1, 3, 5))
    else:
        downs = tunings([(outputs, 128, warps) for outputs in (1, 2, 4, 8) for warps in (2, 4, 8)], (2, 4))
    return gate_ups, downs


def tile_tunings(shape: ExpertShape, tile_rows: int) -> tuple[list[Tuning], list[Tuning]]:
    """Return cuts of each product with tiles."""
    if tile_rows >= 64:  # compute counts
        gate_ups = [(128, 64, 8), (64, 64, 4), (64, 64, 8), (128, 32, 8), (64, 128, 8)]
        downs = [(128, 64, 8), (128, 64, 4), (64, 64, 4), (256, 64, 8), (128, 128, 8), (64, 128, 4)]
        gate_up_stages, down_stages = (3, 4), (3, 4)
    else:
        gate_ups, gate_up_stages = [(32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8)], (2, 4, 6)
        downs, down_stages = [(64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 8)], (2, 4, 6)
    if shape.kinds[0] == "fp4":
        gate_ups = downs = [(64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8)]
        gate_up_stages = down_stages = (3, 4) if tile_rows >= 64 else (3, 4, 6)
    elif shape.kinds[0] != "plain":
        narrow = [] if shape.kinds[1] == "fp8" else [(32, 128, 4), (64, 128, 4), (64, 128, 8)]
        gate_ups = [*narrow, (128, 128, 4), (128, 128, 8)]
        downs = [(64, 128, 4), (64, 128, 8), (128, 128, 4), (128, 128, 8), (256, 128, 8)]
    return tunings(gate_ups, gate_up_stages), tunings(downs, down_stages)


def tunings(cuts: Sequence[tuple[int, int, int]], stages: Sequence[int]) -> list[Tuning]:
    """Return these outputs, inputs and warps with each number of stages."""
    return [
        Tuning(outputs, inputs, num_warps=warps, num_stages=each) for outputs, inputs, warps in cuts for each in stages
    ]


def all_tile_rows(num_tokens: int, shape: ExpertShape) -> list[int]:
    """Return the heights of tiles to try; 0: none."""
    num_pairs = num_tokens * shape.num_chosen
    mean = num_pairs / shape.num_experts
    found = [0] if num_pairs <= FEW_PAIRS else []
    if num_tokens > 1:
        least = 16 if "fp8" in shape.kinds else 8
        most = 128 if shape.kinds in (("plain", "plain"), ("fp4", "fp4")) else 64
        found += [
            rows for rows in (8, 16, 32, 64, 128) if least <= rows <= most and min(mean, 64) <= rows <= 4 * mean + 16
        ]
    return found


def cuts_of(tile_rows: int, num_tokens: int, shape: ExpertShape) -> tuple[ExpertCut, list[Tuning], list[Tuning]]:
    """Return the cut to begin with, and candidates for each product."""
    begin = default_cut(num_tokens, shape, Device.of(torch.device("cuda")), tile_rows)
    gate_ups, downs = tile_tunings(shape, tile_rows) if tile_rows else few_tunings(shape)
    if begin.gate_up.num_splits > 1:
        gate_ups, downs = (
            [replace(tuning, num_splits=splits) for tuning in each for splits in (1, 2, 4, 6)]
            for each in (gate_ups, downs)
        )
    return begin, gate_ups, downs


def tune(layers: list[CudaExperts], num_tokens: int, shape: ExpertShape) -> tuple[ExpertCut, dict[str, float]]:
    """Return the best cut for a number of tokens, and all times; print the best ones."""
    hidden = torch.randn(num_tokens, shape.hidden, device="cuda", dtype=BF16)
    times: dict[ExpertCut, float] = {}

    def timed(cut: ExpertCut) -> float:
        if cut not in times:
            us = attempt(cut_name(cut), partial(time_layers, layers, hidden, cut))
            times[cut] = float("inf") if us is None else us
        return times[cut]

    for tile_rows in all_tile_rows(num_tokens, shape):
        begin, gate_ups, downs = cuts_of(tile_rows, num_tokens, shape)
        timed(begin)
        best = min((replace(begin, gate_up=gate_up) for gate_up in [begin.gate_up, *gate_ups]), key=timed)
        min((replace(best, down=down) for down in [best.down, *downs]), key=timed)
    ranked = sorted(times, key=lambda cut: times[cut])
    now = layers[0].cut(num_tokens)
    print(f"{num_tokens} tokens, {len(times)} cuts; now {times.get(now, timed(now))}", flush=True)
    for cut in ranked[:6]:
        print(f"   {times[cut]:9.2f} {cut_name(cut)}", flush=True)
    return ranked[0], {cut_name(cut): times[cut] for cut in ranked}


def cut_name(cut: ExpertCut) -> str:
    """Return a cut in a few characters: outputs x inputs, splits, stages, warps."""

    def name(tuning: Tuning) -> str:
        return f"{tuning.outputs}x{tuning.inputs} / {tuning.num_splits} s{tuning.num_stages} w{tuning.num_warps}"

    return f"rows {cut.tile_rows}, gate_up {name(cut.gate_up)}, down {name(cut.down)}"


def table_text(table: dict[str, Any]) -> str:
    """Return the table as JSON with a line per number of tokens."""
    lines = ",\n".join(
        f' "{name}": {{\n'
        + ",\n".join(
            f'  "{shape}": {{\n' + ",\n".join(f'   "{tokens}": {cut}' for tokens, cut in cuts.items()) + "\n  }"
            for shape, cuts in shapes.items()
        )
        + "\n }"
        for name, shapes in table.items()
    )
    return "{\n" + lines + "\n}\n"


def random_experts(shape: ExpertShape, num_layers: int, seed: int = 0) -> list[CudaExperts]:
    """Return layers with random weights."""
    cuda = torch.device("cuda")
    device, workspace = Device.of(cuda), Workspace(cuda)
    torch.manual_seed(seed)

    def normal(*size: int, scale: float = 0.02) -> torch.Tensor:
        return torch.empty(size, device=cuda, dtype=BF16).normal_(0, scale)

    experts, hidden, intermediate = shape.num_experts, shape.hidden, shape.intermediate
    return [
        CudaExperts(
            1 + normal(hidden),
            EPS,
            Router(normal(experts, hidden), Routing(shape.num_chosen, normalizes=True)),
            ExpertWeights(
                random_weight((experts, 2 * intermediate, hidden), shape.kinds[0]),
                random_weight((experts, hidden, intermediate), shape.kinds[1]),
            ),
            device,
            workspace,
        )
        for _ in range(num_layers)
    ]


def random_weight(shape: tuple[int, int, int], kind: WeightKind) -> Weight:
    """Return weights of a normal distribution, nearly: FP8 by blocks of 128 x 128, INT4 by 128 inputs, FP4 by 32."""
    experts, outputs, inputs = shape
    if kind == "plain":
        return Weight(torch.empty(shape, device="cuda", dtype=BF16).normal_(0, 0.02))
    if kind == "fp8":
        scale = torch.rand(experts, -(-outputs // 128), -(-inputs // 128), device="cuda") * 4e-3 + 2e-3
        data = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
        for each in data:
            each.copy_(torch.randn(outputs, inputs, device="cuda", dtype=BF16) * 5)
        return Weight(data, scale, block=(128, 128))
    data = torch.randint(0, 256, (experts, outputs, inputs // 2), device="cuda", dtype=torch.uint8)
    if kind == "fp4":
        exponents = torch.randint(118, 122, (experts, outputs, inputs // 32), device="cuda", dtype=torch.uint8)
        return Weight(data.view(FP4), exponents.view(torch.float8_e8m0fnu), block=(1, 32))
    scale = torch.rand(experts, outputs, inputs // 128, device="cuda", dtype=BF16) * 4e-3 + 2e-3
    return Weight(data, scale, torch.randint_like(scale, 6, 10).to(torch.uint8), (1, 128))


def attempt(name: str, call: Callable[[], Any]) -> Any:
    """Return what a call returns; None, and say why, if it fails."""
    try:
        return call()
    except Exception as error:
        print(f"   {name}: {type(error).__name__}: {str(error)[:90]}", flush=True)
        return None


def layers_of(shape: ExpertShape) -> list[CudaExperts]:
    """Return as many layers as are timed in one graph."""
    layer = random_experts(shape, 1)[0]
    num_others = max(1, min(MOST_LAYERS, math.floor(LAYER_BYTES / layer.products.num_bytes)) - 1)
    return [layer, *random_experts(shape, num_others, 1)]


def time_layers(layers: Sequence[CudaExperts], hidden: torch.Tensor, cut: ExpertCut) -> float:
    """Return microseconds per layer."""
    return round(time_us([partial(layer.run, hidden.clone(), cut) for layer in layers]), 2)


def compile_cuts(jobs: Sequence[tuple[ExpertShape, int, ExpertCut]]) -> None:
    """Compile the kernels of cuts, by as many processes as there are processors."""
    started = time.monotonic()
    num_processes = max(1, min(14, (os.cpu_count() or 1) - 2))
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        pool.map(_compile_some, [jobs[index::num_processes] for index in range(num_processes)])
    print(f"compiled {len(jobs)} cuts in {time.monotonic() - started:.0f} s", flush=True)


def _compile_some(jobs: Sequence[tuple[ExpertShape, int, ExpertCut]]) -> None:
    """Launch kernels once with few experts, so that they lie in Triton's cache."""
    layers: dict[ExpertShape, CudaExperts] = {}
    for shape, num_tokens, cut in jobs:
        small = replace(shape, num_experts=shape.num_chosen)
        layer = layers.get(small) or layers.setdefault(small, random_experts(small, 1)[0])
        hidden = torch.zeros(min(num_tokens, 16), shape.hidden, device="cuda", dtype=BF16)
        try:
            layer.run(hidden, cut)
            torch.cuda.synchronize()
        except Exception:
            continue  # it will show up later


def main() -> None:
    """Compile, measure, write the table, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=list(SHAPES), nargs="+", default=["30b", "235b"])
    parser.add_argument("--kinds", choices=("plain", "fp8", "int4", "fp4"), nargs="+", default=["plain", "fp8", "int4"])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--table", type=Path, default=TABLE)
    args = parser.parse_args()
    require_gpu()
    started, name = time.monotonic(), torch.cuda.get_device_name()
    table: dict[str, Any] = json.loads(args.table.read_text()) if args.table.exists() else {}
    found: dict[str, Any] = {}
    for shape in [replace(SHAPES[each], kinds=(kind, kind)) for each in args.shapes for kind in args.kinds]:
        jobs = []
        for num_tokens in args.tokens:
            for tile_rows in all_tile_rows(num_tokens, shape):
                begin, gate_ups, downs = cuts_of(tile_rows, num_tokens, shape)
                jobs += [(shape, num_tokens, replace(begin, gate_up=gate_up)) for gate_up in gate_ups]
                jobs += [(shape, num_tokens, replace(begin, down=down)) for down in downs]
        print(f"{name}, {shape_entry(shape)}", flush=True)
        compile_cuts(list(dict.fromkeys(jobs)))
        with torch.inference_mode():
            layers = layers_of(shape)
            entry = table.setdefault(name, {}).setdefault(shape_entry(shape), {})
            for num_tokens in args.tokens:
                some = layers if num_tokens <= 256 else layers[:2]
                tuned = attempt(f"{num_tokens} tokens", partial(tune, some, num_tokens, shape))
                if tuned is not None:
                    entry[str(num_tokens)] = cut_entry(tuned[0])
                    found[f"{shape_entry(shape)}, {num_tokens} tokens"] = dict(list(tuned[1].items())[:12])
            table[name][shape_entry(shape)] = dict(sorted(entry.items(), key=lambda item: int(item[0])))
        del layers
        args.table.write_text(table_text(table))
        print(f"{time.monotonic() - started:.0f} s", flush=True)
    print("table: " + json.dumps(table))
    print_report("tune_experts", {key: str(value) for key, value in vars(args).items()}, found)


if __name__ == "__main__":
    main()
