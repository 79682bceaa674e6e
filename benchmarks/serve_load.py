"""What a running server bears: many streaming clients, a share of them leaving in the middle.

    python benchmarks/serve_load.py --clients 200 --seconds 60

deploys the Serve app and loads it; `--url` loads a server that runs already, on this machine. Every client streams one
request after the other. At the end the engine must be empty again, and memory and file descriptors are compared with
those from before and from the load's beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from report import print_report

_PLAIN_DRAWS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_WORDS = ["def", "class", "import", "return", "self", "print", "for", "in", "range", "open", "file", "name", "value"]
_STATE = ("requests_running", "requests_waiting", "steps_in_flight", "kv_usage_ratio")
_BLOCK_SIZE = 16
_SETTLE_TIMEOUT_S = 30.0
_ROLES = {"ServeReplica": "replica", "DriverActor": "driver", "StageActor": "stage"}


@dataclass
class LoadReport:
    """What became of the requests, and of the processes that served them."""

    num_clients: int
    seconds: float
    num_done: int = 0
    """Streams that ended with 200 and [DONE]."""
    num_left: int = 0
    """Streams that the client left."""
    num_refused: int = 0
    """429s."""
    num_tokens: int = 0
    """Chunks with text that clients saw."""
    failures: Counter[str] = field(default_factory=Counter)
    """Everything else: what should not have happened, and how often."""
    rss_bytes_early: dict[str, int] = field(default_factory=dict)
    """Memory per process, when a sixth of the time had passed."""
    rss_bytes_late: dict[str, int] = field(default_factory=dict)
    """And at the end of the load."""
    num_files_before: dict[str, int] = field(default_factory=dict)
    num_files_after: dict[str, int] = field(default_factory=dict)
    """Open file descriptors once all clients are gone."""
    engine_after: dict[str, float] = field(default_factory=dict)
    """Running and waiting requests, steps in flight and the share of KV blocks in use, then."""

    @property
    def num_files_kept(self) -> int:
        """The most descriptors that one process has more than before. What streams leave behind counts by streams."""
        return max(self.num_files_after[name] - before for name, before in self.num_files_before.items())

    @property
    def rss_growth(self) -> dict[str, float]:
        """How much of their early size the processes grew, 0.05 is 5 %."""
        return {name: self.rss_bytes_late[name] / early - 1 for name, early in self.rss_bytes_early.items()}


def engine_processes(ancestor: int | None = None) -> dict[str, int]:
    """Return the replica's, the driver's and the stages' process ids, by the names that Ray gives them.

    Args:
        ancestor: Only of a Ray that this process started; by default of all that run on this machine.
    """
    found: dict[str, int] = {}
    for path in sorted(Path("/proc").glob("[0-9]*/cmdline"), key=lambda p: int(p.parent.name)):
        try:
            title = path.read_bytes().decode(errors="replace")
            if not title.startswith("ray::") or (ancestor is not None and not _descends(path.parent, ancestor)):
                continue
        except OSError:
            continue
        for actor, role in _ROLES.items():
            if actor in title:
                name = role if role not in found else f"{role} {sum(n.startswith(role) for n in found)}"
                found[name] = int(path.parent.name)
    return found


def _descends(process: Path, ancestor: int) -> bool:
    while (pid := int(process.name)) > 1:
        if pid == ancestor:
            return True
        process = process.parent / (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
    return False


async def run_load(
    url: str,
    processes: dict[str, int],
    num_clients: int,
    seconds: float,
    *,
    leave_share: float = 0.25,
    max_tokens: int = 48,
    seed: int = 0,
) -> LoadReport:
    """Load a server for some time, and return what became of it.

    Args:
        url: Of a server on this machine.
        processes: Those that serve, by name.
        num_clients: Streaming at once.
        seconds: How long new requests begin.
        leave_share: Of the clients, which leave every stream at a random token.
        max_tokens: The most tokens of a request; each draws its own number.
        seed: Of all that is drawn.
    """
    report = LoadReport(num_clients, seconds)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(
        url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:
        await warm_up(session, num_clients)
        report.num_files_before = _num_files(processes)
        ends = time.monotonic() + seconds
        watch = asyncio.create_task(_note_early_memory(report, processes, seconds / 6))
        leavers = round(num_clients * leave_share)
        await asyncio.gather(
            *(
                _client(session, report, random.Random(seed * 100_003 + i), i < leavers, max_tokens, ends)
                for i in range(num_clients)
            )
        )
        await watch
        report.rss_bytes_late = rss_bytes(processes)
        await _settle(session, report, processes)
    return report


async def warm_up(session: aiohttp.ClientSession, num_clients: int) -> None:
    """Let the server find its size: what it allocates once is no growth.

    Threads and connections are made when first needed, and on a CPU the KV cache's memory is mapped when first written:
    so every KV block is written once.
    """
    ignored = LoadReport(num_clients, 0.0)
    state = await _engine_state(session, (*_STATE, "kv_blocks"))
    prompt_len = 1000
    for index in range(math.ceil(state["kv_blocks"] * _BLOCK_SIZE / prompt_len) + 1):
        prompt = [index % 4000 + 1] + [1 + (index * 31 + i) % 4000 for i in range(prompt_len - 1)]
        await _stream(session, ignored, {"prompt": prompt, "max_tokens": 1, "stream": True}, None, random.Random(0))
    body: dict[str, object] = {"prompt": "import", "max_tokens": 2, "stream": True}
    for _ in range(2):
        await asyncio.gather(*(_stream(session, ignored, body, None, random.Random(0)) for _ in range(num_clients)))
        await _engine_state(session, _STATE)


async def _client(
    session: aiohttp.ClientSession,
    report: LoadReport,
    rng: random.Random,
    leaves: bool,
    max_tokens: int,
    ends: float,
) -> None:
    while time.monotonic() < ends:
        body = {
            "prompt": " ".join(rng.choices(_WORDS, k=rng.randint(1, 24))),
            "max_tokens": rng.randint(2, max_tokens),
            **_PLAIN_DRAWS,
            "ignore_eos": True,
            "stream": True,
        }
        leave_after = rng.randint(0, max_tokens // 2) if leaves else None
        try:
            await _stream(session, report, body, leave_after, rng)
        except (aiohttp.ClientError, TimeoutError) as error:
            report.failures[type(error).__name__] += 1


async def _stream(
    session: aiohttp.ClientSession,
    report: LoadReport,
    body: dict[str, object],
    leave_after: int | None,
    rng: random.Random,
) -> None:
    async with session.post("/v1/completions", json=body) as response:
        if response.status == 429:
            report.num_refused += 1
            await asyncio.sleep(int(response.headers["Retry-After"]) * rng.uniform(0.5, 1.0))
            return
        if response.status != 200:
            report.failures[f"status {response.status}: {(await response.text())[:80]}"] += 1
            return
        num_seen, is_done = 0, False
        async for line in response.content:
            if line == b"data: [DONE]\n":
                is_done = True
            elif line.startswith(b"data: "):
                if line.startswith(b'data: {"error":'):
                    report.failures[line.decode()[:300]] += 1
                    return
                num_seen += 1
                report.num_tokens += 1
            if leave_after is not None and num_seen > leave_after:
                report.num_left += 1
                response.close()
                return
        if is_done:
            report.num_done += 1
        else:
            report.failures["a stream without [DONE]"] += 1


async def _note_early_memory(report: LoadReport, processes: dict[str, int], after_s: float) -> None:
    await asyncio.sleep(after_s)
    report.rss_bytes_early = rss_bytes(processes)


async def _settle(session: aiohttp.ClientSession, report: LoadReport, processes: dict[str, int]) -> None:
    """Wait until the engine is empty and the connections are closed, and note how it was left."""
    ends = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        report.engine_after = await _engine_state(session, _STATE)
        report.num_files_after = _num_files(processes)
        is_settled = not any(report.engine_after.values()) and report.num_files_kept <= 0
        if is_settled or time.monotonic() > ends:
            return
        await asyncio.sleep(0.1)


async def _engine_state(session: aiohttp.ClientSession, names: Sequence[str]) -> dict[str, float]:
    async with session.get("/metrics") as response:
        text = await response.text()
    found = {name: re.findall(rf"^raypp_{name}\{{.*\}} (\S+)$", text, re.MULTILINE) for name in names}
    return {name: sum(map(float, values)) for name, values in found.items()}


def rss_bytes(processes: dict[str, int]) -> dict[str, int]:
    """Return the memory of processes, by name."""
    return {
        name: int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) << 10
        for name, pid in processes.items()
    }


def _num_files(processes: dict[str, int]) -> dict[str, int]:
    return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in processes.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server; by default one is deployed")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--leave-share", type=float, default=0.25)
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument(
        "--kv-cache-bytes",
        type=int,
        default=64 << 20,
        help="per stage; all of it is written once before the load begins",
    )
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args(argv)

    url = args.url or _deploy(args.num_stages, args.kv_cache_bytes, args.port)
    try:
        processes = engine_processes(None if args.url else os.getpid())
        load = run_load(
            url, processes, args.clients, args.seconds, leave_share=args.leave_share, max_tokens=args.max_tokens
        )
        report = asyncio.run(load)
    finally:
        if args.url is None:
            _shut_down()
    figures = {**dataclasses.asdict(report), "rss_growth": report.rss_growth}
    print(json.dumps(figures, indent=2))
    print_report("serve_load", vars(args), figures)


def _deploy(num_stages: int, kv_cache_bytes: int, port: int) -> str:
    import ray
    from ray import serve

    from serve_app.app import build

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build({"model": "tiny", "num_stages": num_stages, "kv_cache_bytes": kv_cache_bytes}), name="raypp")
    return f"http://127.0.0.1:{port}"


def _shut_down() -> None:
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
