"""What a driver pays for requests that wait: how long one turn of its loop takes, and how much memory they hold.

    python benchmarks/waiting_requests.py                     10,000 of each kind
    python benchmarks/waiting_requests.py --requests 1000

Server, engine, scheduler and sockets are the real ones. The stages and whoever follows grammars answer at once, in this
thread, and outside of what is timed. All rows decode throughout. Turns are timed while the requests come in, while they
wait, and while they are aborted, in CPU time of the loop's thread: it also waits for
results. Memory is what Python and numpy allocated, over that of the driver
before; pixels, which have a limit of their own, are counted apart. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).parent))
from report import print_report

from raypp.client_messages import (
    AbortRequests,
    AddRequests,
    ClientMessage,
    CloseClient,
    OpenClient,
    encode_client_message,
)
from raypp.driver.engine_loop import ChannelPipeline, Engine
from raypp.driver.grammars import Grammars
from raypp.driver.item_encoders import ItemEvent
from raypp.driver.server import DriverServer, OpenRequests, open_client_socket, spare_the_collector
from raypp.driver.stage_health import FailureReports, StageHealth
from raypp.grammar.grammar_threads import Job
from raypp.grammar.vocabulary import Vocabulary
from raypp.messages import BlockGroup, StepPlan, StepResult, pack, unpack
from raypp.prompt_items import EncoderItem, PromptItems
from raypp.request import Request
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.scheduler import Scheduler
from raypp.scheduler.step_budget import RooflineCost, StageTimes, StepPredictor
from raypp.step_channel import DriverChannel, StageChannel
from raypp.tracing import Tracer
from raypp.types import SamplingParams

KINDS = ("text", "pictures", "grammars")

_NUM_ROWS, _VOCAB_SIZE, _REQUESTS_PER_MESSAGE = 64, 600, 16
_FEWEST_TOKENS, _MOST_TOKENS = 32, 8_000
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_FIRST_TURNS, _WAITING_TURNS = 50, 300
_DEADLINE_S = 20.0


@dataclass
class Times:
    """How long turns took, milliseconds."""

    num_turns: int
    median_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        """Return what is said of these."""
        ordered = sorted(1e3 * value for value in seconds)
        p99 = ordered[min(round(0.99 * len(ordered)), len(ordered) - 1)]
        return cls(len(ordered), statistics.median(ordered), p99, ordered[-1])


@dataclass
class Load:
    """What was seen of requests of one kind."""

    kind: str
    num_requests: int
    num_prompt_tokens: int
    coming: Times
    waiting: Times
    aborted: Times
    num_bytes: int = 0
    """Over those of the driver with nothing waiting, pixels apart; 0 when it was not measured."""
    num_pixel_bytes: int = 0

    @property
    def allowed_bytes(self) -> int:
        """What they may take: 5 bytes per token, and 4 KiB per request."""
        return 5 * self.num_prompt_tokens + 4096 * self.num_requests


class _AnsweringGrammars:
    """A `GrammarBackend` that compiles everything at once. Whoever waits has no row, and needs no masks."""

    def __init__(self) -> None:
        self._vocabulary = Vocabulary.of_tokens([*(bytes([byte]) for byte in range(255)), b""], [255])
        self._done: list[Job] = []
        self.is_held_up = False
        """Whether it says nothing for now."""

    def submit(self, job: Job) -> None:
        job.run(lambda: self._vocabulary)
        self._done.append(job)

    def receive(self) -> list[Job]:
        if self.is_held_up:
            return []
        done, self._done = self._done, []
        return done

    def give_up(self, job: Job) -> None:
        raise AssertionError("nothing is late")

    def fileno(self) -> None:
        return None

    def close(self) -> None:
        pass


class _SilentEncoders:
    """`ItemEncoders` that never come to an end: pictures wait."""

    def encode(self, items: object) -> None:
        pass

    def drop(self, keys: object) -> None:
        pass

    def poll(self) -> list[ItemEvent]:
        return []

    def stats(self) -> dict[str, object]:
        return {}


class LoadedDriver:
    """A driver whose rows all decode, and a client that sends more.

    Args:
        folder: For socket files.
        num_rows: Requests that run.
    """

    def __init__(self, folder: Path, num_rows: int = _NUM_ROWS) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        clients = open_client_socket(self._context, f"ipc://{folder}/clients")
        channel = DriverChannel([f"ipc://{folder}/0"], f"ipc://{folder}/results", context=self._context)
        self._stage = StageChannel(0, channel.stage_addresses[0], channel.result_address)
        limits = SchedulerLimits(
            num_stages=1,
            max_num_seqs=num_rows,
            max_num_batched_tokens=2048,
            max_model_len=2 * _MOST_TOKENS,
            block_size=16,
            groups=(BlockGroup(num_rows * 2 * _MOST_TOKENS // 16 + 1),),
            enable_prefix_caching=True,
            max_item_tokens=64,
        )
        self.scheduler = Scheduler(limits)
        health, failures = StageHealth(1, step_timeout_s=600, silence_timeout_s=600), FailureReports()
        times = StageTimes(0.01, 0.01, 1.0, 0.001, 0.01, 1e-5, 1e-6)
        predictor = StepPredictor(RooflineCost(100.0), [times])
        self._pipeline = ChannelPipeline(channel, health, failures, predictor)
        silent = Tracer("driver", enabled=False)
        self.grammars = _AnsweringGrammars()
        grammars = Grammars(self.grammars, 20.0, self._pipeline.send_masks)
        self._engine = Engine(self.scheduler, self._pipeline, silent, _SilentEncoders(), grammars)  # type: ignore[arg-type]
        self.requests = OpenRequests(max_bytes=1 << 34, max_pixel_bytes=1 << 34)
        self._server = DriverServer(
            self._engine, self._pipeline, clients, health, failures, self.requests, heartbeat_s=0.5
        )
        self._clients = clients
        self._num_answered = 0
        self._client = self._context.socket(zmq.DEALER)
        self._client.linger = 0
        self._client.sndhwm = self._client.rcvhwm = 0
        self._client.connect(f"ipc://{folder}/clients")
        self._send(OpenClient())
        running = SamplingParams(max_tokens=2 * _MOST_TOKENS, temperature=0.0, ignore_eos=True)
        rows = [
            Request(f"row {i}", np.arange(8, dtype=np.int32), running, i, handle=i, is_streamed=True)
            for i in range(num_rows)
        ]
        self._send(AddRequests(rows))
        while self.scheduler.stats().num_running < num_rows:
            self.turn()
        for _ in range(_FIRST_TURNS):
            self.turn()

    def add(self, requests: list[Request]) -> None:
        """Send requests as a client does."""
        for start in range(0, len(requests), _REQUESTS_PER_MESSAGE):
            self.add_at_once(requests[start : start + _REQUESTS_PER_MESSAGE])

    def add_at_once(self, requests: list[Request]) -> None:
        """Send requests in one message."""
        self._send(AddRequests(requests))

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests, all in one message."""
        self._send(AbortRequests(request_ids))

    def leave(self) -> None:
        """Say that the client leaves."""
        self._send(CloseClient())

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return self.num_waiting + self.scheduler.stats().num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those included that the scheduler does not know yet."""
        return self._engine.stats().num_waiting

    def turn(self, *, answers: bool = True) -> float:
        """Have one turn, and then the stage answer what it brought, if it shall; return the seconds of the turn."""
        started_s = time.thread_time()
        self._server.turn()
        seconds = time.thread_time() - started_s
        while answers and self._num_answered < self.scheduler.stats().num_steps:
            received = self._stage.receive(_DEADLINE_S)
            if isinstance(received, memoryview):
                plan = unpack(StepPlan, received)
                tokens = np.full((len(plan.rows), 1), 7, np.int32)
                self._stage.send_result(pack(StepResult(plan.step_id, tokens, plan.samples.astype(np.int32))))
                self._num_answered += 1
        if answers and self.scheduler.num_in_flight:
            self._pipeline.socket.poll(1e3 * _DEADLINE_S)
        while self._client.poll(0):
            self._client.recv_multipart()
        return seconds

    def close(self) -> None:
        """Close all sockets."""
        self._pipeline.close()
        self._server.close()
        self._stage.close()
        self._client.close()
        self._clients.close(linger=0)
        self._context.destroy(linger=0)

    def _send(self, message: ClientMessage) -> None:
        self._client.send_multipart(encode_client_message(message))


@contextmanager
def loaded_driver(num_rows: int = _NUM_ROWS) -> Iterator[LoadedDriver]:
    """Make a driver, and close it."""
    with tempfile.TemporaryDirectory(prefix="raypp") as folder:
        driver = LoadedDriver(Path(folder), num_rows)
        try:
            yield driver
        finally:
            driver.close()


def make_request(kind: str, number: int, rng: random.Random) -> Request:
    """Return a request of 32 to 8,000 prompt tokens."""
    num_tokens = round(_FEWEST_TOKENS * (_MOST_TOKENS / _FEWEST_TOKENS) ** rng.random())
    prompt = np.full(num_tokens, number % _VOCAB_SIZE, np.int32)
    items, constraint = None, None
    if kind == "pictures":
        patches = np.frombuffer(rng.randbytes(16 * 768), np.uint8).reshape(16, 768)
        items = PromptItems((EncoderItem.of(patches, (1, 4, 4), 4),), (3,), merge_size=2)
    elif kind == "grammars":
        constraint = {"json_schema": _SCHEMA}
    params = SamplingParams(max_tokens=100, seed=number, structured_outputs=constraint)
    return Request(
        f"{kind}-{number:09}",
        prompt,
        params,
        number,
        frozenset((1, 2)),
        handle=1000 + number,
        items=items,
        is_streamed=True,
    )


def measure(kind: str, count: int, *, traces_memory: bool) -> Load:
    """Return what a driver pays for so many requests of a kind."""
    rng = random.Random(0)
    with loaded_driver() as driver:
        num_tokens, ids, coming = 0, list[str](), list[float]()
        gc.collect()
        if traces_memory:
            tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0] if traces_memory else 0
        for start in range(0, count, _REQUESTS_PER_MESSAGE):
            made = [
                make_request(kind, number, rng) for number in range(start, min(start + _REQUESTS_PER_MESSAGE, count))
            ]
            num_tokens += sum(len(request.prompt_token_ids) for request in made)
            ids += [request.request_id for request in made]
            driver.add(made)
            expected = start + len(made)
            del made
            while driver.num_waiting < expected:
                coming.append(driver.turn(answers=not traces_memory))  # what rows yield is not to be counted
        num_bytes, num_pixel_bytes = 0, driver.requests.memory.num_pixel_bytes
        if traces_memory:
            gc.collect()
            num_bytes = tracemalloc.get_traced_memory()[0] - before
            num_bytes -= num_pixel_bytes  # so small that they were copied out of zmq's memory, which is not traced
            num_bytes -= sum(map(sys.getsizeof, ids)) + sys.getsizeof(ids)  # the client's
            tracemalloc.stop()
        waiting = [driver.turn() for _ in range(1 if traces_memory else _WAITING_TURNS)]
        driver.abort(ids)
        aborted = list[float]()
        while driver.num_waiting:
            aborted.append(driver.turn())
    return Load(
        kind, count, num_tokens, Times.of(coming), Times.of(waiting), Times.of(aborted), num_bytes, num_pixel_bytes
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    spare_the_collector()
    figures = {}
    for kind in args.kinds:
        load = measure(kind, args.requests, traces_memory=False)
        traced = measure(kind, args.requests, traces_memory=True)
        load.num_bytes, load.num_pixel_bytes = traced.num_bytes, traced.num_pixel_bytes
        print(describe(load), flush=True)
        figures[kind] = asdict(load) | {"allowed_bytes": load.allowed_bytes}
    print_report("waiting_requests", vars(args), figures)


def describe(load: Load) -> str:
    """Return the figures as a line."""
    times = [
        f"{name} {t.median_ms:.2f} ms (p99 {t.p99_ms:.2f}, max {t.max_ms:.1f}; {t.num_turns} turns)"
        for name, t in (("coming", load.coming), ("waiting", load.waiting), ("aborted", load.aborted))
    ]
    memory = f"{load.num_bytes / 1e6:.1f} MB of {load.allowed_bytes / 1e6:.1f} allowed"
    return (
        f"{load.num_requests} {load.kind}, {load.num_prompt_tokens} prompt tokens: "
        f"one turn {', '.join(times)}; {memory}; pixels {load.num_pixel_bytes / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
