"""Requests at random moments through `AsyncLLM`, as a user's first program does it: nothing but the public API.

    python benchmarks/user_program.py --model qwen3-8b --rate 40 --seconds 12 --runs 3

Shares no code with `mixed_traffic.py` but the shape of the model, and changes no setting but the number of stages and
the length of requests. Like most programs it has imported torch, and it keeps the requests' last outputs. Prints the
time to the first token (TTFT) and of whole requests (E2E), ms, and the garbage collector's full collections.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch  # noqa: F401, as most programs do
from made_tokenizer import with_made_tokenizer
from workload import model_settings

from raypp import AsyncLLM, RequestOutput, SamplingParams


async def request(llm: AsyncLLM, due: float, rng: random.Random, vocab_size: int) -> tuple[float, float, RequestOutput]:
    """Send one request when it is due; return the times to its first and last token, s, and its last output."""
    prompt = {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(rng.randint(64, 1500))]}
    params = SamplingParams(max_tokens=rng.randint(32, 256), ignore_eos=True, temperature=0.6, top_p=0.95, top_k=20)
    await asyncio.sleep(due - time.perf_counter())
    first = None
    async for output in llm.generate(prompt, params):
        first, last = first or time.perf_counter(), output
    return first - due, time.perf_counter() - due, last


async def run(llm: AsyncLLM, rate: float, seconds: float, seed: int, vocab_size: int) -> dict[str, float]:
    """Return the figures of one run, ms."""
    rng, begun, at, due = random.Random(seed), time.perf_counter() + 0.5, 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        due.append(begun + at)
    times = await asyncio.gather(*(request(llm, each, random.Random(rng.random()), vocab_size) for each in due))
    first, whole = (sorted(1e3 * value for value in column) for column in list(zip(*times, strict=True))[:2])
    return {
        "requests": len(times),
        "ttft_mean": statistics.fmean(first),
        "ttft_p99": first[int(0.99 * (len(first) - 1))],
        "e2e_mean": statistics.fmean(whole),
    }


async def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second, in the mean")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--settings", type=json.loads, default={}, help="of the engine")
    args = parser.parse_args()
    collections = {0: [], 1: [], 2: []}
    begun = [0.0]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun[0] = time.perf_counter()
        else:
            collections[info["generation"]].append(1e3 * (time.perf_counter() - begun[0]))

    settings = model_settings(args.model)
    if "load_format" in settings:  # a shape has no tokenizer
        settings["model"] = str(with_made_tokenizer(Path(settings["model"]), Path(tempfile.mkdtemp())))
    async with await AsyncLLM.create(
        **settings, num_stages=args.num_stages, max_model_len=4096, **args.settings
    ) as llm:
        vocab_size = llm.plan()["vocab_size"]
        await run(llm, args.rate, min(3.0, args.seconds), -1, vocab_size)
        gc.callbacks.append(note)
        for seed in range(args.runs):
            for seen in collections.values():
                seen.clear()
            figures = await run(llm, args.rate, args.seconds, seed, vocab_size)
            full = collections[2]
            print(
                json.dumps({**figures, "full_collections": len(full), "longest_ms": max(full, default=0)}), flush=True
            )


if __name__ == "__main__":
    asyncio.run(main())
