"""What decode latency is compared with: another engine's figures on the same machine and workload, and raypp's bars.

vLLM 0.26.0, two stages on two H200, random bf16 weights, 512 random ids in, 256 tokens out, greedy, EOS ignored, prefix
caching off, all requests at once through `LLM.generate`, its default graphs: `results/vllm_pp2_h200x2_2026-11.json`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PeerPoint:
    """The other engine's figures at one number of requests."""

    itl_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Compared:
    """One model's figures to compare with."""

    peer: Mapping[int, PeerPoint] = field(default_factory=dict)
    at_most_ms: Mapping[int, float] = field(default_factory=dict)
    """ITL by the number of requests."""
    start_s: float | None = None
    """The other engine's, from nothing to ready."""
    prefill_tokens_per_s: float = 60_000
    """raypp's own, roughly: to say beforehand how long a benchmark takes."""


COMPARED: Mapping[str, Compared] = {
    "qwen3-8b": Compared(
        peer={
            1: PeerPoint(5.22, 190),
            16: PeerPoint(6.11, 2_379),
            64: PeerPoint(6.92, 7_068),
            256: PeerPoint(10.7, 14_775),
        },
        at_most_ms={1: 5.2, 16: 5.8, 64: 6.5, 256: 10.4},
        start_s=92,
        prefill_tokens_per_s=66_000,
    ),
    "qwen3-0.6b": Compared(
        peer={
            1: PeerPoint(2.84, 349),
            16: PeerPoint(3.35, 4_493),
            64: PeerPoint(5.35, 11_225),
            256: PeerPoint(5.88, 39_131),
        },
        at_most_ms={1: 1.7, 16: 1.95, 64: 2.7, 256: 5.3},
        start_s=68,
        prefill_tokens_per_s=300_000,
    ),
}


def on_line(points: Mapping[int, float], x: int) -> float:
    """Return the value at `x` on the line through points; before the first and after the last it goes on level."""
    xs = sorted(points)
    index = bisect_left(xs, x)
    if index == 0:
        return points[xs[0]]
    if index == len(xs):
        return points[xs[-1]]
    low, high = xs[index - 1], xs[index]
    return points[low] + (points[high] - points[low]) * (x - low) / (high - low)
