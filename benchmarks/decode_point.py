"""One point of a decode table: so many requests at once, as offline benchmarks measure it.

ITL = (time for `output_len` tokens - time for 1) / (output_len - 1), both the median over some runs, and both until all
requests have theirs. Where requests take different numbers of steps, as with speculation, that is the slowest one's
time per token. TPOT is that of the mean one: the time of a step while all requests decode, by the tokens that a step
yields on average. How long steps take, and device and host per step and stage, comes from the engine's trace, which is
there when the engine has closed.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from processor_time import processor_ms
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
    windows_ns: list[tuple[int, int]] = field(default_factory=list)
    """When those of `runs_s` ran, by the clock of traces."""
    steady_ns: list[tuple[int, int]] = field(default_factory=list)
    """When all requests of them decoded."""
    tokens_per_step: list[float] = field(default_factory=list)
    """That a request got in them."""
    processor_ms: dict[str, list[float]] = field(default_factory=dict)
    """Per token of `runs_s`, by process."""
    step_ms: float | None = None
    """Of a request, see `note_trace`."""
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
    def tpot_ms(self) -> float | None:
        """Time per output token, of a request in the mean; None without a trace."""
        return None if self.step_ms is None else self.step_ms / statistics.fmean(self.tokens_per_step)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second over the whole run, prompts included."""
        return self.num_requests * self.output_len / statistics.median(self.runs_s)

    def figures(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "itl_ms": round(self.itl_ms, 4),
            **({} if self.tpot_ms is None else {"tpot_ms": round(self.tpot_ms, 4)}),
            "first_token_ms": round(self.first_token_s * 1e3, 2),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "first_runs_s": [round(seconds, 4) for seconds in self.first_runs_s],
            "runs_s": [round(seconds, 4) for seconds in self.runs_s],
            "processor_us_per_token": {
                name: round(statistics.median(of_runs) * 1e3, 2) for name, of_runs in self.processor_ms.items()
            },
            "tokens_per_step": [round(tokens, 4) for tokens in self.tokens_per_step],
            "step_ms": None if self.step_ms is None else round(self.step_ms, 4),
            "stages": self.stages,
        }

    def note_trace(self, lanes: Sequence[Lane]) -> None:
        """Take from the engine's trace how long steps took."""
        self.stages = stage_times(lanes, self.windows_ns)
        between_ms = _between_forwards_ms(lanes, self.steady_ns)
        if between_ms is not None:  # as many cohorts as stages take turns, unless there are fewer requests
            num_stages = sum(lane.name != DRIVER_LANE for lane in lanes)
            self.step_ms = between_ms * min(self.num_requests, num_stages)


def engine_settings(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that every engine of a decode table has: nothing is cached, and all requests run at once.

    Args:
        model: A folder of benchmarks/models, or what `LLM` takes.
        args: num_stages, requests, max_model_len and max_num_batched_tokens.
    """
    return {
        **model_settings(model),
        "num_stages": args.num_stages,
        "stage_num_gpus": getattr(args, "stage_num_gpus", 1.0),
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_seqs": max(args.requests),
        "max_model_len": args.max_model_len,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }


def measure_point(llm: LLM, num_requests: int, input_len: int, output_len: int, num_runs: int) -> DecodePoint:
    """Measure one number of greedy requests; every run has prompts of its own."""
    return measure_points(llm, num_requests, input_len, output_len, num_runs, ["greedy"])[0]


def measure_points(
    llm: LLM, num_requests: int, input_len: int, output_len: int, num_runs: int, samplings: Sequence[str]
) -> list[DecodePoint]:
    """Measure one number of requests, sampled in several ways that take turns."""
    points, vocab_size = [DecodePoint(num_requests, output_len) for _ in samplings], llm.plan()["vocab_size"]
    rng = random.Random(num_requests)
    for _ in range(num_runs):
        for sampling, point in zip(samplings, points, strict=True):
            prompts = random_prompts(num_requests, input_len, vocab_size, rng)
            point.first_runs_s.append(seconds_for(llm, prompts, 1, sampling))
            prompts = random_prompts(num_requests, input_len, vocab_size, rng)
            begun_ns, spent_ms = now_ns(), processor_ms(llm.processes())
            took = time_for(llm, prompts, output_len, sampling)
            for name, until_ms in processor_ms(llm.processes()).items():
                of_runs = point.processor_ms.setdefault(name, [])
                of_runs.append((until_ms - spent_ms[name]) / (num_requests * output_len))
            point.runs_s.append(took.all_s)
            point.steady_ns.append(took.steady_ns)
            point.windows_ns.append((begun_ns, now_ns()))
            point.tokens_per_step.append(took.tokens_per_step)
    return points


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


def _between_forwards_ms(lanes: Sequence[Lane], windows_ns: Sequence[tuple[int, int]]) -> float | None:
    """Return the mean time from forward to forward of the last stage, the median of the windows'; None without any."""
    starts = [event.start_ns for event in lanes[-1].events if event.name == FORWARD] if lanes else []
    means = []
    for begun, ended in windows_ns:
        within = [start_ns for start_ns in starts if begun <= start_ns < ended]
        if len(within) > 1:
            means.append((within[-1] - within[0]) / (len(within) - 1) / 1e6)
    return statistics.median(means) if means else None
