"""The sections of `kernels.py`: what is measured, with which shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from graph_timer import compile_ahead, time_us, try_us

from raypp.ops.attention import AttentionBatch, HeadNorm, Heads
from raypp.ops.cuda.between_products import rms_norm, silu_and_mul
from raypp.ops.cuda.cuda_kernels import CudaKernels, CudaProjection
from raypp.ops.cuda.decode_attention import DecodeTuning, TritonDecode
from raypp.ops.cuda.draw_kernels import TokenChooser
from raypp.ops.cuda.heads import append_heads, rotation_table
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.projection import Product
from raypp.ops.kv_cache import LayerCache
from raypp.ops.sample.tables import AdjustedLogits, RowTables
from raypp.ops.sample.token_choice import sample
from raypp.ops.weight import Weight

ROWS = (1, 16, 32, 64, 128, 256)
BYTES_PER_US = 4.3e6  # what an H200 reads in long stretches
COLD_BYTES = 400 << 20
BLOCK_SIZE = 16
EPS = 1e-6
BF16 = torch.bfloat16
Figures = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's sizes."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    num_layers: int
    head_dim: int = 128
    vocab: int = 151936

    @property
    def products(self) -> dict[str, tuple[int, int, bool, bool]]:
        """Outputs, inputs, has norm, has gate, of each product of a layer."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden, True, False),
            "output": (self.hidden, q, False, False),
            "gate_up": (self.intermediate, self.hidden, True, True),
            "down": (self.hidden, self.intermediate, False, False),
        }


SHAPES = {"qwen3_8b": Shape(4096, 12288, 32, 8, 36), "qwen3_0_6b": Shape(1024, 3072, 16, 8, 28)}


def _device() -> Device:
    return Device.of(torch.device("cuda"))


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16) * scale


def _product_weights(outputs: int, inputs: int, has_norm: bool, has_gate: bool) -> list[Product]:
    """Return as many weights as it takes that none is still in a cache when it is used again."""
    rows = outputs * (2 if has_gate else 1)
    count = max(2, min(48, math.ceil(COLD_BYTES / (2 * rows * inputs))))
    eps = EPS if has_norm else None
    return [Product(Weight(_random(rows, inputs, scale=0.02)), None, eps, has_gate) for _ in range(count)]


def _library(product: Product, device: Device, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Compute a product as the library and separate kernels do."""
    if residual is not None:
        return residual.addmm_(x, product.weight.data.t())
    if product.norm_eps is not None:
        x = rms_norm(x, None, EPS, device)
    y = F.linear(x, product.weight.data)
    return silu_and_mul(y, device) if product.is_gated else y


def measure_products(shape: Shape) -> Figures:
    """Each product of a layer and the LM head, by rows: as chosen, by the library, and the memory's floor."""
    device, workspace, figures = _device(), Workspace(torch.device("cuda")), Figures()
    workspace.reserve(8 << 20)
    products = shape.products | {"lm_head": (shape.vocab, shape.hidden, True, False)}
    for name, (outputs, inputs, has_norm, has_gate) in products.items():
        weights = _product_weights(outputs, inputs, has_norm, has_gate)
        own = [CudaProjection(each, device, workspace) for each in weights]
        compile_ahead(
            [
                partial(own[0], x) if has_norm else partial(own[0].add, x, _random(len(x), outputs))
                for x in (_random(rows, inputs) for rows in ROWS)
            ]
        )
        for rows in ROWS:
            x = _random(rows, inputs)
            residual = None if has_norm else _random(rows, outputs)
            if residual is None:
                own_calls = [partial(each, x) for each in own]
            else:
                own_calls = [partial(each.add, x, residual) for each in own]
            library_calls = [partial(_library, each, device, x, residual) for each in weights]
            floor = weights[0].weight.num_bytes / BYTES_PER_US
            figures[f"{name} {rows}"] = _row(name, rows, try_us(own_calls), try_us(library_calls), floor)
        del weights, own
    return figures


def _row(name: str, rows: int, own: float | str, library: float | str, floor: float) -> Figures:
    print(f"{name:<22}{rows:>5} rows   own {own!s:>8}   library {library!s:>8}   floor {floor:8.2f}", flush=True)
    return {"own_us": own, "library_us": library, "floor_us": round(floor, 2)}


class Cache:
    """A cache of rows of one length, their tables, and queries for them."""

    def __init__(self, shape: Shape, rows: int, context: int, query_len: int = 1) -> None:
        width = math.ceil(context / BLOCK_SIZE)
        sides = 2, 1 + rows * width, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim
        self.num_bytes = rows * context * 2 * shape.num_kv_heads * shape.head_dim * 2
        count = max(2, min(16, math.ceil(COLD_BYTES / self.num_bytes)))
        self.caches = [LayerCache(*torch.randn(sides, device="cuda", dtype=BF16)) for _ in range(count)]
        order = torch.randperm(rows * width, device="cuda").int() + 1
        self.tables = order.view(rows, width)
        self.seq_lens = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        self.seq_lens[0] = max(query_len, context - 3)
        self.q = _random(rows * query_len, shape.num_heads, shape.head_dim)


def measure_attention(shape: Shape, query_len: int = 1) -> Figures:
    """Decode attention: Triton as chosen, the best of other cuts, from the projection on, and the floor."""
    device, workspace, figures = _device(), Workspace(torch.device("cuda")), Figures()
    workspace.reserve(160 << 20)  # for 32 splits of 256 rows of 5 tokens
    decode = TritonDecode(shape.num_heads, shape.num_kv_heads, shape.head_dim, query_len, device, workspace)
    tried = [
        DecodeTuning(splits, tile, warps, stages)
        for splits, (tile, warps, stages) in itertools.product(
            (1, 2, 4, 8, 16, 32), ((32, 2, 3), (32, 4, 5), (64, 4, 3), (64, 4, 5), (128, 4, 3), (64, 2, 3))
        )
    ]
    small = Cache(shape, 1, 64, query_len)
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    arguments = small.seq_lens, small.tables, query_len, heads, torch.empty_like(small.q)
    compile_ahead([partial(decode, small.q, small.caches[0], *arguments, tuning) for tuning in tried])
    for rows, context in [(1, 640), (1, 8192), (16, 1024), (32, 640), (64, 1024), (128, 640), (256, 768)]:
        try:
            figures[f"{rows} x {context}"] = _measure_decode(shape, rows, context, query_len, decode, tried)
        except Exception as error:
            print(f"{rows:>4} x {context:<5} {error!r}"[:300], flush=True)
            figures[f"{rows} x {context}"] = {"error": repr(error)[:300]}
    return figures


def _measure_decode(
    shape: Shape,
    rows: int,
    context: int,
    query_len: int,
    decode: TritonDecode,
    tried: Sequence[DecodeTuning],
) -> Figures:
    device, cache = _device(), Cache(shape, rows, context, query_len)
    lens, tables, out = cache.seq_lens, cache.tables, torch.empty_like(cache.q)
    norm = HeadNorm(*torch.ones(2, shape.head_dim, device="cuda", dtype=BF16), EPS)
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, norm)
    qkv = _random(len(cache.q), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    slots = torch.arange(len(qkv), device="cuda")
    by = rotation_table(slots, torch.ones(shape.head_dim // 2, device="cuda"), device)

    def run_triton(kv: LayerCache, tuning: DecodeTuning | None = None) -> None:
        decode(cache.q, kv, lens, tables, query_len, heads, out, tuning)

    def run_pair(kv: LayerCache) -> None:
        q = append_heads(qkv, heads, by, slots, kv, device)
        decode(q, kv, lens, tables, query_len, heads, out)

    def run_fused(kv: LayerCache) -> None:
        decode.from_projection(qkv, heads, by, slots, kv, lens, tables, query_len, out)

    ways: dict[str, Callable[[torch.Tensor], None]]
    ways = {"triton": run_triton, "append_and_triton": run_pair, "fused": run_fused}
    times = {name: try_us([partial(way, kv) for kv in cache.caches]) for name, way in ways.items()}
    best = []
    for tuning in tried:
        if context // tuning.num_splits >= tuning.tile_tokens or tuning.num_splits == 1:
            us = try_us([partial(run_triton, kv, tuning) for kv in cache.caches])
            if isinstance(us, float):
                best.append((us, str((tuning.num_splits, tuning.tile_tokens, tuning.num_warps, tuning.num_stages))))
    best = sorted(best)[:3]
    floor = round(cache.num_bytes / BYTES_PER_US, 2)
    chosen = decode.cut(rows, query_len)
    print(f"{rows:>4} x {context:<5} {times} floor {floor} {chosen} best {best}", flush=True)
    return times | {"floor_us": floor, "best": best}


def measure_windows() -> Figures:
    """Decode attention of a layer with a window, at 32k tokens: against its bytes, and against all tokens."""
    device, figures, context = _device(), Figures(), 32768
    kinds = {
        "gemma3_27b": Heads(32, 16, 128, window=1024),
        "qwen3_8b, window 1024": Heads(32, 8, 128, window=1024),
        "gpt_oss": Heads(64, 8, 64, window=128, sinks=torch.zeros(64, device="cuda")),
    }
    for (name, heads), rows in itertools.product(kinds.items(), (1, 16)):
        shape = Shape(0, 0, heads.num_heads, heads.num_kv_heads, 1, heads.head_dim)
        cache, workspace = Cache(shape, rows, context), Workspace(torch.device("cuda"))
        decode = TritonDecode(shape.num_heads, shape.num_kv_heads, shape.head_dim, 1, device, workspace)
        out, times = torch.empty_like(cache.q), Figures()
        for way, of_layer in {"window": heads, "all": replace(heads, window=None)}.items():
            arguments = cache.seq_lens, cache.tables, 1, of_layer, out
            times[f"{way}_us"] = try_us([partial(decode, cache.q, kv, *arguments) for kv in cache.caches])
        assert heads.window is not None
        times["window_floor_us"] = round(cache.num_bytes * heads.window / context / BYTES_PER_US, 2)
        print(f"{name:<22}{rows:>4} x {context} {times}", flush=True)
        figures[f"{name} {rows}"] = times
    return figures


def measure_small(shape: Shape) -> Figures:
    """Norms, gate, heads and rotation, against FlashInfer's."""
    from flashinfer.activation import silu_and_mul as library_gate
    from flashinfer.norm import rmsnorm

    device, figures = _device(), Figures()
    weight = torch.ones(shape.hidden, device="cuda", dtype=BF16)
    norm = HeadNorm(*_random(2, shape.head_dim), EPS)
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, norm)
    frequencies = 1.0 / 1e6 ** (torch.arange(0, shape.head_dim, 2, device="cuda") / shape.head_dim)
    sides = 2, 4096, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim
    cache = LayerCache(*torch.zeros(sides, device="cuda", dtype=BF16))
    for rows in ROWS:
        x = _random(rows, shape.hidden)
        gate_up = _random(rows, 2 * shape.intermediate)
        qkv = _random(rows, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        positions = torch.arange(rows, device="cuda") + 700
        slots = torch.randperm(4096 * BLOCK_SIZE, device="cuda")[:rows]
        by = rotation_table(positions, frequencies, device)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object] | None]] = {
            "rms_norm": (partial(rms_norm, x, weight, EPS, device), partial(rmsnorm, x, weight, EPS)),
            "silu_and_mul": (partial(silu_and_mul, gate_up, device), partial(library_gate, gate_up)),
            "append_heads": (partial(append_heads, qkv, heads, by, slots, cache, device), None),
            "rotation_table": (partial(rotation_table, positions, frequencies, device), None),
        }
        for name, (own, library) in pairs.items():
            figures[f"{name} {rows}"] = _row(
                name, rows, try_us([own] * 20), try_us([library] * 20) if library else "-", 0.0
            )
    return figures


def measure_sampling() -> Figures:
    """Greedy and drawn tokens over Qwen3's vocabulary, against torch."""
    device, workspace, figures = _device(), Workspace(torch.device("cuda")), Figures()
    chooser = TokenChooser(256, device, workspace)
    for rows in ROWS:
        logits = _random(rows, 151936, scale=3.0)
        temperature = torch.full((rows,), 0.8, device="cuda")
        seeds, positions = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda") + 99
        floor = logits.nbytes / BYTES_PER_US
        top_k, top_p = torch.full((rows,), 20, dtype=torch.int32, device="cuda"), torch.full_like(temperature, 0.95)
        truncation = (top_k, top_p, torch.zeros_like(temperature))
        arguments = logits, temperature, seeds, positions, truncation
        given, row_of = AdjustedLogits(logits), torch.arange(rows, device="cuda")
        tables = RowTables(temperature=temperature, top_k=top_k, top_p=top_p, min_p=truncation[2], seed=seeds)
        drawing = partial(chooser.draw, given, row_of, positions, tables)
        agree = (drawing() == sample(*arguments)).float().mean().item()
        figures[f"greedy {rows}"] = _row(
            "greedy",
            rows,
            try_us([partial(chooser.greedy, given)] * 10),
            try_us([partial(logits.argmax, -1)] * 10),
            floor,
        )
        figures[f"draw {rows}"] = _row(
            "draw",
            rows,
            try_us([drawing] * 10),
            try_us([partial(sample, *arguments)] * 3),
            floor,
        ) | {"equal_to_twin": agree}
        print(f"   draws equal to the twin's: {agree:.4f}", flush=True)
    return figures


class LibraryLayer:
    """A layer as the libraries compose it: cuBLAS, FlashInfer's norms and gate; heads and attention are own."""

    def __init__(self, shape: Shape, weights: dict[str, torch.Tensor], heads: Heads, decode: TritonDecode) -> None:
        from flashinfer.activation import silu_and_mul as gate
        from flashinfer.norm import fused_add_rmsnorm

        self._weights, self._heads, self._decode = weights, heads, decode
        self._gate, self._norm = gate, fused_add_rmsnorm
        self._ones = torch.ones(shape.hidden, device="cuda", dtype=BF16)
        self._device = _device()

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, by: Any, kv: LayerCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """Return the layer's last product, still to be added to `residual`."""
        w, heads = self._weights, self._heads
        self._norm(x, residual, self._ones, EPS)
        q = append_heads(F.linear(x, w["qkv"]), heads, by, batch.slot_mappings[0], kv, self._device)
        out = torch.empty_like(q)
        self._decode(q, kv, batch.seq_lens, batch.block_tables[0], 1, heads, out)
        x = F.linear(out.flatten(1), w["output"])
        self._norm(x, residual, self._ones, EPS)
        return F.linear(self._gate(F.linear(x, w["gate_up"])), w["down"])


def measure_layers(shape: Shape, context: int = 640) -> Figures:
    """A chain of half of the model's layers in one graph, per layer: own kernels, libraries, floor."""
    figures, num_layers = Figures(), shape.num_layers // 2
    kernels = CudaKernels(torch.device("cuda"), BF16, block_size=BLOCK_SIZE, max_query_len=1, num_ring_entries=2)
    device = _device()
    decode = TritonDecode(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, 1, device, Workspace(device.torch_device)
    )
    norm = HeadNorm(*torch.ones(2, shape.head_dim, device="cuda", dtype=BF16), EPS)
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, norm)
    ones = torch.ones(shape.hidden, device="cuda", dtype=BF16)
    frequencies = 1.0 / 1e6 ** (torch.arange(0, shape.head_dim, 2, device="cuda") / shape.head_dim)
    own, library = [], []
    for _ in range(num_layers):
        w = {
            name: _random(outputs * (1 + has_gate), inputs, scale=0.02)
            for name, (outputs, inputs, _, has_gate) in shape.products.items()
        }
        own.append(
            (
                kernels.norm_linear(ones, EPS, Weight(w["qkv"])),
                kernels.attention(heads),
                kernels.add_linear(Weight(w["output"])),
                kernels.norm_gated_linear(ones, EPS, Weight(w["gate_up"])),
                kernels.add_linear(Weight(w["down"])),
            )
        )
        library.append(LibraryLayer(shape, w, heads, decode))
    weight_bytes = sum(2 * o * (1 + gate) * i for o, i, _, gate in shape.products.values())
    for rows in ROWS:
        width = math.ceil(context / BLOCK_SIZE)
        sides = 2, 1 + rows * width, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim
        caches = [LayerCache(*torch.randn(sides, device="cuda", dtype=BF16)) for _ in range(num_layers)]
        tables = (torch.randperm(rows * width, device="cuda").int() + 1).view(rows, width)
        lens = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        slots = tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        batch = AttentionBatch(rows, 1, lens, [tables], [slots], [], [])
        positions = torch.full((rows,), context - 1, device="cuda")
        start = _random(rows, shape.hidden)

        def run_own(
            batch: AttentionBatch = batch,
            caches: Sequence[LayerCache] = caches,
            start: torch.Tensor = start,
            positions: torch.Tensor = positions,
        ) -> torch.Tensor:
            by, hidden = kernels.rotation(positions, frequencies), start.clone()
            for (qkv, attention, output, gate_up, down), kv in zip(own, caches, strict=True):
                hidden = output(attention(qkv(hidden), by, kv, batch), hidden)
                hidden = down(gate_up(hidden), hidden)
            return hidden

        def run_library(
            batch: AttentionBatch = batch,
            caches: Sequence[LayerCache] = caches,
            start: torch.Tensor = start,
            positions: torch.Tensor = positions,
        ) -> torch.Tensor:
            by, x, residual = kernels.rotation(positions, frequencies), start.clone(), torch.zeros_like(start)
            for layer, kv in zip(library, caches, strict=True):
                x = layer(x, residual, by, kv, batch)
            return x + residual

        kv_bytes = rows * context * 4 * shape.num_kv_heads * shape.head_dim
        entry = _row("layer", rows, 0.0, 0.0, (weight_bytes + kv_bytes) / BYTES_PER_US)
        try:
            difference = (run_own().float() - run_library().float()).abs().max().item()
            entry |= {"own_us": round(time_us([run_own]) / num_layers, 2)}
            entry |= {"library_us": round(time_us([run_library]) / num_layers, 2), "max_difference": difference}
        except Exception as error:
            entry |= {"error": repr(error)[:300]}
        print(f"   {entry}", flush=True)
        figures[f"{rows} rows"] = entry
        del caches
    return figures


SECTIONS: dict[str, Callable[[], Figures]] = {
    "layers_qwen3_8b": partial(measure_layers, SHAPES["qwen3_8b"]),
    "layers_qwen3_0_6b": partial(measure_layers, SHAPES["qwen3_0_6b"]),
    "products_qwen3_8b": partial(measure_products, SHAPES["qwen3_8b"]),
    "products_qwen3_0_6b": partial(measure_products, SHAPES["qwen3_0_6b"]),
    "attention_qwen3_8b": partial(measure_attention, SHAPES["qwen3_8b"]),
    "attention_qwen3_0_6b": partial(measure_attention, SHAPES["qwen3_0_6b"]),
    "attention_drafts_qwen3_8b": partial(measure_attention, SHAPES["qwen3_8b"], 5),
    "attention_windows": measure_windows,
    "small_qwen3_8b": partial(measure_small, SHAPES["qwen3_8b"]),
    "sampling": measure_sampling,
}
