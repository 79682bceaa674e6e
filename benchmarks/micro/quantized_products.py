"""Products of quantized weights: each form against its reference, then its time by rows, beside 16 bits and the floor.

    python benchmarks/micro/quantized_products.py                       checks, times, candidates; about two minutes
    python benchmarks/micro/quantized_products.py --skip checks         without one of `checks`, `errors`, `times`, ...
    python benchmarks/micro/quantized_products.py --skip checks errors times --forms "fp8 blocks" --tried-rows 1 8 16 32
                                                                        which cuts are best

Times are those of CUDA graphs over so many weights that none is in a cache when it is read again. `layer` is all four
products of a layer of Qwen3-8B one after the other, without attention. The floor is the weights' bytes at 4.3 TB/s.
Candidates are the best cuts; then a layer with the best of each product, and as chosen. What is compiled is compiled
before, by as many processes as there are processors. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_timer import require_gpu, try_us

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))
from report import print_report

from raypp.ops.cuda import quantized_projection
from raypp.ops.cuda.cuda_kernels import CudaKernels
from raypp.ops.cuda.int4_products import Int4Tuning
from raypp.ops.cuda.kernel_launch import Device
from raypp.ops.cuda.projection import Tuning
from raypp.ops.cuda.quantized_projection import Fp8Projection, Int4Projection
from raypp.ops.cuda.token_quantization import QuantizedTokens, TokenNorm, quantize_tokens
from raypp.ops.weight import Weight

BF16 = torch.bfloat16
BYTES_PER_US = 4.3e6
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)
FORMS: dict[str, tuple[str, tuple[int, int]]] = {
    "bf16": ("plain", (1, 1)),
    "fp8 blocks": ("fp8", (128, 128)),
    "fp8 outputs": ("fp8", (1, 0)),
    "int4 128": ("int4", (1, 128)),
}
WORKSPACE_FLOATS = 16 << 20
BYTES_OF_ALL = 400 << 20


class Shape(NamedTuple):
    """A product of a layer."""

    name: str
    num_outputs: int  # of the weight
    num_inputs: int
    has_norm: bool
    is_gated: bool


SHAPES = (
    Shape("qkv", 6144, 4096, True, False),
    Shape("o", 4096, 4096, False, False),
    Shape("gate_up", 24576, 4096, True, True),
    Shape("down", 4096, 12288, False, False),
)


class Job(NamedTuple):
    """What is timed: a form of a product, by so many rows; None: as chosen."""

    form: str
    shape: Shape
    num_rows: int
    tuning: Tuning | Int4Tuning | None = None


def weight_of(form: str, shape: Shape) -> Weight:
    """Return a weight of random bits."""
    kind, (rows, columns) = FORMS[form]
    size, device = (shape.num_outputs, shape.num_inputs), torch.device("cuda")
    columns = columns or shape.num_inputs
    blocks = shape.num_outputs // rows, shape.num_inputs // columns
    if kind == "plain":
        return Weight(torch.randn(size, device=device, dtype=BF16) * 0.02)
    if kind == "fp8":
        data = torch.randn(size, device=device, dtype=BF16).to(torch.float8_e4m3fn)
        return Weight(data, torch.full(blocks, 0.02, device=device), block=(rows, columns))
    data = torch.randint(0, 256, (size[0], size[1] // 2), device=device, dtype=torch.uint8)
    return Weight(data, torch.full(blocks, 0.004, device=device, dtype=BF16), block=(rows, columns))


class Products:
    """Some products of one form and shape."""

    def __init__(self, form: str, shape: Shape, *, count: int | None = None) -> None:
        device = torch.device("cuda")
        kernels = CudaKernels(device, BF16, block_size=16, max_query_len=1, num_ring_entries=1)
        kernels._workspace.reserve(WORKSPACE_FLOATS)
        self.shape, self._norm = shape, torch.ones(shape.num_inputs, device=device, dtype=BF16)
        first = weight_of(form, shape)
        self.num_bytes = first.num_bytes
        count = count or max(2, math.ceil(BYTES_OF_ALL / first.num_bytes))
        weights = [first, *(weight_of(form, shape) for _ in range(count - 1))]
        self.calls = [self._make(kernels, weight) for weight in weights]

    def _make(self, kernels: CudaKernels, weight: Weight) -> Any:
        if self.shape.is_gated:
            return kernels.norm_gated_linear(self._norm, 1e-6, weight)
        if self.shape.has_norm:
            return kernels.norm_linear(self._norm, 1e-6, weight)
        return kernels.add_linear(weight)

    def bound(self, num_rows: int) -> list[Callable[[], object]]:
        """Return calls with so many rows."""
        x = torch.randn(num_rows, self.shape.num_inputs, device="cuda", dtype=BF16)
        if self.shape.has_norm:
            return [partial(call, x) for call in self.calls]
        residual = torch.zeros(num_rows, self.shape.num_outputs, device="cuda", dtype=BF16)
        return [partial(call, x, residual) for call in self.calls]

    def set_tuning(self, num_rows: int, tuning: Tuning | Int4Tuning | None) -> None:
        """Compute so; None: by the library."""
        for call in self.calls:
            owner = getattr(call, "__self__", call)
            assert isinstance(owner, Fp8Projection | Int4Projection)
            owner._tunings.pop(num_rows, None)
            if tuning is not None:
                owner._tunings[num_rows] = tuning  # type: ignore[assignment]


def candidates(form: str, shape: Shape, num_rows: int) -> Iterator[Tuning | Int4Tuning | None]:
    """Yield the cuts to try."""
    splits: tuple[int, ...]
    if form == "fp8 outputs" and num_rows == 1:
        cuts = (
            (4, 4096),
            (2, 4096),
            (4, 2048),
            (8, 2048),
            (4, 1024),
            (8, 1024),
            (8, 512),
            (16, 512),
            (16, 256),
            (32, 512),
        )
        for (outputs, inputs), stages in itertools.product(cuts, (2, 3, 4)):
            yield Tuning(outputs, inputs, num_stages=stages)
    elif FORMS[form][0] == "fp8":
        if num_rows > 64:
            yield None
        splits = (1, 2, 3, 4) if num_rows <= 128 else (1,)
        tiles = ((64, 4, 3), (64, 4, 4), (64, 4, 6), (64, 8, 4), (128, 8, 3)) if num_rows <= 64 else ()
        wide = ((64, 4, 3), (64, 4, 4), (64, 8, 3), (64, 8, 4), (128, 8, 3))
        for (outputs, warps, stages), num_splits in itertools.product(tiles or wide, splits):
            yield Tuning(outputs, 128, num_splits, warps, stages)
    elif num_rows <= 64:
        rounds = ((1, 4, False), (1, 4, True), (2, 3, False), (4, 2, False))
        for strips, num_splits, (pieces, stages, folds) in itertools.product((1, 2), (1, 2, 4), rounds):
            yield Int4Tuning(strips, num_splits, 4, stages, pieces=pieces, folds=folds)
    else:
        yield None
        splits = (1, 2, 3) if num_rows <= 128 else (1,)
        tiles = ((1, 4, 64), (1, 4, 128), (1, 8, 128), (2, 8, 64), (2, 8, 128))
        for num_splits, (strips, warps, most), (pieces, stages), folds in itertools.product(
            splits, tiles, ((1, 4), (2, 2)), (False, True)
        ):
            yield Int4Tuning(strips, num_splits, warps, stages, most, pieces, folds)


def run_jobs(jobs: list[Job]) -> None:
    """Run each once, so that its kernels lie in Triton's cache; those that fail show up later."""
    made: dict[tuple[str, str], Products] = {}
    for job in jobs:
        try:
            products = made.get((job.form, job.shape.name))
            if products is None:
                made.clear()
                products = made[job.form, job.shape.name] = Products(job.form, job.shape, count=1)
            if job.tuning is not None:
                products.set_tuning(job.num_rows, job.tuning)
            products.bound(job.num_rows)[0]()
        except Exception as error:
            print(f"   {job}: {type(error).__name__}: {str(error)[-200:]}", flush=True)
    torch.cuda.synchronize()


def check(case: tuple[str, tuple[int, int], int, int, torch.dtype, dict[str, Any]]) -> str:
    """Return what one check says."""
    import kernel_checks

    kind, block, num_outputs, num_inputs, dtype, options = case
    rows = options.pop("rows", (1, 2, 3, 8, 17, 33, 64, 65, 130, 257))
    of_weight = {name: options.pop(name) for name in ("has_zeros", "has_order") if name in options}
    named = f"{kind} {block} {num_outputs} x {num_inputs} {dtype} {of_weight} {options}"
    failures = []
    for num_rows in rows:
        try:
            random = kernel_checks.Kernels(dtype)
            weight = kernel_checks.quantized_weight(random, kind, num_outputs, num_inputs, block, **of_weight)
            kernel_checks.check_quantized_projections(dtype, weight, (num_rows,), **options)
        except Exception as error:
            text = " ".join(str(error).split())[:300] or traceback.format_exc()[-300:]
            failures.append(f"{num_rows} rows: {type(error).__name__}: {text}")
    return f"{named}: " + ("ok" if not failures else "\n      ".join(["FAILED", *failures]))


def cases() -> Iterator[tuple[str, tuple[int, int], int, int, torch.dtype, dict[str, Any]]]:
    """Yield the checks."""
    normed, added, gated = (
        {"has_norm": True, "has_bias": True},
        {"has_residual": True},
        {"has_norm": True, "is_gated": True},
    )
    forms: tuple[tuple[str, tuple[int, int], dict[str, bool]], ...] = (
        ("fp8", (1, 0), {}),
        ("fp8", (128, 128), {}),
        ("fp8", (1, 128), {}),
        ("int4", (1, 128), {}),
        ("int4", (1, 128), {"has_zeros": True}),
        ("int4", (1, 64), {"has_zeros": True, "has_order": True}),
        ("int4", (1, 32), {}),
        ("int4", (1, 0), {"has_zeros": True}),
    )
    for kind, block, of_weight in forms:
        for options in (normed, added, gated):
            yield kind, block, 3072, 1536, BF16, {**of_weight, **options}
        yield kind, block, 1000, 1536, torch.float16, {**of_weight, **added, "rows": (1, 2, 5, 40, 100, 300)}
        yield kind, block, 4096, 4096, BF16, {**of_weight, "x_scale": 1e4, "rows": (1, 2, 16, 300)}


def kernel_errors() -> None:
    """Print each form's error beside that of 16 bits with the dequantized weight, both against float64."""
    for form in FORMS:
        for shape in SHAPES[:2]:
            products = Products(form, shape, count=1)
            weight = weight_of(form, shape)
            products.calls = [products._make(_kernels(), replace(weight, data=weight.data.clone()))]
            matrix = weight.dequantized(torch.float32)
            found = []
            for num_rows in (1, 8, 64, 256):
                x = torch.randn(num_rows, shape.num_inputs, device="cuda", dtype=BF16)
                read = x.double()
                if shape.has_norm:
                    read = read * torch.rsqrt(read.square().mean(1, keepdim=True) + 1e-6)
                exact = read @ matrix.double().t()
                zero = torch.zeros(num_rows, shape.num_outputs, device="cuda", dtype=BF16)
                got = products.calls[0](x) if shape.has_norm else products.calls[0](x, zero)
                plain = read.to(BF16) @ matrix.to(BF16).t()
                errors = [(y.double() - exact).square().mean().sqrt().item() for y in (got, plain)]
                found.append(f"{num_rows}: {errors[0]:.2e} / {errors[1]:.2e}")
            print(f"   {form} {shape.name}: {', '.join(found)}", flush=True)


def _kernels() -> CudaKernels:
    return CudaKernels(torch.device("cuda"), BF16, block_size=16, max_query_len=1, num_ring_entries=1)


def layer_calls(all_products: list[Products], num_rows: int) -> list[Callable[[], object]]:
    """Return calls of all products of some layers, one after the other."""
    num_layers = max(2, min(len(products.calls) for products in all_products))
    layers = [[products.calls[i % len(products.calls)] for products in all_products] for i in range(num_layers)]
    hidden = torch.randn(num_rows, 4096, device="cuda", dtype=BF16)
    attended = torch.randn(num_rows, 4096, device="cuda", dtype=BF16)

    def run(layer: list[Any]) -> None:
        qkv, output, gate_up, down = layer
        qkv(hidden)
        residual = output(attended, hidden)
        down(gate_up(residual), residual)

    return [partial(run, layer) for layer in layers]


def print_times(figures: dict[str, Any]) -> None:
    """Print the time of each product and of a layer, by form and rows."""
    for form in FORMS:
        all_products = [Products(form, shape) for shape in SHAPES]
        total = sum(products.num_bytes for products in all_products)
        for products in all_products:
            times = {num_rows: try_us(products.bound(num_rows)) for num_rows in ROWS}
            floor = products.num_bytes / BYTES_PER_US
            figures[f"{form} {products.shape.name}"] = times
            print(f"   {form} {products.shape.name} (floor {floor:.1f}): {_row(times)}", flush=True)
        times = {num_rows: try_us(layer_calls(all_products, num_rows)) for num_rows in ROWS}
        figures[f"{form} layer"] = times
        print(f"   {form} layer (floor {total / BYTES_PER_US:.1f}): {_row(times)}", flush=True)
        del all_products
        torch.cuda.empty_cache()
    for num_rows in (1, 8, 32, 128, 2048):
        device, found = Device.of(torch.device("cuda")), []
        for size in (4096, 12288):
            x, norm = (
                torch.randn(num_rows, size, device="cuda", dtype=BF16),
                torch.ones(size, device="cuda", dtype=BF16),
            )
            for block, given in (
                (128, None),
                (size, None),
                (128, TokenNorm(norm, 1e-6)),
                (size, TokenNorm(norm, 1e-6)),
            ):
                call = partial(quantize_tokens, x, block, device, given)
                found.append(f"{size}/{block}{'' if given is None else ' norm'} {try_us([call] * 20)}")
        print(f"   quantize_tokens, {num_rows} rows: {', '.join(found)}", flush=True)


def _row(times: dict[int, Any]) -> str:
    return "; ".join(f"{num_rows}: {us}" for num_rows, us in times.items())


def print_candidates(figures: dict[str, Any], forms: Sequence[str], tried_rows: Sequence[int]) -> None:
    """Print the best cuts of each product, and the time of a layer with them."""
    for form in forms:
        all_products = [Products(form, shape) for shape in SHAPES]
        for num_rows in tried_rows:
            best, chosen = [], []
            for products in all_products:
                results = _timed_cuts(form, products, num_rows)
                best.append(results[0][1])
                chosen += [cut for _, cut, mark in results if mark]
                figures[f"{form} {products.shape.name} {num_rows} rows"] = [(us, _name(cut)) for us, cut, _ in results]
                shown = [f"{us} {_name(cut)}{mark}" for us, cut, mark in results]
                shown = shown[:6] + [text for text in shown[6:] if "chosen" in text]
                print(f"   {form} {products.shape.name} {num_rows} rows: {'; '.join(shown)}", flush=True)
            times = {}
            for way, cuts in {"best": best, "chosen": chosen}.items():
                for products, cut in zip(all_products, cuts, strict=True):
                    products.set_tuning(num_rows, cut)
                times[way] = try_us(layer_calls(all_products, num_rows))
            figures[f"{form} layer {num_rows} rows"] = times
            print(f"   {form} layer of the best cuts, {num_rows} rows: {times}", flush=True)
        del all_products, products
        torch.cuda.empty_cache()


def _timed_cuts(form: str, products: Products, num_rows: int) -> list[tuple[float, Any, str]]:
    """Return times, cuts and whether they are the chosen ones, the fastest first."""
    owner = getattr(products.calls[0], "__self__", products.calls[0])
    chosen, results = owner._tunings.get(num_rows), []
    for tuning in dict.fromkeys((chosen, *candidates(form, products.shape, num_rows))):
        products.set_tuning(num_rows, tuning)
        us = try_us(products.bound(num_rows))
        if isinstance(us, str):
            print(f"      {form} {products.shape.name} {num_rows} {tuning}: {us}", flush=True)
        else:
            results.append((us, tuning, " (chosen)" if tuning == chosen else ""))
    products.set_tuning(num_rows, chosen)
    return sorted(results, key=lambda result: result[0])


def _name(tuning: Tuning | Int4Tuning | None) -> str:
    if tuning is None:
        return "library"
    if isinstance(tuning, Int4Tuning):
        cut = f"{64 * tuning.strips}o {tuning.num_splits}s {tuning.num_warps}w {tuning.num_stages}st {tuning.pieces}p"
        return cut + (" folds" if tuning.folds else "") + ("" if tuning.most_rows == 128 else f" {tuning.most_rows}r")
    return f"{tuning.outputs}x{tuning.inputs} {tuning.num_splits}s {tuning.num_warps}w {tuning.num_stages}st"


HUMMING: dict[str, tuple[str | None, dict[str, Any], dict[str, Any] | None]] = {
    "int4 128": ("int4 128", {"dtype": "int4", "group_size": 128}, None),
    "fp8 outputs": ("fp8 outputs", {"dtype": "float8e4m3"}, {"dtype": "float8e4m3", "quant_mode": "dynamic_token"}),
    "fp8 blocks": (
        "fp8 blocks",
        {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128},
        {"dtype": "float8e4m3", "group_size": 128, "quant_mode": "dynamic_group"},
    ),
    "mxfp4": (None, {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"}, None),
    "nvfp4": (
        None,
        {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
        None,
    ),
}
"""By a name: the form of `FORMS` with the same values, what humming-kernels calls the weight, and rounded tokens."""


def humming_layer(form: str, shape: Shape) -> Any:
    """Return a product of humming-kernels with a random weight."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    own, of_weight, of_tokens = HUMMING[form]
    layer = HummingLayer(
        shape.num_outputs,
        shape.num_inputs,
        weight_config=dict(of_weight),
        input_config=None if of_tokens is None else dict(of_tokens),
        torch_dtype=BF16,
    ).cuda()
    if own is None:
        layer.load_from_unquantized(0.02 * torch.randn(shape.num_outputs, shape.num_inputs, device="cuda", dtype=BF16))
    else:
        weight = weight_of(own, shape)
        assert weight.scale is not None
        layer.weight.data = weight.data.view(torch.int32)
        layer.weight_scale.data = weight.scale.to(layer.weight_scale.dtype).reshape(layer.weight_scale.shape)
    layer.transform()
    return layer


def print_humming(folder: str, figures: dict[str, Any]) -> None:
    """Print times of humming-kernels' products, and where a row's result has the same bits; no norm, gate and sum.

    Its option `use_batch_invariant` is tried with 4 bits.
    """
    sys.path.insert(0, folder)
    for form, is_invariant in [*((form, False) for form in HUMMING), ("int4 128", True)]:
        options = {"compute_config": {"use_batch_invariant": True}} if is_invariant else {}
        named = f"humming {form}{' invariant' if is_invariant else ''}"
        for shape in SHAPES:
            began, first = time.monotonic(), humming_layer(form, shape)
            num_bytes = sum(parameter.nbytes for parameter in first.parameters())
            layers = [first, *(humming_layer(form, shape) for _ in range(max(1, math.ceil(BYTES_OF_ALL / num_bytes))))]
            rows = {count: torch.randn(count, shape.num_inputs, device="cuda", dtype=BF16) for count in ROWS}
            first(rows[1], **options)
            print(f"   {named} {shape.name}: made and compiled in {time.monotonic() - began:.0f} s", flush=True)
            times = {count: try_us([partial(layer, x, **options) for layer in layers]) for count, x in rows.items()}
            figures[f"{named} {shape.name}"] = times
            x = rows[ROWS[-1]]
            equal = [n for n in ROWS if torch.equal(first(x[:n], **options)[:1], first(x[:1], **options))]
            print(f"   {named} {shape.name}: {_row(times)}; a row's bits are the same at {equal}", flush=True)


def print_library() -> None:
    """Print which of the library's ways work."""
    device = torch.device("cuda")
    for product, block in (
        (quantized_projection.scaled_by_output, 1),
        (quantized_projection.scaled_by_block, quantized_projection.BLOCK),
    ):
        try:
            blocks = 768 // block if block > 1 else 1
            data, weight = (torch.ones(rows, 768, device=device).to(torch.float8_e4m3fn) for rows in (100, 256))
            x_scale, scale = torch.rand(blocks, 100, device=device), torch.rand(256 // block, blocks, device=device)
            y = product(QuantizedTokens(data, x_scale, 98), weight, quantized_projection.prepared_scale(product, scale))
            expected = (x_scale.t() @ scale.t() * (768 // blocks)).repeat_interleave(block, 1)
            print(f"   {product.__name__}: largest error {(y.float() - expected).abs().max().item():.3g}")
        except Exception as error:
            print(f"   {product.__name__}: {type(error).__name__}: {str(error)[:1200]}")


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", nargs="*", default=[], choices=["checks", "errors", "times", "candidates"])
    parser.add_argument("--forms", nargs="*", default=list(FORMS)[1:], choices=list(FORMS)[1:], help="with candidates")
    parser.add_argument("--tried-rows", nargs="*", type=int, default=[1, 8, 32, 128], help="of candidates")
    parser.add_argument("--humming", metavar="FOLDER", help="of the unpacked wheel of humming-kernels, timed last")
    args = parser.parse_args()
    require_gpu()
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    print_library()
    jobs = []
    for form in FORMS:
        for shape in SHAPES:
            jobs += [Job(form, shape, num_rows) for num_rows in ROWS if "times" not in args.skip]
            if form in args.forms and "candidates" not in args.skip:
                for num_rows in args.tried_rows:
                    found = [cut for cut in candidates(form, shape, num_rows) if cut is not None]
                    jobs += [Job(form, shape, num_rows, tuning) for tuning in (None, *found)]
    num_processes = max(1, min(14, (os.cpu_count() or 1) - 2))
    figures: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        if "checks" not in args.skip:
            for line in pool.imap_unordered(check, list(cases()), chunksize=1):
                print("   " + line, flush=True)
            print(f"checks: {time.monotonic() - began:.0f} s", flush=True)
        size = max(1, math.ceil(len(jobs) / (3 * num_processes)))
        pool.map(run_jobs, [jobs[begin : begin + size] for begin in range(0, len(jobs), size)], chunksize=1)
    print(f"compiled {len(jobs)} jobs after {time.monotonic() - began:.0f} s", flush=True)
    with torch.inference_mode():
        for name in ("errors", "times", "candidates"):
            try:
                if name in args.skip:
                    continue
                if name == "errors":
                    print("root mean square error / that of 16 bits with the dequantized weight:", flush=True)
                    kernel_errors()
                    continue
                print(f"{name}, us by rows:", flush=True)
                if name == "times":
                    print_times(figures)
                else:
                    print_candidates(figures, args.forms, args.tried_rows)
            except Exception:
                print(traceback.format_exc()[-1500:], flush=True)
            print(f"{name} until {time.monotonic() - began:.0f} s", flush=True)
        try:
            if args.humming:
                print_humming(args.humming, figures)
        except Exception:
            print(traceback.format_exc()[-1500:], flush=True)
    print_report("quantized_products", vars(args), figures)


if __name__ == "__main__":
    main()
