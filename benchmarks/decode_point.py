"""One point of a decode table: so many requests at once, as offline benchmarks measure it.

ITL = (time for `output_len` tokens - time for 1) / (output_len - 1), both the median over some runs, and both until all
requests have theirs. Where requests take different numbers of steps, as with speculation, that is the slowest one's
time per token. TPOT is the mean one's: the mean time until a request has its last of `output_len` tokens, less the same
for half as many, by the tokens between. In both runs prompts take as long, and requests whose prompts come first are as
far ahead. What device and host took per step and stage comes from the engine's trace, which is there when the engine
has closed.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workload import model_settings, random_prompts, seconds_for, time_for

from raypp import LLM
from raypp.tracing import DRIVER_LANE, FORWARD, HOST, Lane, now_ns


@dataclass
class DecodePoint:
    """What was measured with one number of requests."""

    num_requests: int
    output_len: int
    first_runs_s: list[float] = field(default_factory=list)
    """For one token each."""
    runs_s: list[float] = field(default_factory=list)
    """For all tokens."""
    mean_runs_s: list[float] = field(default_factory=list)
    """Until a request had all of its tokens, in the mean."""
    mean_halves_s: list[float] = field(default_factory=list)
    """Until it had `num_half` tokens."""
    windows_ns: list[tuple[int, int]] = field(default_factory=list)
    """When those of `runs_s` ran, by the clock of traces."""
    stages: list[dict[str, float]] = field(default_factory=list)
    """Medians over steps, see `stage_times`."""

    @property
    def first_token_s(self) -> float:
        """Until all requests have their first token."""
        return statistics.median(self.first_runs_s)

    @property
    def itl_ms(self) -> float:
        """Time per output token, of the request that ends last."""
        return (statistics.median(self.runs_s) - self.first_token_s) / (self.output_len - 1) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Time per output token, of a request in the mean, in the second half of its tokens."""
        seconds = statistics.median(self.mean_runs_s) - statistics.median(self.mean_halves_s)
        return seconds / (self.output_len - self.num_half) * 1e3

    @property
    def num_half(self) -> int:
        """Half of the tokens."""
        return max(1, self.output_len // 2)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second over the whole run, prompts included."""
        return self.num_requests * self.output_len / statistics.median(self.runs_s)

    def figures(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "itl_ms": round(self.itl_ms, 4),
            "tpot_ms": round(self.tpot_ms, 4),
            "first_token_ms": round(self.first_token_s * 1e3, 2),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "first_runs_s": [round(seconds, 4) for seconds in self.first_runs_s],
            "runs_s": [round(seconds, 4) for seconds in self.runs_s],
            "mean_runs_s": [round(seconds, 4) for seconds in self.mean_runs_s],
            "mean_halves_s": [round(seconds, 4) for seconds in self.mean_halves_s],
            "stages": self.stages,
        }


def engine_settings(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that every engine of a decode table has: nothing is cached, and all requests run at once.

    Args:
        model: A folder of benchmarks/models, or what `LLM` takes.
        args: num_stages, requests, max_model_len and max_num_batched_tokens.
    """
    return {
        **model_settings(model),
        "num_stages": args.num_stages,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_seqs": max(args.requests),
        "max_model_len": args.max_model_len,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }


def measure_point(llm: LLM, num_requests: int, input_len: int, output_len: int, num_runs: int) -> DecodePoint:
    """Measure one number of requests; every run has prompts of its own."""
    point, vocab_size = DecodePoint(num_requests, output_len), llm.plan()["vocab_size"]
    rng = random.Random(num_requests)
    for _ in range(num_runs):
        prompts = random_prompts(num_requests, input_len, vocab_size, rng)
        point.first_runs_s.append(seconds_for(llm, prompts, 1))
        prompts = random_prompts(num_requests, input_len, vocab_size, rng)
        point.mean_halves_s.append(time_for(llm, prompts, point.num_half).mean_s)
        prompts = random_prompts(num_requests, input_len, vocab_size, rng)
        begun_ns = now_ns()
        took = time_for(llm, prompts, output_len)
        point.runs_s.append(took.all_s)
        point.mean_runs_s.append(took.mean_s)
        point.windows_ns.append((begun_ns, now_ns()))
    return point


def stage_times(lanes: Sequence[Lane], windows_ns: Sequence[tuple[int, int]]) -> list[dict[str, float]]:
    """Return for every stage the medians over the steps in some windows: `forward_us` of the device, `host_us`.

    Nearly all steps of a point decode, so the medians are those of decode steps. Run operation by operation, a forward
    lasts from its first kernel to its last, with the gaps between them in which the device waits for the host.
    """
    found = []
    for lane in lanes:
        if lane.name == DRIVER_LANE:
            continue
        times: dict[str, list[int]] = {FORWARD: [], HOST: []}
        for event in lane.events:
            if event.name in times and any(begun <= event.start_ns < ended for begun, ended in windows_ns):
                times[event.name].append(event.end_ns - event.start_ns)
        found.append({f"{name}_us": round(statistics.median(spans) / 1e3, 1) for name, spans in times.items() if spans})
    return found
