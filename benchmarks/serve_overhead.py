"""What the HTTP path costs over `AsyncLLM`: time to the first token, and per token.

    python benchmarks/serve_overhead.py
    RAY_SERVE_ENABLE_HA_PROXY=1 python benchmarks/serve_overhead.py

Two engines of the same kind run side by side: one behind AsyncLLM in this process, one behind the Serve app. The same
requests go to one and to the other in turn, so that a machine that gets slower gets slower for both. Medians over all
requests, for one stream at a time and for several at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import ray
from ray import serve
from report import print_report

from raypp import AsyncLLM, EngineConfig, SamplingParams
from raypp.config.http_settings import HttpSettings
from raypp.testing import FakeStage
from serve_app.app import build_application

Stream = Callable[[list[int]], AsyncIterator[None]]
"""Runs one request, and yields at every token that arrives."""


class Way:
    """One way to an engine, and the times that were measured on it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.ttft_ms: list[float] = []
        self.per_token_ms: list[float] = []

    async def run(self, prompts: list[list[int]], num_tokens: int, *, keep: bool = True) -> None:
        """Run a request per prompt, all at once.

        Chunks may hold several tokens, or none while a character is incomplete: the time per token is that from the
        first to the last chunk over the number of tokens that were ordered.
        """
        await asyncio.gather(*(self._run_one(prompt, num_tokens, keep) for prompt in prompts))

    def figures(self) -> dict[str, float]:
        """Return the medians, and the 90th percentile of the time to the first token, in ms."""
        return {
            "ttft_ms": statistics.median(self.ttft_ms),
            "ttft_p90_ms": statistics.quantiles(self.ttft_ms, n=10)[8],
            "per_token_ms": statistics.median(self.per_token_ms),
        }

    async def _run_one(self, prompt: list[int], num_tokens: int, keep: bool) -> None:
        started = time.perf_counter()
        times = [time.perf_counter() async for _ in self._stream(prompt)]
        if keep:
            self.ttft_ms.append(1e3 * (times[0] - started))
            self.per_token_ms.append(1e3 * (times[-1] - times[0]) / (num_tokens - 1))


async def compare(args: argparse.Namespace, direct: Stream, http: Stream, num_streams: int) -> dict[str, Any]:
    """Return the figures of both ways, and what the second adds."""
    ways = [Way(direct), Way(http)]
    prompts = itertools.count()
    for round_index in range(-1, args.requests // num_streams):  # the first round warms up
        of_round = [[1 + (7 * next(prompts) + j) % 4000 for j in range(args.prompt_len)] for _ in range(num_streams)]
        for way in ways if round_index % 2 else reversed(ways):
            await way.run(of_round, args.max_tokens, keep=round_index >= 0)
    of_direct, of_http = (way.figures() for way in ways)
    added = {name: of_http[name] - value for name, value in of_direct.items()}
    return {"direct": of_direct, "http": of_http, "added": added}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=64, help="on each way, per number of streams")
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--step-ms", type=float, default=5.0, help="per stage; 0 runs the real model `tiny`")
    parser.add_argument("--port", type=int, default=8124)
    args = parser.parse_args()
    factory = FakeStage(step_ms=args.step_ms) if args.step_ms else None
    config = EngineConfig.from_flat("tiny", num_stages=args.num_stages, enable_prefix_caching=False)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": args.port})
        serve.run(build_application(config, HttpSettings(), stage_factory=factory), name="raypp")
        figures = asyncio.run(_measure(args, config, factory))
    finally:
        serve.shutdown()
        ray.shutdown()
    for num_streams, of_streams in figures.items():
        for name, values in of_streams.items():
            print(f"{num_streams:>3} streams, {name:>6}:", *(f"{key} {value:7.2f}" for key, value in values.items()))
    settings = {**vars(args), "haproxy": os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"}
    print_report("serve_overhead", settings, figures)


async def _measure(args: argparse.Namespace, config: EngineConfig, factory: FakeStage | None) -> dict[str, Any]:
    params = {"max_tokens": args.max_tokens, "temperature": 0.0, "ignore_eos": True}
    url = f"http://127.0.0.1:{args.port}"
    async with (
        await AsyncLLM.create(config, stage_factory=factory) as llm,
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def direct(prompt: list[int]) -> AsyncIterator[None]:
            async for _ in llm.generate({"prompt_token_ids": prompt}, SamplingParams(**params)):
                yield

        async def http(prompt: list[int]) -> AsyncIterator[None]:
            body = {"prompt": prompt, "stream": True, **params}
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield

        return {str(count): await compare(args, direct, http, count) for count in args.streams}


if __name__ == "__main__":
    main()
