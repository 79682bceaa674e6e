"""What a hostile client costs honest ones.

    python benchmarks/hostile_load.py --seconds 60

serves `tiny-vl` with a context of 40,960 tokens on two stages and streams to 8 honest clients. Rounds of four parts
follow each other: nobody else; a hostile client whose requests are refused; a polite client; a hostile client whose
requests are admitted and ask for as many tokens as the polite one's. Reported are the honest clients' time per token in
each part, how their streams ended, and the memory of every process before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from hostile_attacks import (
    CHAT,
    Attack,
    admitted_attacks,
    dripping_server,
    keep_sending,
    refused_attacks,
    slow_grammar,
)
from report import print_report
from serve_load import engine_processes, rss_bytes, warm_up

from raypp.models.registry import resolve_model_path

NUM_HONEST = 8
MAX_MODEL_LEN = 40_960
LONG_PROMPT = 32_000
TOKENS_PER_STREAM = 96
_START_TIMEOUT_S = 180.0
_SETTLE_TIMEOUT_S = 60.0
_SETTLED = 1.1  # memory that is back within 10 %
_PARTS = ("alone", "refused", "polite", "admitted")


@dataclass
class HostileReport:
    """What became of the honest clients."""

    ms_per_token: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in _PARTS})
    """Median over the streams of each part, one entry per round."""
    num_streams: int = 0
    """Honest streams that ended as they should."""
    failures: Counter[str] = field(default_factory=Counter)
    """Honest streams that did not, and attacks that were answered with something else than expected."""
    answers: Counter[str] = field(default_factory=Counter)
    """Attacks by name and status."""
    rss_bytes_before: dict[str, int] = field(default_factory=dict)
    rss_bytes_after: dict[str, int] = field(default_factory=dict)

    def ratio(self, part: str, to: str) -> float:
        """Return the median over the rounds of one part's time per token over another's."""
        pairs = zip(self.ms_per_token[part], self.ms_per_token[to], strict=True)
        return statistics.median(one / other for one, other in pairs)

    @property
    def rss_growth(self) -> dict[str, float]:
        """How much larger each process is, 0.05 is 5 %."""
        return {name: self.rss_bytes_after[name] / before - 1 for name, before in self.rss_bytes_before.items()}


@contextlib.contextmanager
def long_context_model() -> Iterator[Path]:
    """Make a copy of tiny-vl whose context is long enough for a flood."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(shutil.copytree(resolve_model_path("tiny-vl"), Path(folder) / "tiny-vl"))
        config = json.loads((model / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = MAX_MODEL_LEN
        (model / "config.json").write_text(json.dumps(config))
        yield model


@contextlib.contextmanager
def server(model: Path) -> Iterator[tuple[str, int]]:
    """Run `raypp serve`; yields its address and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "raypp", "serve", str(model), "--num-stages", "2"]
    command += ["--port", str(port), "--served-model-name", "tiny-vl", "--allow-image-urls"]
    command += ["--kv-cache-bytes", "402653184", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--grammar-compile-timeout-s", "3"]  # a part lasts some seconds
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        ends = time.monotonic() + _START_TIMEOUT_S
        while True:
            assert process.poll() is None, "the server ended while it started"
            assert time.monotonic() < ends, "the server did not start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                if b" 200 " in connection.recv(64):
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


class Honest:
    """Clients that stream one answer after the other."""

    def __init__(self, session: aiohttp.ClientSession, report: HostileReport) -> None:
        self._session = session
        self._report = report
        self._expected: dict[int, str] = {}
        self.part = ""
        self.times: list[float] = []
        """Seconds per token of the streams that ended in this part."""

    async def stream(self, client: int) -> None:
        """Stream once; note its time per token, and whether its text is what it is without company."""
        body = {
            "messages": [{"role": "user", "content": f"hello {client}"}],
            "temperature": 0,
            "max_tokens": TOKENS_PER_STREAM,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, finish_reason, num_tokens, part = "", None, 0, self.part
        first = last = 0.0
        async with self._session.post(CHAT, json=body) as response:
            if response.status != 200:
                self._report.failures[f"{part}: honest status {response.status}: {await response.text()}"] += 1
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                last = time.perf_counter()
                first = first or last
                chunk = json.loads(line[6:])
                for choice in chunk.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    finish_reason = choice["finish_reason"] or finish_reason
                if chunk.get("usage"):
                    num_tokens = chunk["usage"]["completion_tokens"]
        if (finish_reason, num_tokens) != ("length", TOKENS_PER_STREAM):
            self._report.failures[f"{part}: honest stream ended by {finish_reason} after {num_tokens} tokens"] += 1
        elif self._expected.setdefault(client, text) != text:
            self._report.failures[f"{part}: honest stream of client {client} has another text"] += 1
        else:
            self._report.num_streams += 1
            if part == self.part:  # all of it in one part
                self.times.append((last - first) / (num_tokens - 1))

    async def stream_until(self, client: int, is_over: asyncio.Event) -> None:
        """Stream again and again."""
        while not is_over.is_set():
            await self.stream(client)


async def run_load(url: str, processes: dict[str, int], seconds: float, rounds: int = 3) -> HostileReport:
    """Load a server; see the module.

    Args:
        url: Of a server on this machine.
        processes: Those that serve, by name.
        seconds: For which a hostile client sends, refused and admitted requests together, over all rounds.
        rounds: How often the four parts follow each other.
    """
    report = HostileReport()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=150)
    dripping, dripping_url = await dripping_server()
    refused = [*refused_attacks(MAX_MODEL_LEN, dripping_url), slow_grammar()]
    admitted = admitted_attacks(LONG_PROMPT)
    sent: dict[str, Sequence[Attack]] = {
        "alone": (),
        "refused": refused,
        "polite": [polite for _, polite in admitted],
        "admitted": [hostile for hostile, _ in admitted],
    }

    def count(attack: Attack, status: int) -> None:
        report.answers[f"{attack.name}: {status}"] += 1
        if (attack in refused) != (400 <= status < 500) or status >= 500:
            report.failures[f"{attack.name}: {status}"] += 1

    async with (
        aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        aiohttp.ClientSession(url, timeout=timeout) as stranger,
    ):
        await warm_up(session, NUM_HONEST)
        honest = Honest(session, report)
        await asyncio.gather(*(honest.stream(client) for client in range(NUM_HONEST)))
        for attacks in sent.values():
            await keep_sending(stranger, attacks, count, _after(len(attacks)))
        report.rss_bytes_before = rss_bytes(processes)
        for _ in range(rounds):
            for part, attacks in sent.items():
                honest.part, honest.times = part, []
                await _one_part(honest, stranger, attacks, count, seconds / (2 * rounds))
                report.ms_per_token[part].append(1e3 * statistics.median(honest.times))
        await _settle(report, processes)
    dripping.close()
    return report


async def _one_part(
    honest: Honest, stranger: aiohttp.ClientSession, attacks: Sequence[Attack], count: Any, seconds: float
) -> None:
    is_over = asyncio.Event()
    clients = [asyncio.create_task(honest.stream_until(client, is_over)) for client in range(NUM_HONEST)]
    ends = time.monotonic() + seconds
    while attacks and time.monotonic() < ends:  # each as often as the others
        await keep_sending(stranger, attacks, count, _after(len(attacks)))
    await asyncio.sleep(max(ends - time.monotonic(), 0))
    is_over.set()
    await asyncio.gather(*clients)


def _after(number: int) -> Any:
    left = iter(range(number))
    return lambda: next(left, None) is None


async def _settle(report: HostileReport, processes: dict[str, int]) -> None:
    """Wait until the memory is back, at most for a minute."""
    ends = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        report.rss_bytes_after = rss_bytes(processes)
        if max(report.rss_growth.values()) < _SETTLED - 1 or time.monotonic() > ends:
            return
        await asyncio.sleep(0.5)


def measure(seconds: float) -> HostileReport:
    """Serve, load and report."""
    with long_context_model() as model, server(model) as (url, pid):
        return asyncio.run(run_load(url, engine_processes(pid), seconds))


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for which the hostile client sends")
    args = parser.parse_args(argv)
    report = measure(args.seconds)
    figures = {
        "ms_per_token": report.ms_per_token,
        "refused over alone": report.ratio("refused", "alone"),
        "admitted over polite": report.ratio("admitted", "polite"),
        "streams": report.num_streams,
        "failures": dict(report.failures),
        "answers": dict(report.answers),
        "rss_bytes_before": report.rss_bytes_before,
        "rss_growth": report.rss_growth,
    }
    print(json.dumps(figures, indent=2))
    print_report("hostile_load", vars(args), figures)


if __name__ == "__main__":
    main()
