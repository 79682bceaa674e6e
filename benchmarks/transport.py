"""How long a message takes from one stage to the next, over each link that this machine has.

    python benchmarks/transport.py [--links ipc nccl] [--seconds 4]

Two processes, a ring of two stages: the first writes a message into the link's slot, the second copies it from its slot
into the slot back. A hop is half a round trip, with the copy into the slot. Eager: every call is made anew for each
step. On GPUs the time is that of the stream, between CUDA events; on a CPU that of the clock. The host's time per step
is that of the first stage over a few steps, which the stream's queue can hold.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from report import print_report

from raypp.transport.edges import StageLinks
from raypp.transport.open import open_stage_links
from raypp.transport.rendezvous import Rendezvous, RendezvousServer
from raypp.transport.schema import MessageSpec, Schema, TensorSpec

MESSAGE_BYTES = (4 << 10, 512 << 10, 16 << 20)
WARM_UP = 10
ROUNDS = 5
HOST_STEPS = 20
DEADLINE_S = 40.0


@dataclass(frozen=True)
class Case:
    """A link between two devices."""

    link: str
    devices: tuple[str, str]

    @property
    def name(self) -> str:
        """What the table calls it."""
        where = "one GPU" if self.devices[0] == self.devices[1] else "two GPUs"
        return f"{self.link}, {'CPU' if self.devices[0] == 'cpu' else where}"


def cases(links: list[str]) -> list[Case]:
    """Return what this machine can run, of the links that were asked for."""
    found = []
    num_gpus = torch.cuda.device_count()
    one, two = ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")
    if num_gpus >= 1:
        found += [Case("ipc", one), Case("gloo", one)]
    if num_gpus >= 2:
        found += [Case("ipc", two), Case("nccl", two)]
    found.append(Case("gloo", ("cpu", "cpu")))
    return [case for case in found if case.link in links]


def open_links(case: Case, stage_index: int, rendezvous: Rendezvous, num_bytes: int) -> StageLinks:
    """Open one end of a case."""
    device = torch.device(case.devices[stage_index])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    message = MessageSpec(Schema((TensorSpec("bytes", torch.uint8, (num_bytes,), "token"),)), 1, 1)
    return open_stage_links(
        case.link,  # type: ignore[arg-type]
        stage_index,
        2,
        forward=[message],
        feedback=message,
        rendezvous=rendezvous,
        open_timeout_s=DEADLINE_S,
        deadline_s=DEADLINE_S,
        device=device,
    )


def echo(links: StageLinks, num_bytes: int, num_steps: int) -> None:
    """The second stage: send back what comes."""
    assert links.previous is not None
    assert links.feedback_out is not None
    for step_id in range(num_steps):
        links.previous.post_recv(step_id, num_bytes)
        message = links.previous.wait(step_id)
        links.feedback_out.acquire(step_id)[:num_bytes].copy_(message[:num_bytes])
        links.previous.release(step_id)
        links.feedback_out.send(step_id, num_bytes)


def start(links: StageLinks, source: torch.Tensor, first: int, count: int) -> None:
    """The first stage: send `count` messages, each when the one before has come back."""
    num_bytes = len(source)
    assert links.next is not None
    assert links.feedback_in is not None
    for step_id in range(first, first + count):
        links.next.acquire(step_id)[:num_bytes].copy_(source)
        links.next.send(step_id, num_bytes)
        links.feedback_in.post_recv(step_id, num_bytes)
        links.feedback_in.wait(step_id)
        links.feedback_in.release(step_id)


def time_steps(links: StageLinks, source: torch.Tensor, first: int, count: int) -> tuple[float, float]:
    """Return microseconds per hop, and microseconds that this stage's host took per step."""
    started = time.perf_counter()
    if source.device.type == "cpu":
        start(links, source, first, count)
        seconds = host_seconds = time.perf_counter() - started
    else:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start(links, source, first, count)
        end.record()
        host_seconds = time.perf_counter() - started
        deadline = time.monotonic() + DEADLINE_S
        while not end.query():
            if time.monotonic() > deadline:
                raise TimeoutError("the stream hangs")
        seconds = begin.elapsed_time(end) / 1e3
    return seconds / count / 2 * 1e6, host_seconds / count * 1e6


def run_stage(case: Case, stage_index: int, rendezvous: list[Rendezvous], seconds: float, pipe: Connection) -> None:
    """A process of a case: all sizes, one after the other. The first stage tells what it measured."""
    torch.set_num_threads(1)  # two processes that copy with all cores get in each other's way
    with torch.inference_mode():
        for num_bytes, meeting_place in zip(MESSAGE_BYTES, rendezvous, strict=True):
            count = max(5, min(400, int(seconds / ROUNDS / (4e-4 + num_bytes * 2e-9))))
            try:
                links = open_links(case, stage_index, meeting_place, num_bytes)
                if stage_index == 1:
                    echo(links, num_bytes, WARM_UP + ROUNDS * (HOST_STEPS + count))
                else:
                    pipe.send(measure(links, num_bytes, count, case.devices[0]))
                links.close()
            except Exception as error:  # said by whoever fails; this case is over, and the others go on
                pipe.send(f"stage {stage_index}: {type(error).__name__}: {error}")
                return


def measure(links: StageLinks, num_bytes: int, count: int, device: str) -> dict[str, float]:
    """Return the figures for one message size."""
    source = torch.arange(num_bytes, device=device).to(torch.uint8)
    time_steps(links, source, 0, WARM_UP)
    hops, hosts, first = [], [], WARM_UP
    for _ in range(ROUNDS):
        hosts.append(time_steps(links, source, first, HOST_STEPS)[1])
        hops.append(time_steps(links, source, first + HOST_STEPS, count)[0])
        first += HOST_STEPS + count
    return {
        "us_per_hop": round(statistics.median(hops), 1),
        "min_us": round(min(hops), 1),
        "max_us": round(max(hops), 1),
        "host_us_per_step": round(statistics.median(hosts), 1),
        "steps": ROUNDS * count,
    }


def run_case(case: Case, seconds: float) -> Iterator[tuple[int, dict[str, float] | str]]:
    """Yield message sizes and their figures, or what went wrong."""
    servers = [RendezvousServer() for _ in MESSAGE_BYTES]
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    processes = [
        context.Process(
            target=run_stage, args=(case, index, [server.address for server in servers], seconds, far), daemon=True
        )
        for index in range(2)
    ]
    for process in processes:
        process.start()
    try:
        for num_bytes in MESSAGE_BYTES:
            said = near.recv() if near.poll(2 * DEADLINE_S) else "nothing was heard of the stages"
            yield num_bytes, said
            if isinstance(said, str):
                return
        for process in processes:
            process.join(DEADLINE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for server in servers:
            server.close()


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["ipc", "nccl", "gloo"])
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long each size is measured")
    options = parser.parse_args()
    figures: dict[str, dict[str, object]] = {}
    print(f"{'microseconds':<20}{'bytes':>10}{'per hop':>10}{'min':>10}{'max':>10}{'host/step':>10}")
    for case in cases(options.links):
        for num_bytes, measured in run_case(case, options.seconds):
            label = f"{case.name:<20}{num_bytes:>10}"
            if isinstance(measured, str):
                print(f"{label}  {measured}", flush=True)
                figures.setdefault(case.name, {})[f"{num_bytes} B"] = {"error": measured}
                continue
            figures.setdefault(case.name, {})[f"{num_bytes} B"] = measured
            columns = (measured["us_per_hop"], measured["min_us"], measured["max_us"], measured["host_us_per_step"])
            print(label + "".join(f"{value:>10.1f}" for value in columns), flush=True)
    print_report("transport", {"links": options.links, "seconds": options.seconds}, figures)


if __name__ == "__main__":
    main()
