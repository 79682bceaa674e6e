"""Offline throughput on a CPU: raypp against transformers' `generate`, with the same number of threads.

    python benchmarks/offline_throughput.py --compare hf

Two workloads, greedy, EOS ignored, random prompt tokens, prefix caching off:
    batch      8 requests of 64 prompt and 128 output tokens, one stage
    requests   64 requests of 16 to 64 prompt and 16 to 256 output tokens, one and two stages; transformers runs them in
               static batches of 8, in order
transformers runs with its defaults: KV cache, sdpa, float32, all cores. raypp has as many threads in total, with the
driver's: its stages share the cores but one. Runs alternate, medians are compared. The bare forward of one decode step
of 8 rows is printed beside them: what is left is each side's own overhead.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import print_report, resolved_config

from raypp import LLM, SamplingParams
from raypp.models.registry import resolve_model_path

Workload = list[tuple[list[int], int]]  # (prompt token ids, output tokens)


def batch_workload(vocab_size: int, rng: random.Random) -> Workload:
    """Return 8 equal requests."""
    return [([rng.randrange(vocab_size) for _ in range(64)], 128) for _ in range(8)]


def requests_workload(vocab_size: int, rng: random.Random) -> Workload:
    """Return 64 requests of mixed lengths."""
    return [([rng.randrange(vocab_size) for _ in range(rng.randint(16, 64))], rng.randint(16, 256)) for _ in range(64)]


class Transformers:
    """The other side: `generate` with its defaults, in static batches."""

    def __init__(self, model: str, batch_size: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(resolve_model_path(model), dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self._batch_size = batch_size

    def run(self, workload: Workload) -> None:
        """Generate what the workload asks for; a batch runs as long as its longest request."""
        for start in range(0, len(workload), self._batch_size):
            batch = workload[start : start + self._batch_size]
            width = max(len(prompt) for prompt, _ in batch)
            input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            with torch.inference_mode():
                self._model.generate(
                    input_ids,
                    attention_mask=mask,
                    max_new_tokens=max(count for _, count in batch),
                    do_sample=False,
                    pad_token_id=0,
                )

    def bare_forward_ms(self, num_rows: int, context: int) -> float:
        """Return the median time of one decode step's forward, without `generate` around it, milliseconds."""
        with torch.inference_mode():
            cache = self._model(torch.zeros(num_rows, context, dtype=torch.int64), use_cache=True).past_key_values
            token = torch.zeros(num_rows, 1, dtype=torch.int64)
            return 1e3 * statistics.median(
                timed(lambda: self._model(token, past_key_values=cache, use_cache=True)) for _ in range(40)
            )


def raypp_run(llm: LLM, workload: Workload) -> None:
    """Generate what the workload asks for."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in workload]
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for _, count in workload]
    outputs = llm.generate(prompts, params)
    for output, (_, count) in zip(outputs, workload, strict=True):
        assert len(output.outputs[0].token_ids) == count


def timed(work: Callable[[], Any]) -> float:
    """Return how long a call takes, seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def alternate(sides: dict[str, Callable[[], Any]], num_runs: int) -> dict[str, list[float]]:
    """Return each side's times over alternating runs, after one warm-up each, seconds."""
    for work in sides.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(num_runs):
        for name, work in sides.items():
            times[name].append(timed(work))
    return times


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--compare", choices=["hf"], help="run transformers beside raypp")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="compute threads of either side")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    rng = random.Random(0)
    other = Transformers(args.model, batch_size=8) if args.compare else None
    figures: dict[str, Any] = {}
    config: dict[str, Any] = {}
    if other is not None:
        figures["hf_bare_forward_8_rows_ms"] = other.bare_forward_ms(8, 128)
    for num_stages in (1, 2):
        stage_num_threads = max(1, (args.threads - 1) // num_stages)  # one is the driver's
        options = {"num_stages": num_stages, "stage_num_threads": stage_num_threads}
        with LLM(args.model, enable_prefix_caching=False, max_num_seqs=64, **options) as llm:
            config = config or resolved_config(llm)  # the other differs in its stages and their threads
            vocab_size = 4000
            workloads = {"requests": requests_workload(vocab_size, rng)}
            if num_stages == 1:
                workloads = {"batch": batch_workload(vocab_size, rng), **workloads}
            for name, workload in workloads.items():
                sides: dict[str, Callable[[], Any]] = {"raypp": lambda w=workload: raypp_run(llm, w)}
                if other is not None:
                    sides["hf"] = lambda w=workload: other.run(w)
                times = alternate(sides, args.runs)
                num_tokens = sum(count for _, count in workload)
                result: dict[str, Any] = {
                    side: {
                        "median_s": statistics.median(t),
                        "tok_per_s": num_tokens / statistics.median(t),
                        "runs_s": t,
                    }
                    for side, t in times.items()
                }
                if other is not None:
                    result["speedup"] = result["hf"]["median_s"] / result["raypp"]["median_s"]
                figures[f"{name}, {num_stages} stages"] = result
                line = ", ".join(f"{side} {result[side]['tok_per_s']:.0f} tok/s" for side in times)
                speedup = f", {result['speedup']:.2f}x" if other is not None else ""
                print(f"{name}, {num_stages} stages: {line}{speedup}", flush=True)
    print_report("offline_throughput", vars(args), figures, config)


if __name__ == "__main__":
    main()
