"""Which cut is best for each product of a decode layer: one graph of some layers, one product changed at a time.

    python benchmarks/micro/tune_layer.py --models qwen3-8b --rows 2 5 8 16 32 40     about a minute
    python benchmarks/micro/tune_layer.py --models qwen3-8b-eagle3 --rows 3 8 16 32   a draft head, in 8 bits

Measured alone, over and over, a product overlaps with itself: the best cuts then are not the best ones between norms,
attention and other products. So every candidate is timed inside of whole layers (one query token per row, `--context`
tokens of KV cache), of a draft head inside of what proposes `NUM_DRAFTS` drafts. Products are tuned one after the
other, each with the best of those before. `library` is cuBLAS with a norm and a gate of their own; in a head it gets
8 bits, too, and widens them. Kernels are compiled before, by as many processes as there are processors. The last line
is JSON: microseconds per layer or draft.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from graph_timer import require_gpu, time_us
from head_drafts import HeadDrafts, is_head
from stage_step import BLOCK_SIZE, StageStep

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

from raypp.models.config import load_model_config
from raypp.models.registry import build_model
from raypp.models.weights import DummyWeights
from raypp.ops.cuda.cuda_kernels import CudaProjection
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.product_tuning import OwnProduct, input_type_in_8_bits
from raypp.ops.cuda.projection import FEW_ROWS, Product, Tuning, project, rounded_to_8_bits
from raypp.ops.device_kernels import choose_kernels
from raypp.ops.kv_cache import allocate_layer_cache, sides
from raypp.ops.weight import Weight

MODELS = Path(__file__).parents[1] / "models"
BF16 = torch.bfloat16
SHARED_BYTES = 227 << 10
WORKSPACE_FLOATS = 16 << 20
NUM_DRAFTS = 4


class Kind(NamedTuple):
    """What a kernel is compiled for, besides its cut."""

    num_rows: int
    in_8_bits: bool
    has_norm: bool  # before, in the same launch up to `FEW_ROWS` rows
    is_gated: bool = False
    has_residual: bool = False
    reads: torch.dtype = BF16
    writes: torch.dtype = BF16


def kinds(num_rows: int, in_8_bits: bool) -> tuple[Kind, ...]:
    """Return those of a layer's products, or of a head's. All numbers of rows that fill a tile alike have the same."""
    is_few = num_rows <= FEW_ROWS
    num_rows = num_rows if is_few else _tile(num_rows, in_8_bits)
    gate_up, norm = Kind(num_rows, in_8_bits, is_few, is_gated=True), Kind(num_rows, in_8_bits, is_few)
    add = Kind(num_rows, in_8_bits, False, has_residual=True)
    if not in_8_bits:
        return gate_up, norm, add
    normed, other = (input_type_in_8_bits(num_rows, is_normed=is_normed) or BF16 for is_normed in (True, False))
    behind_join = Kind(num_rows, in_8_bits, False, reads=normed)
    if not is_few:
        gate_up, norm = gate_up._replace(reads=normed), norm._replace(reads=normed)
    return gate_up._replace(writes=other), norm, add._replace(reads=other), behind_join


def _tile(num_rows: int, in_8_bits: bool) -> int:
    return max(16 if in_8_bits else 8, 1 << (num_rows - 1).bit_length())


class Tuned(Protocol):
    """Something with products to be tuned. The widest come first: they weigh most."""

    in_8_bits: bool
    products: dict[str, list[CudaProjection]]

    def time_us(self, num_rows: int) -> float:
        """Return the median microseconds of what is repeated."""


def candidates(num_rows: int, is_gated: bool, in_8_bits: bool) -> Iterator[Tuning]:
    """Yield the cuts to try."""
    element_bytes, halves = 1 if in_8_bits else 2, 2 if is_gated else 1
    if num_rows <= FEW_ROWS:
        for outputs, inputs in ((4, 512), (8, 256), (4, 1024), (8, 512), (2, 2048), (2, 1024), (16, 256)):
            for num_stages in (1, 3):
                yield Tuning(max(1, outputs // halves), inputs, num_stages=num_stages)
        return
    tile = _tile(num_rows, in_8_bits)
    cuts = [(64, 64, 6), (64, 128, 4), (64, 256, 3), (128, 128, 3)]
    if in_8_bits:  # fewer outputs than 64 are not multiplied as they are
        cuts += [(64, 128, 6), (64, 256, 4), (128, 128, 5), (128, 256, 2)]
    else:
        cuts += [(32, 128, 5), (32, 256, 2), (32, 256, 3), (64, 128, 3)]
    for outputs, inputs, num_stages in cuts:
        num_bytes = (outputs * halves + tile) * element_bytes * inputs * (num_stages + is_gated)
        if num_bytes > SHARED_BYTES:
            continue
        for num_splits in (1,) if is_gated else (1, 2, 3, 4):
            yield Tuning(outputs, inputs, num_splits, num_stages=num_stages)
            if outputs == 128:
                yield Tuning(outputs, inputs, num_splits, num_warps=8, num_stages=num_stages)


def compile_all(jobs: Iterable[tuple[Kind, Tuning]]) -> None:
    """Launch each kernel once, so that it lies in Triton's cache; those that do not compile show up later."""
    torch_device = torch.device("cuda")
    device, workspace = Device.of(torch_device), Workspace(torch_device)
    workspace.reserve(WORKSPACE_FLOATS)
    weight = torch.ones(1024, 1024, device=torch_device, dtype=BF16)
    for kind, tuning in jobs:
        product = Product(Weight(weight), None, 1e-6 if kind.has_norm else None, kind.is_gated)
        product = rounded_to_8_bits(product) if kind.in_8_bits else product
        x = torch.zeros(kind.num_rows, 1024, device=torch_device, dtype=kind.reads)
        residual = torch.zeros_like(x, dtype=BF16) if kind.has_residual else None
        try:
            project(x, product, residual, tuning, device, workspace, kind.writes)
        except Exception as error:
            print(f"   {kind}, {tuning}: {type(error).__name__}: {str(error)[-150:]}", flush=True)


class TunedLayers:
    """Some layers of a model: it looks inside of them, as nobody else has reason to."""

    in_8_bits = False

    def __init__(self, name: str, num_layers: int, context: int, most_rows: int) -> None:
        device, config = torch.device("cuda"), load_model_config(MODELS / name)
        kernels = choose_kernels(device, BF16, block_size=BLOCK_SIZE, num_ring_entries=2)
        kernels._workspace.reserve(WORKSPACE_FLOATS)
        layers = {"start_layer": 1, "end_layer": 1 + num_layers}  # neither embedding nor head
        self._model = build_model(config, **layers, dtype=BF16, device=device, kernels=kernels)
        self._model.load_weights(DummyWeights(0, device))
        num_blocks = 1 + most_rows * -(-context // BLOCK_SIZE)
        heads = config.num_kv_heads, config.head_dim, config.head_dim
        self._caches = [allocate_layer_cache(num_blocks, BLOCK_SIZE, *heads, BF16, device) for _ in range(num_layers)]
        for side in sides(self._caches):
            side.normal_()
        self._context = context
        self.products: dict[str, list[CudaProjection]] = {}
        for layer in self._model.layers:
            mlp = layer._mlp
            found = {"gate_up": mlp._gate_up, "down": mlp._down, "qkv": layer._qkv, "output": layer._output}
            for product, projection in found.items():
                self.products.setdefault(product, []).append(getattr(projection, "__self__", projection))

    def time_us(self, num_rows: int) -> float:
        """Return the median microseconds of a layer."""
        step, times = StageStep(self._model, self._caches, num_rows, self._context, is_last=False), []
        for _ in range(10):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step.run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times[2:]) * 1e3 / len(self._caches)


class TunedHead:
    """A draft head, whose products read 8 bits."""

    in_8_bits = True

    def __init__(self, name: str, context: int, most_rows: int) -> None:
        self._drafts = HeadDrafts(name, "fp8", most_rows, NUM_DRAFTS, context, workspace_floats=WORKSPACE_FLOATS)
        head = self._drafts.head
        mlp = head._mlp
        found = {"gate_up": mlp._gate_up, "lm_head": head._logits, "down": mlp._down}
        found |= {"qkv": head._joined._projection, "output": head._output}
        self.products = {
            product: [getattr(projection, "__self__", projection)] for product, projection in found.items()
        }

    def time_us(self, num_rows: int) -> float:
        """Return the median microseconds of a draft."""
        return time_us([self._drafts.proposal(num_rows)]) / NUM_DRAFTS


def tune(tuned: Tuned, num_rows: int) -> dict[str, Any]:
    """Find the best cuts for a number of rows, and print them."""
    figures: dict[str, Any] = {"as chosen": round(tuned.time_us(num_rows), 2)}
    print(f"{num_rows} rows: {figures['as chosen']} us as chosen", flush=True)
    for product, projections in tuned.products.items():
        first = projections[0]
        rounded = rounded_to_8_bits(first._product) if tuned.in_8_bits else None
        kept = first._own.get(num_rows)
        chosen, results = None if kept is None else kept.tuning, list[tuple[float, Tuning | None]]()
        is_gated = first._product.is_gated
        for tuning in dict.fromkeys((None, chosen, *candidates(num_rows, is_gated, tuned.in_8_bits))):
            set_cut(projections, num_rows, tuning, rounded)
            try:
                results.append((round(tuned.time_us(num_rows), 2), tuning))
            except Exception as error:
                print(f"   {product}, {tuning}: {type(error).__name__}: {str(error)[:150]}", flush=True)
        results.sort(key=lambda result: result[0])
        set_cut(projections, num_rows, results[0][1], rounded)
        named = [(us, _name(tuning) + (" (chosen)" if tuning == chosen else "")) for us, tuning in results]
        figures[product] = named
        library = next((us for us, tuning in results if tuning is None), "-")
        print(f"   {product}: library {library}; " + "; ".join(f"{us} {name}" for us, name in named[:5]), flush=True)
    figures["best of each"] = round(tuned.time_us(num_rows), 2)
    print(f"   best of each: {figures['best of each']}", flush=True)
    return figures


def set_cut(projections: list[CudaProjection], num_rows: int, tuning: Tuning | None, rounded: Product | None) -> None:
    """Compute a product of all layers so; None: by the library."""
    for projection in projections:
        if tuning is None:
            projection._own.pop(num_rows, None)
            continue
        projection._own[num_rows] = OwnProduct.of(rounded or projection._product, num_rows, tuning)


def _name(tuning: Tuning | None) -> str:
    if tuning is None:
        return "library"
    return (
        f"{tuning.outputs} x {tuning.inputs}, {tuning.num_splits} splits, {tuning.num_warps} warps, "
        f"{tuning.num_stages} stages"
    )


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b", "qwen3-0.6b"], help="folders of benchmarks/models")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 5, 8, 16, 32, 40])
    parser.add_argument("--layers", type=int, default=8, help="in the graph")
    parser.add_argument("--context", type=int, default=640)
    args = parser.parse_args()
    require_gpu()
    started = time.monotonic()
    found = {
        kind: None
        for num_rows in args.rows
        for in_8_bits in {is_head(MODELS / name) for name in args.models}
        for kind in kinds(num_rows, in_8_bits)
    }
    jobs = [(kind, cut) for kind in found for cut in candidates(kind.num_rows, kind.is_gated, kind.in_8_bits)]
    num_processes = max(1, min(14, (os.cpu_count() or 1) - 2))
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        pool.map(compile_all, [jobs[index::num_processes] for index in range(num_processes)])
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - started:.0f} s", flush=True)
    figures = {}
    with torch.inference_mode():
        for name in args.models:
            print(name, flush=True)
            most_rows = max(args.rows)
            tuned: Tuned = (
                TunedHead(name, args.context, most_rows)
                if is_head(MODELS / name)
                else TunedLayers(name, args.layers, args.context, most_rows)
            )
            figures[name] = {f"{num_rows} rows": tune(tuned, num_rows) for num_rows in args.rows}
            del tuned
    print_report("tune_layer", vars(args), figures)


if __name__ == "__main__":
    main()
