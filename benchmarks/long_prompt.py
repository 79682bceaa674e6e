"""How much sooner the first token of one long prompt comes with two stages than with one, each with its best chunks.

    python benchmarks/long_prompt.py --out long.json
    python benchmarks/long_prompt.py --model tiny --lengths 512 1024 --chunks-one 512 --chunks-two 128 256

A prompt is computed in chunks; those of one prompt follow each other through the stages. On one stage larger chunks are
faster, on two they leave one stage idle while the other has the first or the last one. Every size of chunk is an engine
of its own; `default` leaves the size to the scheduler. The last line is JSON, or with `--out` that file, written after
every point.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

from report import GrowingReport, resolved_config
from workload import model_settings, random_prompts, seconds_for

from raypp import LLM
from raypp.actors.cluster import Cluster

_AT_MOST = {8192: 0.66, 32768: 0.58}
"""First token on two stages over that on one, by the prompt's length."""
_DEFAULT = 0
"""In place of a size of chunk: as the scheduler chooses."""


def measure(args: argparse.Namespace, num_stages: int, chunk_tokens: int, report: GrowingReport) -> dict[int, float]:
    """Return the median time to the first token, seconds, by the prompt's length."""
    sizes = (
        {}
        if chunk_tokens == _DEFAULT
        else dict.fromkeys(("max_num_batched_tokens", "min_prefill_chunk_tokens"), chunk_tokens)
    )
    started = time.perf_counter()
    with LLM(
        **model_settings(args.model),
        num_stages=num_stages,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=num_stages,
        max_model_len=max(args.lengths) + 1,
        mode=args.mode,
        **sizes,
        **args.settings,
    ) as llm:
        report.note_config(resolved_config(llm))
        start_s, rng, vocab_size = time.perf_counter() - started, random.Random(0), llm.plan()["vocab_size"]
        figures: dict[str, Any] = {"start_s": round(start_s, 1)}
        medians = {}
        for length in args.lengths:
            runs = [seconds_for(llm, random_prompts(1, length, vocab_size, rng), 1) for _ in range(args.runs + 1)]
            medians[length] = statistics.median(runs[1:])  # the first one warms up
            figures[f"{length} tokens"] = {"ttft_s": medians[length], "runs_s": runs[1:]}
            report.put(_name(num_stages, chunk_tokens), figures)
    times = ", ".join(f"{length} tokens {seconds * 1e3:.1f} ms" for length, seconds in medians.items())
    print(f"{_name(num_stages, chunk_tokens)}: first token of {times}; started in {start_s:.1f} s", flush=True)
    return medians


def _name(num_stages: int, chunk_tokens: int) -> str:
    chunks = "default chunks" if chunk_tokens == _DEFAULT else f"chunks of {chunk_tokens}"
    return f"{num_stages} stage{'s' if num_stages > 1 else ''}, {chunks}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a folder of benchmarks/models, or what LLM takes")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--chunks-one", type=int, nargs="*", default=[8192, 16384, 32768], help="on one stage")
    parser.add_argument("--chunks-two", type=int, nargs="*", default=[_DEFAULT, 1024, 2048], help="on two; 0: default")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--mode", default="auto", help="of graphs; without (none) small chunks wait for a slow host")
    parser.add_argument("--settings", type=json.loads, default={}, help='others, e.g. {"layer_partition": [18, 18]}')
    parser.add_argument("--out", type=Path, help="a JSON file, written after every point")
    args = parser.parse_args()

    report = GrowingReport("long_prompt", vars(args), args.out)
    measured: dict[int, dict[int, dict[int, float]]] = {1: {}, 2: {}}  # by stages, size of chunk, length
    cluster = Cluster.connect()
    try:
        for num_stages, sizes in ((2, args.chunks_two), (1, args.chunks_one)):
            for chunk_tokens in sizes:
                try:
                    measured[num_stages][chunk_tokens] = measure(args, num_stages, chunk_tokens, report)
                except Exception as error:  # one size must not stop the others
                    traceback.print_exc()
                    report.put(_name(num_stages, chunk_tokens), {"error": f"{type(error).__name__}: {error}"})
    finally:
        cluster.disconnect()
    for length in args.lengths:
        print_ratios(length, measured, report)
    report.print()


def print_ratios(length: int, measured: dict[int, dict[int, dict[int, float]]], report: GrowingReport) -> None:
    """Print two stages against one at its best size of chunk: as configured by default, and at their best size."""
    times = {num_stages: {size: of[length] for size, of in sizes.items()} for num_stages, sizes in measured.items()}
    if not all(times.values()):
        return
    best = {num_stages: min(sizes, key=lambda size: sizes[size]) for num_stages, sizes in times.items()}
    one_s, at_most = times[1][best[1]], _AT_MOST.get(length)
    for size in sorted({best[2], *({_DEFAULT} & set(times[2]))}):
        ratio = times[2][size] / one_s
        verdict = "" if at_most is None else f", at most {at_most}: {'ok' if ratio <= at_most else 'MISSED'}"
        print(
            f"{length} tokens: {_name(2, size)} {times[2][size] * 1e3:.1f} ms, {_name(1, best[1])} "
            f"{one_s * 1e3:.1f} ms: {ratio:.3f}x{verdict}"
        )
        report.put(f"ratio, {length} tokens, {_name(2, size)}", {"ratio": ratio, "one_stage": _name(1, best[1])})


if __name__ == "__main__":
    main()
