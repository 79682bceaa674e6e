"""Timing of GPU work: inside a CUDA graph, or step by step with what the host takes to launch it."""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

REPLAYS = 15
NUM_PROFILED = 5


def require_gpu() -> None:
    """End the program, saying why, where there is none."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{Path(sys.argv[0]).name} needs a CUDA device")


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median microseconds per call, all calls being one graph, in their order.

    Each is run once before, so that nothing is compiled or allocated for the first time while capturing.
    """
    torch.cuda.synchronize()  # what the calls read may still be under way in another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times) / len(calls)


def try_us(calls: Sequence[Callable[[], object]]) -> float | str:
    """Return what `time_us` does, or why there is no figure."""
    try:
        return round(time_us(calls), 2)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"


def step_ms(step: Callable[[], object], num_steps: int = 40) -> tuple[float, float]:
    """Return medians of a step's device and host time; the device is idle between steps."""
    device_ms, host_ms = [], []
    for _ in range(num_steps):
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        began.record()
        step()
        ended.record()
        host_ms.append((time.perf_counter() - started) * 1e3)
        torch.cuda.synchronize()
        device_ms.append(began.elapsed_time(ended))
    return statistics.median(device_ms), statistics.median(host_ms)


def kernels_of(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Return name, number per run and microseconds per run of each kernel, the longest first.

    Kernels overlap, so that their times add up to more than the run's.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_PROFILED):
            run()
        torch.cuda.synchronize()
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.device_time_total:
            counts[event.name] += 1
            times[event.name] += event.device_time_total
    found = [(name, counts[name] / NUM_PROFILED, us / NUM_PROFILED) for name, us in times.items()]
    return sorted(found, key=lambda kernel: -kernel[2])


def compile_ahead(calls: Sequence[Callable[[], object]], num_threads: int = 12) -> None:
    """Run each call once, side by side, so that what they compile is compiled side by side; errors show up later."""

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            print(f"   compile: {type(error).__name__}: {str(error)[:150]}", flush=True)

    started = time.monotonic()
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run, calls))
    torch.cuda.synchronize()
    print(f"   compiled and ran {len(calls)} calls in {time.monotonic() - started:.1f} s", flush=True)
