"""Which cut is best for each product of a decode layer: one graph of some layers, one product changed at a time.

    python benchmarks/micro/tune_layer.py --models qwen3-8b --rows 2 5 8 16 32 40     about a minute

Measured alone, over and over, a product overlaps with itself: the best cuts then are not the best ones between norms,
attention and other products. So every candidate is timed inside of whole layers (one query token per row, `--context`
tokens of KV cache). Products are tuned one after the other, each with the best of those before. `library` is cuBLAS
with a norm and a gate of their own. Kernels are compiled before, by as many processes as there are processors. The last
line is JSON: microseconds per layer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from stage_step import BLOCK_SIZE, DecodeStep

from raypp.models.config import load_model_config
from raypp.models.registry import build_model
from raypp.models.weights import DummyWeights
from raypp.ops.backend import choose_kernels
from raypp.ops.cuda_kernels import CudaProjection
from raypp.ops.kernels.launch import Device
from raypp.ops.kernels.projection import FEW_ROWS, Tuning, Weights, project
from raypp.ops.kernels.workspace import Workspace
from raypp.ops.kv_cache import allocate_kv_cache

MODELS = Path(__file__).parents[1] / "models"
BF16 = torch.bfloat16
SHARED_BYTES = 227 << 10
WORKSPACE_FLOATS = 16 << 20
# Whether a norm comes before, and a gate after. The widest first: it weighs most.
PRODUCTS = {"gate_up": (True, True), "down": (False, False), "qkv": (True, False), "output": (False, False)}


def candidates(num_rows: int, is_gated: bool) -> Iterator[Tuning]:
    """Yield the cuts to try."""
    if num_rows <= FEW_ROWS:
        for outputs, inputs in ((4, 512), (8, 256), (4, 1024), (8, 512), (2, 2048), (2, 1024), (16, 256)):
            for num_stages in (1, 3):
                yield Tuning(max(1, outputs // 2) if is_gated else outputs, inputs, num_stages=num_stages)
        return
    tile = max(8, 1 << (num_rows - 1).bit_length())
    for outputs, inputs, num_stages in (
        (32, 128, 5),
        (32, 256, 2),
        (32, 256, 3),
        (64, 64, 6),
        (64, 128, 3),
        (64, 128, 4),
        (64, 256, 3),
        (128, 128, 3),
    ):
        rows_at_once = outputs * (2 if is_gated else 1) + tile
        if 2 * rows_at_once * inputs * num_stages <= SHARED_BYTES:
            for num_splits in (1,) if is_gated else (1, 2, 3, 4):
                yield Tuning(outputs, inputs, num_splits, num_stages=num_stages)


def compile_all(jobs: list[tuple[int, bool, bool, Tuning]]) -> None:
    """Launch each kernel once, so that it lies in Triton's cache; those that do not compile show up later."""
    torch_device = torch.device("cuda")
    device, workspace = Device.of(torch_device), Workspace(torch_device)
    workspace.reserve(WORKSPACE_FLOATS)
    weight = torch.zeros(1024, 1024, device=torch_device, dtype=BF16)
    for num_rows, has_norm, is_gated, tuning in jobs:
        weights = Weights(weight, None, 1e-6 if has_norm and num_rows <= FEW_ROWS else None, is_gated)
        x = torch.zeros(num_rows, 1024, device=torch_device, dtype=BF16)
        residual = None if has_norm else torch.zeros(num_rows, 1024, device=torch_device, dtype=BF16)
        try:
            project(x, weights, residual, tuning, device, workspace)
        except Exception as error:
            print(f"   {num_rows} rows, {tuning}: {type(error).__name__}: {str(error)[-150:]}", flush=True)


class TunedLayers:
    """Some layers of a model, whose products can be cut anew: it looks inside of them, as nobody else has reason to."""

    def __init__(self, name: str, num_layers: int, context: int, most_rows: int) -> None:
        device, config = torch.device("cuda"), load_model_config(MODELS / name)
        kernels = choose_kernels(device, BF16, block_size=BLOCK_SIZE, max_rows=most_rows, num_ring_entries=2)
        kernels._workspace.reserve(WORKSPACE_FLOATS)
        layers = {"start_layer": 1, "end_layer": 1 + num_layers}  # neither embedding nor head
        self._model = build_model(config, **layers, dtype=BF16, device=device, kernels=kernels)
        self._model.load_weights(DummyWeights(0, device))
        num_blocks = 1 + most_rows * -(-context // BLOCK_SIZE)
        heads = config.num_kv_heads, config.head_dim
        self._caches = [
            allocate_kv_cache(num_blocks, BLOCK_SIZE, *heads, BF16, device).normal_() for _ in range(num_layers)
        ]
        self._context = context
        self._products: dict[str, list[CudaProjection]] = {product: [] for product in PRODUCTS}
        for layer in self._model._layers:
            mlp = layer._mlp
            found = {"gate_up": mlp._gate_up, "down": mlp._down, "qkv": layer._qkv, "output": layer._output}
            for product, projection in found.items():
                self._products[product].append(getattr(projection, "__self__", projection))

    def cut(self, product: str, num_rows: int) -> Tuning | None:
        """Return how a product is computed; None: by the library."""
        return self._products[product][0]._tunings.get(num_rows)

    def set_cut(self, product: str, num_rows: int, tuning: Tuning | None) -> None:
        """Compute a product of all layers so."""
        for projection in self._products[product]:
            if tuning is None:
                projection._tunings.pop(num_rows, None)
            else:
                projection._tunings[num_rows] = tuning

    def time_us(self, num_rows: int) -> float:
        """Return the median microseconds of a layer."""
        step, times = DecodeStep(self._model, self._caches, num_rows, self._context, is_last=False), []
        for _ in range(10):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step.graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times[2:]) * 1e3 / len(self._caches)


def tune(layers: TunedLayers, num_rows: int) -> dict[str, Any]:
    """Find the best cuts for a number of rows, and print them."""
    figures: dict[str, Any] = {"as chosen": round(layers.time_us(num_rows), 2)}
    print(f"{num_rows} rows: {figures['as chosen']} us a layer as chosen", flush=True)
    for product, (_, is_gated) in PRODUCTS.items():
        chosen, results = layers.cut(product, num_rows), list[tuple[float, Tuning | None]]()
        for tuning in dict.fromkeys((None, chosen, *candidates(num_rows, is_gated))):
            layers.set_cut(product, num_rows, tuning)
            try:
                results.append((round(layers.time_us(num_rows), 2), tuning))
            except Exception as error:
                print(f"   {product}, {tuning}: {type(error).__name__}: {str(error)[:150]}", flush=True)
        results.sort(key=lambda result: result[0])
        layers.set_cut(product, num_rows, results[0][1])
        named = [(us, _name(tuning) + (" (chosen)" if tuning == chosen else "")) for us, tuning in results]
        figures[product] = named
        library = next(us for us, tuning in results if tuning is None)
        print(f"   {product}: library {library}; " + "; ".join(f"{us} {name}" for us, name in named[:5]), flush=True)
    figures["best of each"] = round(layers.time_us(num_rows), 2)
    print(f"   best of each: {figures['best of each']}", flush=True)
    return figures


def _name(tuning: Tuning | None) -> str:
    if tuning is None:
        return "library"
    return f"{tuning.outputs} x {tuning.inputs}, {tuning.num_splits} splits, {tuning.num_stages} stages"


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b", "qwen3-0.6b"], help="folders of benchmarks/models")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 5, 8, 16, 32, 40])
    parser.add_argument("--layers", type=int, default=8, help="in the graph")
    parser.add_argument("--context", type=int, default=640)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tune_layer.py needs a CUDA device")
    started = time.monotonic()
    jobs = [
        (num_rows, has_norm, is_gated, tuning)
        for num_rows in args.rows
        for has_norm, is_gated in dict.fromkeys(PRODUCTS.values())
        for tuning in candidates(num_rows, is_gated)
    ]
    num_processes = max(1, min(14, (os.cpu_count() or 1) - 2))
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        pool.map(compile_all, [jobs[index::num_processes] for index in range(num_processes)])
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - started:.0f} s", flush=True)
    figures = {}
    with torch.inference_mode():
        for name in args.models:
            print(name, flush=True)
            layers = TunedLayers(name, args.layers, args.context, max(args.rows))
            figures[name] = {f"{num_rows} rows": tune(layers, num_rows) for num_rows in args.rows}
            del layers
    report = {"benchmark": "tune_layer", "gpu": torch.cuda.get_device_name(), "settings": vars(args)}
    print(json.dumps(report | {"figures": figures}))


if __name__ == "__main__":
    main()
