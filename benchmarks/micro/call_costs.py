"""What each kind of call that a decode step makes costs the host of a GPU, in the calling thread, while it keeps up.

    python benchmarks/micro/call_costs.py
    python benchmarks/micro/call_costs.py --group 1 --pause-us 500      as in a stage, which sleeps between two steps

A call is timed between two waits for the device, in groups that its queue holds with ease, so that nothing waits for
the device. The last lines are what `host_step.py --call-us` takes, and JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

from raypp.transport.gpu_access import CurrentStream
from raypp.transport.ipc.cuda_device import CudaDevice

_NUM_BYTES = 4096


def call_us(call: Callable[[], object], groups: int, group: int, pause_us: float) -> float:
    """Return the median over groups of what a call takes, microseconds."""
    times = []
    for _ in range(groups + 3):
        torch.cuda.synchronize()
        if pause_us:
            time.sleep(pause_us / 1e6)
        begun = time.perf_counter_ns()
        for _ in range(group):
            call()
        times.append((time.perf_counter_ns() - begun) / 1e3 / group)
    torch.cuda.synchronize()
    return statistics.median(times[3:])


def recorded(num_kernels: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Return a graph of so many small kernels."""
    tensor = torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(num_kernels):
            tensor.add_(1)
    graph.replay()
    return graph


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--group", type=int, default=8, help="calls that are timed together")
    parser.add_argument("--pause-us", type=float, default=0.0, help="before each group")
    parser.add_argument("--kernels", type=int, nargs="+", default=[1, 100, 200, 400], help="of a graph")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    links = CudaDevice(device)
    stream = torch.cuda.Stream(device)
    torch.cuda.set_stream(stream)
    flag = links.allocate(4096)
    links.write(flag, 7)
    host = torch.zeros(_NUM_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device, other = (torch.zeros(_NUM_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    current, event, timed = CurrentStream(device), torch.cuda.Event(blocking=True), torch.cuda.Event(enable_timing=True)
    timed.record()
    calls: dict[str, Callable[[], object]] = {
        "upload": lambda: on_device.copy_(host, non_blocking=True),
        "fetch": lambda: host.copy_(on_device, non_blocking=True),
        "copy on the device": lambda: other.copy_(on_device),
        "view": lambda: on_device[:512],
        "flag write": lambda: links.write(flag, 7),
        "flag wait": lambda: links.wait(flag, 7),
        "event record": lambda: event.record(),
        "event record, stream given": lambda: event.record(current.get()),
        "event query": timed.query,
        "event elapsed": lambda: timed.elapsed_time(timed),
        "pinned memory and event anew": lambda: (torch.empty(64, pin_memory=True), torch.cuda.Event().record()),
    }
    timing = (args.groups, args.group, args.pause_us)
    with torch.inference_mode():
        figures = {name: call_us(call, *timing) for name, call in calls.items()}
        for num_kernels in args.kernels:
            graph = recorded(num_kernels, stream)
            figures[f"replay of {num_kernels}"] = call_us(graph.replay, *timing)
    for name, us in figures.items():
        print(f"{name:32s} {us:7.2f} us")
    flags_us = (figures["flag write"] + figures["flag wait"]) / 2
    copies_us = (figures["upload"] + figures["fetch"]) / 2
    replay_us = figures[f"replay of {args.kernels[-2]}" if len(args.kernels) > 1 else f"replay of {args.kernels[0]}"]
    print(f"--call-us {replay_us:.1f} {flags_us:.1f} {copies_us:.1f} {figures['view']:.1f}")
    links.free(flag)
    print_report("call_costs", vars(args), figures)


if __name__ == "__main__":
    main()
