"""Latency under load: requests that arrive at random moments, at given rates, through the engine or its HTTP app.

    python benchmarks/online_latency.py --model tiny --rates 2 8 inf
    python benchmarks/online_latency.py --url http://localhost:8000 --rates 2 8 --vocab-size 4000

Arrivals are a Poisson process with the same moments and prompts in every run of a rate. Prompts are random token ids of
exactly `--input-len`, which no prefix cache has seen; outputs have exactly `--output-len` tokens, EOS ignored, greedy.
Times count from the moment at which a request was due, also if it was sent late (`late`): time to the first token
(TTFT), time per output token after it (TPOT), times between pieces of output (ITL), and to the last token (E2E). The
last line is JSON, or with `--out` that file, which is written after every rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from arrivals import Stream, check_num_tokens, run_arrivals, summarize
from report import GrowingReport, resolved_config
from workload import exactly, model_settings, random_prompts

from raypp import AsyncLLM
from raypp.types import TokensPrompt

_WARM_UP_REQUESTS = 16


def engine_stream(llm: AsyncLLM) -> Stream:
    """Return the way to an engine."""

    async def stream(prompt: list[int], num_tokens: int) -> AsyncIterator[None]:
        count = 0
        async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), exactly(num_tokens)):
            count = len(output.outputs[0].token_ids)
            yield
        check_num_tokens(count, num_tokens)

    return stream


def http_stream(session: aiohttp.ClientSession) -> Stream:
    """Return the way to a server. Its pieces do not tell their tokens; the usage at the end does."""

    async def stream(prompt: list[int], num_tokens: int) -> AsyncIterator[None]:
        body = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "repetition_penalty": 1.0,  # whatever the model's generation_config.json says
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                if chunk["choices"]:
                    yield
                else:
                    check_num_tokens(chunk["usage"]["completion_tokens"], num_tokens)

    return stream


async def measure(args: argparse.Namespace, stream: Stream, vocab_size: int, report: GrowingReport) -> None:
    """Run all rates, print and keep their figures."""

    def prompts(count: int, seed: int) -> list[list[int]]:
        made = random_prompts(count, args.input_len, vocab_size, random.Random(seed))
        return [prompt["prompt_token_ids"] for prompt in made]

    warm_up = prompts(min(_WARM_UP_REQUESTS, args.requests), -1)
    await run_arrivals(stream, warm_up, min(8, args.output_len), float("inf"), random.Random(0))
    for index, rate in enumerate(args.rates):
        begun = time.perf_counter()
        requests = await run_arrivals(
            stream, prompts(args.requests, index), args.output_len, rate, random.Random(index)
        )
        seconds = time.perf_counter() - begun
        figures = {
            "seconds": seconds,
            "requests_per_s": args.requests / seconds,
            "tokens_per_s": args.requests * args.output_len / seconds,
            **summarize(requests),
        }
        report.put(f"{rate:g} requests/s", figures)
        print_rate(rate, figures)


def print_rate(rate: float, figures: dict[str, Any]) -> None:
    """Print one rate's figures."""
    print(f"{rate:g} requests/s asked, {figures['requests_per_s']:.2f} done; {figures['tokens_per_s']:.0f} tok/s")
    for name, values in figures.items():
        if name.endswith("_ms"):
            columns = "".join(f"  {key} {value:9.2f}" for key, value in values.items())
            print(f"  {name.removesuffix('_ms'):>5}, ms:{columns}", flush=True)


async def run(args: argparse.Namespace, report: GrowingReport) -> None:
    """Measure an engine of our own, or a server."""
    if args.url is not None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=args.timeout_s)
        async with aiohttp.ClientSession(args.url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await measure(args, http_stream(session), args.vocab_size, report)
        return
    async with await AsyncLLM.create(
        **model_settings(args.model),
        num_stages=args.num_stages,
        skip_tokenizer_init=True,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.input_len + args.output_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        speculative=args.speculative,
    ) as llm:
        report.note_config(resolved_config(llm))
        await measure(args, engine_stream(llm), llm.plan()["vocab_size"], report)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a folder of benchmarks/models, or what LLM takes")
    parser.add_argument("--url", help="of a running server; by default an engine is started, and used directly")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 4, 16], help="requests per second; inf: at once")
    parser.add_argument("--requests", type=int, default=64, help="per rate")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--speculative", type=json.loads, help='settings, e.g. {"method": "ngram"}')
    parser.add_argument("--vocab-size", type=int, default=1000, help="prompts for --url have ids below it")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="the longest silence of a server")
    parser.add_argument("--out", type=Path, help="a JSON file, written after every rate")
    args = parser.parse_args()
    report = GrowingReport("online_latency", vars(args), args.out)
    asyncio.run(run(args, report))
    report.print()


if __name__ == "__main__":
    main()
