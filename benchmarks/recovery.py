"""Pauses of streams when a part of their engine is killed, and whether the texts go on as they would have.

    python benchmarks/recovery.py --model qwen3-8b --stage-num-gpus 0.5 --streams 64 --kill 1 0 driver

All streams come at once, with random prompts and EOS ignored. For each entry of `--kill`, a stage's rank or `driver`,
that process gets SIGKILL when all streams have `--before` tokens. Printed: time from the kill to the next token of the
first stream and of the last one, and the parts of the pause as the engine's owner has them.

In 16 bits texts of two runs part sooner or later, since sums depend on what else is in a step. So after each kill the
streams are handed over twice more on purpose, with the tokens that they had: an engine that is restarted without a
fault gets prompts that end with them, in one go, as an engine gets streams after a death. How far texts go on alike, in
the mean over streams: after the kill and in these two runs, and between the two. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from decode_point import engine_settings
from report import print_report, resolved_config
from workload import SAMPLING, random_prompts

from raypp import AsyncLLM, SamplingParams
from raypp.types import TokensPrompt

_DEADLINE_S = 300.0


class Stream:
    """One stream: its tokens, and when each came."""

    def __init__(self, prompt: TokensPrompt, params: SamplingParams) -> None:
        self.prompt = prompt
        self.params = params
        self.token_ids: list[int] = []
        self.came_s: list[float] = []

    async def run(self, llm: AsyncLLM) -> None:
        """Read it to its end."""
        async for output in llm.generate(self.prompt, self.params):
            self.token_ids = output.outputs[0].token_ids
            self.came_s += [time.monotonic()] * (len(self.token_ids) - len(self.came_s))

    def num_tokens_before_gap(self) -> int:
        """Return how many tokens it had when its longest pause began: those that it was handed over with."""
        gaps = [later - sooner for sooner, later in zip(self.came_s, self.came_s[1:], strict=False)]
        return 1 + max(range(len(gaps)), key=gaps.__getitem__)

    def next_after_s(self, moment_s: float, num_tokens: int) -> float:
        """Return how long after a moment the token came that follows so many."""
        return self.came_s[num_tokens] - moment_s


async def run_all(llm: AsyncLLM, streams: Sequence[Stream]) -> None:
    """Run streams to their ends."""
    async with asyncio.timeout(_DEADLINE_S):
        await asyncio.gather(*(stream.run(llm) for stream in streams))


def begun(streams: Sequence[Stream], counts: Sequence[int]) -> list[Stream]:
    """Return streams whose prompts end with the first tokens of others."""
    return [
        Stream(
            {"prompt_token_ids": [*stream.prompt["prompt_token_ids"], *stream.token_ids[:count]]},
            replace(stream.params, max_tokens=(stream.params.max_tokens or 0) - count),
        )
        for stream, count in zip(streams, counts, strict=True)
    ]


async def hand_over(llm: AsyncLLM, streams: Sequence[Stream]) -> None:
    """Run streams that come while the engine restarts on purpose, so that it gets them all at once when it is back."""
    before = (await llm.stats())["recoveries"]["num_carried_over"]
    restart = asyncio.create_task(llm.restart())
    async with asyncio.timeout(_DEADLINE_S):
        while not llm.is_recovering and not restart.done():
            await asyncio.sleep(0.001)
        await run_all(llm, streams)
        await restart
    num_handed_over = (await llm.stats())["recoveries"]["num_carried_over"] - before
    assert num_handed_over == len(streams), f"the engine was back after {num_handed_over} of {len(streams)} streams"


def mean_common(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Return how many tokens texts have in common with others from their beginnings, in the mean."""
    return statistics.mean(
        next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        for one, two in zip(texts, others, strict=True)
    )


async def measure(llm: AsyncLLM, args: argparse.Namespace, victim: str) -> dict[str, Any]:
    """Kill a part under streams; return what came of it."""
    prompts = random_prompts(args.streams, args.input_len, llm.plan()["vocab_size"], random.Random(-1))
    params = SamplingParams(max_tokens=args.output_len, ignore_eos=True, seed=0, **SAMPLING[args.sampling])
    streams = [Stream(prompt, params) for prompt in prompts]
    running = asyncio.create_task(run_all(llm, streams))
    while min(len(stream.token_ids) for stream in streams) < args.before and not running.done():
        await asyncio.sleep(0.005)
    processes = llm.processes()
    os.kill(processes["driver"] if victim == "driver" else processes["stages"][int(victim)], signal.SIGKILL)
    killed_s = time.monotonic()
    await running
    counts = [stream.num_tokens_before_gap() for stream in streams]
    pauses = [stream.next_after_s(killed_s, count) for stream, count in zip(streams, counts, strict=True)]
    last = (await llm.stats())["recoveries"]["last"]
    first, second = (begun(streams, counts) for _ in range(2))
    for again in (first, second):
        await hand_over(llm, again)
    texts = [stream.token_ids[count:] for stream, count in zip(streams, counts, strict=True)]
    one, two = ([stream.token_ids for stream in again] for again in (first, second))
    after_kill = (mean_common(texts, one) + mean_common(texts, two)) / 2
    between = mean_common(one, two)
    print(
        f"{victim} killed: next token after {min(pauses):.2f} to {max(pauses):.2f} s; {last}; in common after it "
        f"{after_kill:.1f} tokens, {between:.1f} between two that were handed over on purpose: "
        f"{after_kill / max(between, 1e-9):.3f}x",
        flush=True,
    )
    return {
        "first_token_after_s": min(pauses),
        "last_token_after_s": max(pauses),
        "recovery": last,
        "common_after_kill": after_kill,
        "common_between_runs": between,
        "common_ratio": after_kill / max(between, 1e-9),
    }


async def run(args: argparse.Namespace) -> None:
    """Open the engine, kill, print."""
    args.requests = [args.streams]
    settings = {**engine_settings(args.model, args), "max_engine_restarts": len(args.kill), **args.settings}
    began = time.monotonic()
    llm = await AsyncLLM.create(**settings)
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    config = resolved_config(llm)
    figures = {f"{number}: {victim}": await measure(llm, args, victim) for number, victim in enumerate(args.kill, 1)}
    await llm.close()
    print_report("recovery", vars(args), figures, config)


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a folder of benchmarks/models, or what LLM takes")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--stage-num-gpus", type=float, default=1.0, help="0.5: two stages on one GPU")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--before", type=int, default=32, help="tokens that all streams have before the kill")
    parser.add_argument("--kill", nargs="+", default=["1", "driver"], help="stages by index, or driver")
    parser.add_argument("--sampling", default="greedy", choices=list(SAMPLING))
    parser.add_argument("--settings", type=json.loads, default={}, help='others, e.g. {"mode": "none"}')
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    args = parser.parse_args()
    num_processes = args.num_stages * args.settings.get("tensor_parallel_size", 1)
    allowed = ["driver", *(str(index) for index in range(num_processes))]
    for victim in args.kill:
        if victim not in allowed:
            parser.error(f"--kill {victim}: there is no such part; allowed are {', '.join(allowed)}")
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
