"""The decode table: ITL and throughput of models at many numbers of requests, beside the figures to compare with.

    python benchmarks/decode_table.py --out table.json
    python benchmarks/decode_table.py --models qwen3-8b --parts graphs speculation --out table.json
    python benchmarks/decode_table.py --models qwen3-30b-a3b --parts adaptive --settings '{"even_routing": true}'

Parts, each an engine of its own, or several:
    graphs       every number of requests, against the peer's figures; the start, with an empty kernel cache
    start        the same engine once more: the start with a warm kernel cache
    even         an even layer partition
    eager        no graphs: every step operation by operation
    speculation  n-gram drafts: 4 each, accepted with probability 0.7; as many as pay, none accepted; both against none
    adaptive     as many n-gram drafts as pay: none accepted; accepted with probability 0.7; both against none

Before it begins, it says how long it will take; `--time-limit-s` skips what would not end in time. After every point
everything so far is written to `--out`, so that a run that is killed keeps what it has; without `--out` the last line
is that JSON document. `--from a.json b.json` runs nothing, and prints the tables of what other runs have written.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode_engines import PARTS, EngineRun, engine_runs, predicted_point_s, predicted_s
from decode_point import DecodePoint, engine_settings, measure_point
from decode_verdicts import print_point, print_speculation, print_verdicts
from kernel_cache import count_cached_files, use_empty_caches
from report import GrowingReport, resolved_config
from workload import random_prompts, seconds_for

from raypp import LLM
from raypp.actors.cluster import Cluster
from raypp.tracing import read_chrome_trace

_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 64, 8
_DRAFT_STATS = ("num_draft_tokens", "num_accepted_tokens", "acceptance_rate", "acceptance_length")


class Table:
    """Runs engines one after the other, until the time is over."""

    def __init__(self, args: argparse.Namespace, report: GrowingReport) -> None:
        self._args = args
        self._report = report
        self._begun_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begun_s

    def run(self, run: EngineRun, folder: Path) -> None:
        """Start an engine, measure its points, and close it."""
        if not self._is_time_for(run.name, predicted_s(run, self._args, num_points=1)):
            return
        print(f"\n{run.name}: predicted {predicted_s(run, self._args):.0f} s", flush=True)
        begun_s, figures = self.elapsed_s, {"settings": {**self._args.settings, **run.settings}}
        try:
            self._measure(run, figures, folder / f"{run.name.replace(' ', '-')}.json")
        except Exception as error:  # one engine must not stop the others: what they tell costs minutes of GPUs
            traceback.print_exc()
            figures["error"] = f"{type(error).__name__}: {error}"
        figures["wall_s"] = round(self.elapsed_s - begun_s, 1)
        self._report.put(run.name, figures)
        print(f"  took {figures['wall_s']:.0f} s", flush=True)

    def _measure(self, run: EngineRun, figures: dict[str, Any], trace: Path) -> None:
        args, points = self._args, list[DecodePoint]()
        num_cached, started = count_cached_files(), time.perf_counter()
        settings = {**engine_settings(run.model, args), **args.settings, **run.settings, "trace": str(trace)}
        with LLM(**settings) as llm:
            figures["start_s"] = time.perf_counter() - started
            figures["num_files_compiled"] = count_cached_files() - num_cached
            figures["layers"] = [stage["num_layers"] for stage in llm.plan()["stages"]]
            figures["recordings"] = [stage["graphs"] for stage in llm.stats()["stages"]]
            print(f"  ready after {figures['start_s']:.1f} s, {figures['num_files_compiled']} new files of kernels")
            for layers, recordings in zip(figures["layers"], figures["recordings"], strict=True):
                print(f"    a stage of {layers} layers, recordings {recordings}", flush=True)
            self._report.note_config(resolved_config(llm))
            self._report.put(run.name, figures)
            if run.requests:
                self._warm_up(llm, max(run.requests))
            for num_requests in run.requests:
                name = f"{num_requests} requests"
                if not self._is_time_for(f"{run.name}, {name}", predicted_point_s(run, num_requests, args)):
                    continue
                point = measure_point(llm, num_requests, args.input_len, args.output_len, args.runs)
                points.append(point)
                print_point(run, point)
                figures[name] = point.figures()
                self._report.put(run.name, figures)
            figures["drafts"] = {name: value for name, value in llm.stats().items() if name in _DRAFT_STATS}
        if points:
            self._add_stage_times(figures, points, trace)

    def _is_time_for(self, what: str, seconds: float) -> bool:
        limit_s = self._args.time_limit_s
        if limit_s is None or self.elapsed_s + seconds <= limit_s:
            return True
        print(f"  skipped, for {seconds:.0f} s are not left: {what}", flush=True)
        return False

    def _warm_up(self, llm: LLM, most_requests: int) -> None:
        """Let everything run once; the medians bear with what is still new afterwards."""
        vocab_size, count = llm.plan()["vocab_size"], min(_WARM_UP_REQUESTS, most_requests)
        prompts = random_prompts(count, self._args.input_len, vocab_size, random.Random(-1))
        seconds_for(llm, prompts, _WARM_UP_TOKENS)

    def _add_stage_times(self, figures: dict[str, Any], points: list[DecodePoint], trace: Path) -> None:
        lanes = read_chrome_trace(trace)
        for point in points:
            point.note_trace(lanes)
            figures[f"{point.num_requests} requests"] = point.figures()
            times = "; ".join(
                ", ".join(f"{name.removesuffix('_us')} {us / 1e3:.3f} ms" for name, us in stage.items())
                for stage in point.stages
            )
            print(f"  {point.num_requests:4d} requests, per step and stage: {times}", flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b", "qwen3-0.6b"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256, 3, 23, 100, 200])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--settings", type=json.loads, default={}, help='of all engines, e.g. {"even_routing": true}')
    parser.add_argument("--time-limit-s", type=float, help="skip what would not end in time")
    parser.add_argument("--kernel-cache", choices=("keep", "empty"), default="keep", help="to begin with")
    parser.add_argument("--out", type=Path, help="a JSON file, written after every point")
    parser.add_argument("--from", dest="sources", type=Path, nargs="+", help="print the tables of such files instead")
    args = parser.parse_args()
    if args.sources is not None:
        merged: dict[str, Any] = {}
        for source in args.sources:
            merged |= json.loads(source.read_text())["figures"]
        print_tables(args.models, merged)
        return

    runs = [run for model in args.models for run in engine_runs(model, args)]
    for run in runs:
        print(f"predicted {predicted_s(run, args):5.0f} s  {run.name}, requests {list(run.requests)}")
    print(f"predicted {sum(predicted_s(run, args) for run in runs):5.0f} s  in all", flush=True)
    report = GrowingReport("decode_table", vars(args), args.out)
    with tempfile.TemporaryDirectory() as folder:
        if args.kernel_cache == "empty":
            use_empty_caches(Path(folder) / "kernels")
        cluster = Cluster.connect()  # Ray runs already when an engine's start is timed
        try:
            table = Table(args, report)
            for run in runs:
                table.run(run, Path(folder))
        finally:
            cluster.disconnect()
    print_tables(args.models, report.figures)
    report.print()


def print_tables(models: Sequence[str], figures: dict[str, Any]) -> None:
    """Print what the figures say of each model."""
    for model in models:
        print_verdicts(model, figures)
        print_speculation(model, figures)


if __name__ == "__main__":
    main()
