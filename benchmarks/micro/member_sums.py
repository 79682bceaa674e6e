"""Sums over the members of a stage: microseconds of a sum in a graph, by shared memory and by NCCL; two GPUs or more.

    python benchmarks/micro/member_sums.py --rows 1 4 16 64 128 256 --hidden 4096

Each member is a process with a GPU. A graph has 64 sums, each with the small kernel that uses it; the median of its
replays. Then as many replays as `--replays` says, and a sum without the others, which `abort` ends. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from member_processes import run_members

from raypp.ops.cuda.kernel_launch import Device
from raypp.ops.cuda.member_sums import PushedSums

_SUMS = 64

Way = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the sum of all members' x and the residual, in x. Shapes: both [N, H]."""


def by_nccl(members: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Sum by the library; see `Way`."""
    return members.sum_(x).add_(residual)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--replays", type=int, default=1000)
    args = parser.parse_args()
    run_members("member_sums", _measure, args)


def _measure(members: Any, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    rank = members.rank
    figures: dict[str, Any] = {}
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    for rows in args.rows:
        ways = {"pushed": PushedSums(members, Device.of(device)), "nccl": partial(by_nccl, members)}
        for name, way in ways.items():
            figures[f"{rows} rows, {name}"] = us = sum_us(members, rows, args.hidden, way, device)
            if rank == 0:
                print(f"{rows:4d} x {args.hidden}, {name}: {us:.2f} us a sum", flush=True)
    figures["replays_s"] = _replay(members, args.replays, args.hidden, device)
    figures["abort_s"] = _abort(members, rank, args.hidden, device)
    if rank == 0:
        print(f"{args.replays} replays of {_SUMS} sums: {figures['replays_s']:.1f} s")
        print(f"a wait without the others ended {figures['abort_s'] * 1e3:.1f} ms after abort()", flush=True)
    return figures


def capture(members: Any, rows: int, hidden: int, way: Way, device: torch.device) -> tuple[Any, torch.Tensor, Any]:
    """Return a graph of sums, where its output is, and what is to be kept for it."""
    given = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(members.rank)).to(device, torch.bfloat16)
    zeros = torch.zeros_like(given)

    def sums() -> torch.Tensor:
        x = given.clone()
        for _ in range(_SUMS):
            x = way(x, zeros)
            x *= 1 / members.count  # stays a number
        return x

    sums()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        x = sums()
    return graph, x, sums


def sum_us(members: Any, rows: int, hidden: int, way: Way, device: torch.device) -> float:
    """Return the microseconds of a sum and the small kernel after it; the sum is checked."""
    graph, x, _kept = capture(members, rows, hidden, way, device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    for _ in range(3):
        graph.replay()
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    parts = [torch.randn(rows, hidden, generator=torch.Generator().manual_seed(each)) for each in range(members.count)]
    mean = sum(part.to(torch.bfloat16).float() for part in parts) / members.count
    torch.testing.assert_close(x.float().cpu(), mean, rtol=0.02, atol=0.02)
    times = sorted(one.elapsed_time(other) for one, other in pairwise(events))
    return times[len(times) // 2] * 1e3 / _SUMS


def _replay(members: Any, replays: int, hidden: int, device: torch.device) -> float:
    graph, x, _kept = capture(members, 4, hidden, PushedSums(members, Device.of(device)), device)
    begun = time.monotonic()
    for index in range(replays):
        graph.replay()
        if index % 500 == 499:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert torch.isfinite(x).all()
    return time.monotonic() - begun


def _abort(members: Any, rank: int, hidden: int, device: torch.device) -> float:
    """Let the first member wait for sums that nobody else makes, and end the wait."""
    if rank:
        return 0.0
    x = torch.ones(4, hidden, dtype=torch.bfloat16, device=device)
    PushedSums(members, Device.of(device))(x, x.clone())
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "a sum did not wait for the others"
    begun = [0.0]

    def end() -> None:
        begun[0] = time.monotonic()
        members.abort()

    threading.Timer(0.2, end).start()
    while not done.query():
        time.sleep(0.0005)
    return time.monotonic() - begun[0]


if __name__ == "__main__":
    main()
