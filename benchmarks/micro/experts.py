"""Checks the kernels of experts on a GPU, and times them by the tokens of a step: whole, and one by one.

    python benchmarks/micro/experts.py                                         Qwen3-30B-A3B, about a minute
    python benchmarks/micro/experts.py --shape 235b --kinds fp8 --tokens 1 32  another model, one kind of weights

Times are medians in microseconds per layer, of a CUDA graph of layers that have weights of their own, so that the
second-level cache does not help. `floor` is what the chosen experts' weights take at 4.3 TB/s. A part that fails says
why and does not stop the others. The last line is JSON. Other cuts: `tune_experts.py`.
"""

from __future__ import annotations

import argparse
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

from raypp.ops.backend import Routing, choose_experts
from raypp.ops.cuda import expert_products as products
from raypp.ops.cuda.experts import CudaExperts, ExpertCut, ExpertShape, choose_cut
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.router_kernels import arrange, route
from raypp.ops.weight import Weight, WeightKind

SHAPES = {
    "30b": ExpertShape(2048, 768, 128, 8),
    "235b": ExpertShape(4096, 1536, 128, 8),
    "mixtral": ExpertShape(4096, 14336, 8, 2),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192)
BYTES_PER_US = 4.3e6
REPEATED = (128, 8192)  # must give the same bits every time
LAYER_BYTES = 12 << 30  # of all layers that are timed
MOST_LAYERS = 12
EPS = 1e-6
BF16 = torch.bfloat16
Figures = dict[str, Any]


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
            normal(experts, hidden),
            random_weight((experts, 2 * intermediate, hidden), shape.kinds[0]),
            random_weight((experts, hidden, intermediate), shape.kinds[1]),
            Routing(shape.num_chosen, normalizes=True),
            device,
            workspace,
        )
        for _ in range(num_layers)
    ]


def random_weight(shape: tuple[int, int, int], kind: WeightKind) -> Weight:
    """Return weights of a normal distribution, nearly: FP8 with blocks of 128 x 128, or INT4 with groups of 128."""
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
    scale = torch.rand(experts, outputs, inputs // 128, device="cuda", dtype=BF16) * 4e-3 + 2e-3
    return Weight(data, scale, torch.randint_like(scale, 6, 10).to(torch.uint8), (1, 128))


def reference(layer: CudaExperts, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return what these experts should give, in float32, expert by expert."""
    x = hidden.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * layer._norm_weight.float()
    out = x.clone()
    for expert in range(len(layer._down.data)):
        tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = (normed[tokens] @ widened(layer._gate_up, expert).T).chunk(2, -1)
            y = (torch.nn.functional.silu(gate) * up) @ widened(layer._down, expert).T
            out.index_add_(0, tokens, y * weights[tokens, ranks][:, None])
    return out


def widened(weight: Weight, expert: int) -> torch.Tensor:
    """Return one expert's matrix in float32."""
    parts = {name: getattr(weight, name) for name in ("data", "scale", "zero")}
    parts = {name: None if part is None else part[expert] for name, part in parts.items()}
    return replace(weight, **parts).dequantized(torch.float32)


def check(layer: CudaExperts, num_tokens: int, shape: ExpertShape) -> str:
    """Return how far the kernels are from the reference."""
    hidden = torch.randn(num_tokens, shape.hidden, device="cuda", dtype=BF16)
    routed = route(hidden, layer._router, EPS, layer._routing, layer._device, layer._workspace)
    x = hidden.float()
    x *= torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    expected, shares = choose_experts(x @ layer._router.float().T, layer._routing)
    same = (routed.experts.long().sort(1).values == expected.sort(1).values).all(1)
    share_error = (routed.weights.sort(1).values - shares.sort(1).values)[same].abs().max().item()
    want = reference(layer, hidden, routed.experts, routed.weights)
    norm = (want - hidden.float()).square().mean().sqrt()
    cut = choose_cut(num_tokens, shape, layer._device)
    errors = []
    for _ in range(2):
        got = layer.run(hidden.clone(), cut).float()
        errors.append((got - want).square().mean().sqrt().item())
    again = layer.run(hidden.clone(), cut).float()
    return (
        f"{num_tokens} tokens: {int((~same).sum())} routed otherwise, weights off by {share_error:.1e}; "
        f"rms error {errors[0]:.2e} of {norm:.2e} (bf16 rounding of the sum alone: "
        f"{(want.bfloat16().float() - want).square().mean().sqrt():.2e}), at most {(got - want).abs().max():.2e}; "
        f"finite {bool(got.isfinite().all())}, repeats {bool(torch.equal(got, again))}"
    )


def attempt(name: str, call: Callable[[], Any]) -> Any:
    """Return what a call returns; None, and say why, if it fails."""
    try:
        return call()
    except Exception as error:
        print(f"   {name}: {type(error).__name__}: {str(error)[:90]}", flush=True)
        return None


def parts(layer: CudaExperts, hidden: torch.Tensor, cut: ExpertCut) -> dict[str, Callable[[], object]]:
    """Return each launch by itself."""
    norm, chosen, device = (layer._norm_weight, EPS), layer._routing.num_chosen, layer._device
    routing = partial(route, hidden, layer._router, EPS, layer._routing, device, layer._workspace)
    routed = routing()
    if not cut.tile_rows:
        gate_up = partial(products.gate_up_few, hidden, *norm, layer._gate_up, routed, cut.gate_up, device)
        down = partial(products.down_few, gate_up(), hidden, layer._down, routed, cut.down, device)
        return {"route": routing, "gate_up": gate_up, "down": down}
    kind, next_kind = layer._gate_up.kind, layer._down.kind
    arranging = partial(arrange, hidden, *norm, routed, len(layer._down.data), cut.tile_rows, kind, device)
    arranged = arranging()
    gate_up = partial(products.gate_up_tiles, layer._gate_up, arranged, chosen, next_kind, hidden, cut.gate_up, device)
    down = partial(products.down_tiles, gate_up(), layer._down, arranged, chosen, hidden, cut.down, device)
    total = partial(products.sum_of_experts, down(), routed, hidden.clone(), device)
    return {"route": routing, "arrange": arranging, "gate_up": gate_up, "down": down, "sum": total}


def intermediate(layer: CudaExperts, hidden: torch.Tensor, cut: ExpertCut) -> dict[str, torch.Tensor]:
    """Return everything that the launches with tiles compute, in their order."""
    norm, chosen, device, kinds = (
        (layer._norm_weight, EPS),
        layer._routing.num_chosen,
        layer._device,
        layer._shape.kinds,
    )
    routed = route(hidden, layer._router, EPS, layer._routing, device, layer._workspace)
    arranged = arrange(hidden, *norm, routed, len(layer._down.data), cut.tile_rows, kinds[0], device)
    between = products.gate_up_tiles(layer._gate_up, arranged, chosen, kinds[1], hidden, cut.gate_up, device)
    y = products.down_tiles(between, layer._down, arranged, chosen, hidden, cut.down, device)
    total = products.sum_of_experts(y, routed, hidden.clone(), device)
    is_tile = arranged.tiles[0] >= 0
    return {
        "experts": routed.experts,
        "weights": routed.weights,
        "normed": arranged.normed.values.view(torch.uint8),
        "pairs": arranged.pairs,
        "tiles": arranged.tiles * is_tile,
        "gate_up": between.values.view(torch.uint8),
        "down": y,
        "sum": total,
    }


def check_repeats(layer: CudaExperts, num_tokens: int, shape: ExpertShape, num_runs: int = 40) -> str:
    """Return what differs from run to run, and where: nothing should. With and without overlapping launches."""
    hidden, lines = torch.randn(num_tokens, shape.hidden, device="cuda", dtype=BF16), []
    cut, device = choose_cut(num_tokens, shape, layer._device), layer._device
    for overlaps in (True, False):
        layer._device = replace(device, has_dependent_launch=overlaps)
        first = intermediate(layer, hidden, cut)
        for run in range(num_runs):
            for name, got in intermediate(layer, hidden, cut).items():
                if not torch.equal(got, first[name]):
                    places = (got != first[name]).nonzero()
                    rows, columns = places[:, 0].unique().tolist(), places[:, -1].unique().tolist()
                    lines.append(
                        f"   overlaps {overlaps}, run {run}, {name}: {len(places)} elements, {len(rows)} rows "
                        f"{rows[:6]}, {len(columns)} columns {columns[:4]}..{columns[-1]}"
                    )
    layer._device = device
    return "\n".join([f"{num_tokens} tokens, {num_runs} runs: {len(lines)} differences", *lines[:40]])


def time_layers(layers: Sequence[CudaExperts], hidden: torch.Tensor, cut: ExpertCut) -> float:
    """Return microseconds per layer."""
    return round(time_us([partial(layer.run, hidden.clone(), cut) for layer in layers]), 2)


def measure(layers: list[CudaExperts], num_tokens: int, shape: ExpertShape) -> Figures:
    """Return and print the times for a number of tokens."""
    hidden = torch.randn(num_tokens, shape.hidden, device="cuda", dtype=BF16)
    cut = choose_cut(num_tokens, shape, layers[0]._device)
    routed = route(hidden, layers[0]._router, EPS, layers[0]._routing, layers[0]._device, layers[0]._workspace)
    distinct = routed.experts.unique().numel()
    weights = 3 * shape.hidden * shape.intermediate
    floor = distinct * (layers[0]._down.num_bytes + layers[0]._gate_up.num_bytes) / shape.num_experts / BYTES_PER_US
    us = time_layers(layers, hidden, cut)
    flops = 2 * num_tokens * shape.num_chosen * weights
    by_part = {}
    for name in parts(layers[0], hidden, cut):
        calls = [parts(layer, hidden, cut)[name] for layer in layers]
        by_part[name] = attempt(name, lambda calls=calls: round(time_us(calls), 2))
    print(
        f"{num_tokens:5d} tokens: {us:8.2f} us, floor {floor:7.2f} ({distinct} experts; {floor / us:4.0%}), "
        f"{flops / us / 1e6:6.1f} TFLOP/s; " + ", ".join(f"{name} {time}" for name, time in by_part.items()),
        flush=True,
    )
    return {"us": us, "floor": round(floor, 2), "parts": by_part}


def compile_cuts(jobs: Sequence[tuple[ExpertShape, int, ExpertCut]]) -> None:
    """Compile the kernels of cuts, by as many processes as there are processors."""
    started = time.monotonic()
    num_processes = max(1, min(14, (os.cpu_count() or 1) - 2))
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        pool.map(_compile_some, [jobs[index::num_processes] for index in range(num_processes)])
    print(f"compiled {len(jobs)} cuts in {time.monotonic() - started:.0f} s", flush=True)


def layers_of(shape: ExpertShape) -> list[CudaExperts]:
    """Return as many layers as are timed in one graph."""
    layer = random_experts(shape, 1)[0]
    layer_bytes = layer._gate_up.num_bytes + layer._down.num_bytes
    num_others = max(1, min(MOST_LAYERS, math.floor(LAYER_BYTES / layer_bytes)) - 1)
    return [layer, *random_experts(shape, num_others, 1)]


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


def library_tflops(layer: CudaExperts, num_tokens: int, shape: ExpertShape) -> str:
    """Return what torch's grouped product reaches for the first product alone."""
    pairs = num_tokens * shape.num_chosen
    x = torch.randn(pairs, shape.hidden, device="cuda", dtype=BF16)
    ends = torch.arange(1, shape.num_experts + 1, device="cuda", dtype=torch.int32) * (pairs // shape.num_experts)
    us = time_us([lambda: torch._grouped_mm(x, layer._gate_up.data.transpose(1, 2), offs=ends)] * 2)
    return f"torch's grouped product, {num_tokens} tokens: {us:.1f} us, " + (
        f"{4 * pairs * shape.hidden * shape.intermediate / us / 1e6:.0f} TFLOP/s"
    )


def measure_kind(shape: ExpertShape, tokens: Sequence[int]) -> Figures:
    """Check and time all numbers of tokens with weights of one kind."""
    figures: Figures = {}
    layers = layers_of(shape)
    layer = layers[0]
    print(f"{torch.cuda.get_device_name()}, {len(layers)} layers in {' and '.join(shape.kinds)}", flush=True)
    for num_tokens in tokens:
        print(attempt(f"check of {num_tokens}", partial(check, layer, num_tokens, shape)), flush=True)
    for num_tokens in tokens:
        if num_tokens in REPEATED:
            print(attempt(f"repeats of {num_tokens}", partial(check_repeats, layer, num_tokens, shape)), flush=True)
    for num_tokens in tokens:
        some = layers if num_tokens <= 256 else layers[:2]
        figures[f"{num_tokens} tokens"] = attempt(str(num_tokens), partial(measure, some, num_tokens, shape))
    if shape.kinds[0] == "plain":
        print(attempt("library", partial(library_tflops, layer, 8192, shape)), flush=True)
    return figures


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="30b")
    parser.add_argument("--kinds", choices=("plain", "fp8", "int4"), nargs="+", default=["plain", "fp8", "int4"])
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    args = parser.parse_args()
    require_gpu()
    started = time.monotonic()
    device = Device.of(torch.device("cuda"))
    shapes = {kind: replace(SHAPES[args.shape], kinds=(kind, kind)) for kind in args.kinds}
    jobs = [(shape, n, choose_cut(n, shape, device)) for shape in shapes.values() for n in args.tokens]
    compile_cuts(jobs)
    with torch.inference_mode():
        figures = {kind: attempt(kind, partial(measure_kind, shape, args.tokens)) for kind, shape in shapes.items()}
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    print_report("experts", vars(args), figures)


if __name__ == "__main__":
    main()
