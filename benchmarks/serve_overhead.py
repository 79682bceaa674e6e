"""What the HTTP path costs over `AsyncLLM`: time to the first token, and per token.

    python benchmarks/serve_overhead.py
    RAY_SERVE_ENABLE_HA_PROXY=1 python benchmarks/serve_overhead.py

The engine and the requests are the same; only the way to it differs. First AsyncLLM in this process, then the Serve
app over HTTP with streaming. Medians over all requests, for one stream at a time and for several at once.
"""

from __future__ import annotations

import argparse
import asyncio
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
from raypp.testing import FakeStage
from serve_app.app import build_application
from serve_app.settings import ServeSettings

Stream = Callable[[list[int]], AsyncIterator[None]]
"""Runs one request, and yields at every token that arrives."""


async def measure(stream: Stream, num_streams: int, args: argparse.Namespace) -> dict[str, float]:
    """Return median times in ms over all requests, `num_streams` at a time.

    Chunks may hold several tokens or a part of a character: the time per token is that from the first to the last chunk
    over the number of tokens that were ordered.
    """
    ttft_ms: list[float] = []
    tpot_ms: list[float] = []
    num_prompts = args.requests + num_streams
    prompts = iter([[1 + (7 * i + j) % 4000 for j in range(args.prompt_len)] for i in range(num_prompts)])

    async def run_one(keep: bool) -> None:
        started = time.perf_counter()
        times = [time.perf_counter() async for _ in stream(next(prompts))]
        if keep:
            ttft_ms.append(1e3 * (times[0] - started))
            tpot_ms.append(1e3 * (times[-1] - times[0]) / (args.max_tokens - 1))

    async def run_some(count: int) -> None:
        for _ in range(count):
            await run_one(keep=True)

    await asyncio.gather(*(run_one(keep=False) for _ in range(num_streams)))  # the first ones warm up
    await asyncio.gather(*(run_some(args.requests // num_streams) for _ in range(num_streams)))
    return {
        "ttft_ms": statistics.median(ttft_ms),
        "ttft_p99_ms": statistics.quantiles(ttft_ms, n=100)[98],
        "per_token_ms": statistics.median(tpot_ms),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=48, help="per number of streams")
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--step-ms", type=float, default=5.0, help="per stage; 0 runs the real model `tiny`")
    parser.add_argument("--port", type=int, default=8124)
    args = parser.parse_args()
    params = {"max_tokens": args.max_tokens, "temperature": 0.0, "ignore_eos": True}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        figures = {"direct": asyncio.run(_direct(args, params)), "http": asyncio.run(_over_http(args, params))}
    finally:
        serve.shutdown()
        ray.shutdown()
    for streams in figures["direct"]:
        added = {name: figures["http"][streams][name] - value for name, value in figures["direct"][streams].items()}
        figures.setdefault("added", {})[streams] = added
        print(f"{streams} streams: direct {figures['direct'][streams]}, http {figures['http'][streams]}, added {added}")
    settings = {**vars(args), "haproxy": os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"}
    print_report("serve_overhead", settings, figures)


async def _for_all(args: argparse.Namespace, stream: Stream) -> dict[str, dict[str, float]]:
    return {str(count): await measure(stream, count, args) for count in args.streams}


def _engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    return {"num_stages": args.num_stages, "enable_prefix_caching": False}


async def _direct(args: argparse.Namespace, params: dict[str, Any]) -> dict[str, dict[str, float]]:
    factory = FakeStage(step_ms=args.step_ms) if args.step_ms else None
    async with await AsyncLLM.create("tiny", stage_factory=factory, **_engine_settings(args)) as llm:

        async def stream(prompt: list[int]) -> AsyncIterator[None]:
            async for _ in llm.generate({"prompt_token_ids": prompt}, SamplingParams(**params)):
                yield

        return await _for_all(args, stream)


async def _over_http(args: argparse.Namespace, params: dict[str, Any]) -> dict[str, dict[str, float]]:
    factory = FakeStage(step_ms=args.step_ms) if args.step_ms else None
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    config = EngineConfig.from_flat("tiny", **_engine_settings(args))
    app = build_application(config, ServeSettings(), stage_factory=factory)
    await asyncio.to_thread(serve.run, app, name="raypp")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{args.port}", connector=connector) as session:

        async def stream(prompt: list[int]) -> AsyncIterator[None]:
            body = {"prompt": prompt, "stream": True, **params}
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield

        return await _for_all(args, stream)


if __name__ == "__main__":
    main()
