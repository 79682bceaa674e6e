"""What an encoder's graphs bring: the same tower, eager and captured, alone on a GPU.

    python benchmarks/encoder.py --model qwen3-vl-8b

Every run counts from a list of pictures on the host to their embeddings on the device. Eager and captured runs take
turns. `captured` is what the engine does: with a graph where that was measured to be faster when it started. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import noise
from report import GrowingReport
from workload import model_settings

from raypp.config.engine_config import EngineConfig
from raypp.encoder.build_encoder import build_manager
from raypp.encoder.encoder_graphs import EncoderCudaGraphManager, GraphChoice
from raypp.encoder.protocol import EncodedItem
from raypp.graphs.buckets import Buckets
from raypp.models.registry import build_encoder
from raypp.models.weights import open_weights
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.prompt_items import EncoderItem

_WARM_UPS = 5


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-vl-8b")
    parser.add_argument("--runs", type=int, default=400, help="of small pictures, an eighth as many of large ones")
    parser.add_argument("--small", type=int, nargs="+", default=[224, 336, 448], help="sides, pixels")
    parser.add_argument("--large", type=int, nargs="+", default=[512, 640, 768, 896, 1024, 1152, 1344, 1600])
    parser.add_argument("--mixed", type=int, default=300, help="pictures of sides from 224 to 1344")
    parser.add_argument("--token-budgets", type=int, nargs="+")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="write the report there")
    args = parser.parse_args()
    bench = _Bench(args)
    with torch.inference_mode():
        bench.check_bits()
        for side in args.small:
            for count in (1, 8):
                bench.compare(f"{count} x {side} px", [(side, side)] * count, args.runs, mean=0.85, p99=0.70)
        for side in args.large:
            bench.compare(f"1 x {side} px", [(side, side)], max(args.runs // 8, 20), mean=1.03, p99=None)
        bench.mix(args.mixed)
    bench.report.print()


class _Bench:
    """The tower with its graphs, and what was found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.report = GrowingReport("encoder", vars(args), args.out)
        settings = {
            **model_settings(args.model),
            "token_budgets": args.token_budgets,
            "max_model_len": args.max_model_len,
        }
        plan = plan_engine(EngineConfig.from_flat(**settings), Hardware.of_this_machine())
        spec = plan.encoders.spec(0)
        self.device = torch.device(spec.device)
        source = open_weights(spec.load_format, spec.model_path, spec.seed, self.device)
        self.tower = build_encoder(plan.model, dtype=getattr(torch, plan.dtype), device=self.device, source=source)
        started = time.perf_counter()
        self.manager = build_manager(self.tower, spec)
        seconds = time.perf_counter() - started
        stats = self.manager.stats
        assert plan.model.vision is not None
        self.vision = plan.model.vision
        self.max_items = spec.max_images_per_batch
        self._rng = np.random.default_rng(0)
        times = {
            budget: [round(1e3 * seconds, 3) for seconds in (of.captured_s, of.eager_s, of.split_captured_s)]
            for budget, of in self.manager.choice.times.items()
        }
        figures = {
            "num_graphs": stats.num_graphs,
            "budgets": list(self.manager.budgets),
            "capture_s": round(stats.capture_s, 2),
            "capture_and_measure_s": round(seconds, 2),
            "gib": round(stats.graph_bytes / 2**30, 3),
            "launch_ms": round(1e3 * self.manager.choice.launch_s, 3),
            "captured_eager_and_split_captured_ms": times,
        }
        self.report.put("graphs", figures)
        print(f"graphs: {figures}", flush=True)

    def check_bits(self) -> None:
        """Compare graphs with the same padded batches by calls, bit by bit."""
        budgets = Buckets(set(self.manager.budgets))
        plain = EncoderCudaGraphManager(self.tower, budgets, self.max_items, self.device, None)
        chosen, self.manager.choice = self.manager.choice, GraphChoice(budgets, {})
        differing, count = 0, 0
        for _ in range(12):
            sides = self._rng.integers(224, 1200, (int(self._rng.integers(1, 9)), 2)).tolist()
            items = self._items(sides)
            for one, other in zip(self.manager.encode(items), plain.encode(items), strict=True):
                differing += not torch.equal(one.rows, other.rows)
                count += 1
        self.manager.choice = chosen
        self.report.put("bits", {"pictures": count, "differing": differing})
        print(f"graphs against calls on the same padding: {differing} of {count} differ: {_verdict(not differing)}")

    def compare(self, name: str, sides: Sequence[Sequence[int]], runs: int, *, mean: float, p99: float | None) -> None:
        """Measure one load, and say whether captured runs take at most those shares of the eager time."""
        items = self._items(sides)
        packed = self.manager.pack(items)
        eager, captured = _take_turns(
            [lambda: self._eager(items), lambda: self.manager.encode(items)], runs, self.device
        )
        figures = {
            "tokens": sum(item.num_tokens for item in items),
            "budgets": [batch.budget for batch in packed],
            "eager": _summary(eager),
            "captured": _summary(captured),
            "mean_ratio": round(statistics.mean(captured) / statistics.mean(eager), 4),
            "p99_ratio": round(_p99(captured) / _p99(eager), 4),
        }
        self.report.put(name, figures)
        is_ok = figures["mean_ratio"] <= mean and (p99 is None or figures["p99_ratio"] <= p99)
        aim = f"mean at most {mean}" + (f", P99 at most {p99}" if p99 is not None else "")
        print(
            f"{name}: {figures['tokens']} tokens, budgets {figures['budgets']}; mean {figures['eager']['mean_ms']} -> "
            f"{figures['captured']['mean_ms']} ms ({figures['mean_ratio']}), P99 {figures['eager']['p99_ms']} -> "
            f"{figures['captured']['p99_ms']} ms ({figures['p99_ratio']}); {aim}: {_verdict(is_ok)}",
            flush=True,
        )

    def mix(self, count: int) -> None:
        """Measure pictures of all sizes, one at a time and eight at a time."""
        items = self._items(self._rng.integers(224, 1345, (count, 2)).tolist())
        for group in (1, 8):
            groups = [items[start : start + group] for start in range(0, count, group)]
            before = self._counters()
            seconds: tuple[list[float], list[float]] = ([], [])
            for some in groups:
                for index, function in enumerate((self._eager, self.manager.encode)):
                    seconds[index].append(_seconds_of(lambda f=function, s=some: f(s), self.device))
            counted = {name: value - before[name] for name, value in self._counters().items()}
            padded = counted["captured_tokens"] + counted["padding_tokens"]
            figures = {
                "eager": _summary(seconds[0]),
                "captured": _summary(seconds[1]),
                "eager_s": round(sum(seconds[0]), 3),
                "captured_s": round(sum(seconds[1]), 3),
                "hit_rate": round(counted["captured_items"] / count, 4),
                "padding_share": round(counted["padding_tokens"] / max(padded, 1), 4),
                **counted,
            }
            self.report.put(f"mix of {count}, {group} at a time", figures)
            print(f"mix of {count}, {group} at a time: {figures}", flush=True)

    def _counters(self) -> dict[str, int]:
        stats = self.manager.stats
        return {
            "captured_items": stats.num_captured_items,
            "captured_tokens": stats.num_captured_tokens,
            "padding_tokens": stats.num_padding_tokens,
            "eager_batches": stats.num_eager_batches,
        }

    def _items(self, sides: Sequence[Sequence[int]]) -> list[EncoderItem]:
        return [noise(self.vision, width, height, self._rng) for width, height in sides]

    def _eager(self, items: Sequence[EncoderItem]) -> list[EncodedItem]:
        batch = self.tower.select_items(items, range(len(items)))
        return self.tower.split_output(self.tower.eager_forward(batch), batch)


def _take_turns(functions: Sequence[Callable[[], object]], runs: int, device: torch.device) -> list[list[float]]:
    """Return the seconds of each function's runs."""
    for function in functions:
        for _ in range(_WARM_UPS):
            function()
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(runs):
        for index, function in enumerate(functions):
            seconds[index].append(_seconds_of(function, device))
    return seconds


def _seconds_of(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _p99(seconds: Sequence[float]) -> float:
    return float(np.percentile(seconds, 99))


def _summary(seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "mean_ms": round(statistics.mean(seconds) * 1e3, 3),
        "median_ms": round(statistics.median(seconds) * 1e3, 3),
        "p99_ms": round(_p99(seconds) * 1e3, 3),
        "runs": len(seconds),
    }


def _verdict(is_ok: bool) -> str:
    return "ok" if is_ok else "MISSED"


if __name__ == "__main__":
    main()
