"""How long messages take: gloo links and the step channel, between two processes on one node.

    python benchmarks/micro/link_latency.py [--steps 2000]

A link's message goes there and back over two edges, receives posted beforehand, as between two stages; half of the
round trip is printed. The step channel's round trip is a plan out and a result back. The last line is JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

from raypp.step_channel import DriverChannel, StageChannel, StageResult, Stop
from raypp.transport.edges import StageLinks
from raypp.transport.open import open_stage_links
from raypp.transport.rendezvous import Rendezvous, RendezvousServer
from raypp.transport.schema import MessageSpec, Schema, TensorSpec

LINK_BYTES = (1 << 10, 1 << 16, 1 << 20)
PLAN_BYTES = (300, 20_000)
WARM_UP = 100
SPEC = MessageSpec(Schema((TensorSpec("bytes", torch.uint8, (1,), "row"),)), max_rows=max(LINK_BYTES), max_tokens=1)


def open_links(stage_index: int, rendezvous: Rendezvous) -> StageLinks:
    """Join two stages: forward there, feedback back."""
    return open_stage_links("gloo", stage_index, 2, forward=[SPEC], feedback=SPEC, rendezvous=rendezvous)


def echo_links(rendezvous: Rendezvous, steps: int) -> None:
    """The far stage: send back what comes, and stay ready for the next."""
    links = open_links(1, rendezvous)
    assert links.previous is not None
    assert links.feedback_out is not None
    sizes = [size for size in LINK_BYTES for _ in range(steps)]
    links.previous.post_recv(0, sizes[0])
    for step_id, size in enumerate(sizes):
        if step_id + 1 < len(sizes):
            links.previous.post_recv(step_id + 1, sizes[step_id + 1])
        links.previous.wait(step_id)
        links.feedback_out.acquire(step_id)
        links.feedback_out.send(step_id, size)
        links.previous.release(step_id)
    links.close()


def measure_links(steps: int) -> dict[str, list[float]]:
    """Return the round trips in microseconds, by message size."""
    server = RendezvousServer()
    far = start(echo_links, server.address, steps)
    links = open_links(0, server.address)
    assert links.next is not None
    assert links.feedback_in is not None
    round_trips: dict[str, list[float]] = {}
    step_id = 0
    for size in LINK_BYTES:
        times = round_trips[f"gloo {size} B"] = []
        for _ in range(steps):
            links.feedback_in.post_recv(step_id, size)
            started = time.perf_counter()
            links.next.acquire(step_id)
            links.next.send(step_id, size)
            links.feedback_in.wait(step_id)
            times.append((time.perf_counter() - started) * 1e6)
            links.feedback_in.release(step_id)
            step_id += 1
    far.join()
    links.close()
    server.close()
    return round_trips


def echo_plans(plan_address: str, result_address: str) -> None:
    """The far stage: answer every plan with a result of the same size."""
    channel = StageChannel(0, plan_address, result_address)
    while not isinstance(plan := channel.receive(10.0), Stop):
        assert plan is not None
        channel.send_result(bytes(plan))
    channel.close()


def measure_channel(steps: int) -> dict[str, list[float]]:
    """Return the round trips in microseconds, by address kind and plan size."""
    round_trips: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="raypp") as folder:
        for addresses in ((f"ipc://{folder}/plans", f"ipc://{folder}/results"), ("tcp://127.0.0.1:*",) * 2):
            driver = DriverChannel([addresses[0]], addresses[1], send_timeout_s=30.0)
            far = start(echo_plans, driver.stage_addresses[0], driver.result_address)
            for size in PLAN_BYTES:
                times = round_trips[f"zmq {addresses[0][:3]} {size} B"] = []
                plan = bytes(size)
                for _ in range(steps):
                    started = time.perf_counter()
                    driver.send_plan(plan)
                    (message,) = driver.receive(30.0)
                    times.append((time.perf_counter() - started) * 1e6)
                    assert isinstance(message, StageResult)
            driver.send_stop()
            far.join()
            driver.close()
    return round_trips


def start(function: object, *args: object) -> BaseProcess:
    """Start a far end."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args, daemon=True)  # type: ignore[arg-type]
    process.start()
    return process


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps + WARM_UP
    figures = {}
    print(f"{'microseconds':<28}{'p50':>8}{'p90':>8}{'p99':>8}")
    for name, times in {**measure_links(steps), **measure_channel(steps)}.items():
        trips = 2 if name.startswith("gloo") else 1  # one way, or there and back
        ordered = sorted(t / trips for t in times[WARM_UP:])
        p50, p90, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.9, 0.99))
        label = f"{name} {'one way' if trips == 2 else 'round trip'}"
        figures[label] = {"p50_us": round(p50, 1), "p90_us": round(p90, 1), "p99_us": round(p99, 1)}
        print(f"{label:<28}{p50:8.1f}{p90:8.1f}{p99:8.1f}")
    print_report("link_latency", {"steps": steps - WARM_UP}, figures)


if __name__ == "__main__":
    main()
