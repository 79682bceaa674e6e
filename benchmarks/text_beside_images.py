"""Whether text notices pictures: the time between tokens of text streams beside requests with many pictures.

    python benchmarks/text_beside_images.py --model qwen3-vl-8b

Some text streams run all the time. Beside them a request comes every second: in the first half with `--pictures`
pictures that nobody has seen, in the second half with text of as many tokens. P99 of the time between two tokens, over
all streams; the start of each stream is left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from pictures import noise, prompt_around
from report import GrowingReport, resolved_config
from workload import exactly, model_settings, random_prompts

from raypp import AsyncLLM
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path

_MOST_WORSE = 1.10
_LEFT_OUT = 8  # first tokens of a stream


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-vl-8b")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each half")
    parser.add_argument("--pictures", type=int, default=20)
    parser.add_argument("--side", type=int, default=336)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--num-stages", type=int, default=1)
    parser.add_argument("--stage-num-gpus", type=float, default=1.0)
    parser.add_argument("--encoder-num-gpus", type=float, default=1.0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2, help="of both halves, in turns")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="write the report there")
    args = parser.parse_args()
    asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> None:
    report = GrowingReport("text_beside_images", vars(args), args.out)
    model = load_model_config(resolve_model_path(model_settings(args.model)["model"]))
    vision = model.vision
    assert vision is not None, "a model that takes pictures"
    settings: dict[str, Any] = {
        **model_settings(args.model),
        "num_stages": args.num_stages,
        "stage_num_gpus": args.stage_num_gpus,
        "encoder_num_gpus": args.encoder_num_gpus,
        "max_model_len": args.max_model_len,
        "max_num_seqs": 64,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "min_prefill_chunk_tokens": min(512, args.max_num_batched_tokens),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    rng, noises = random.Random(0), np.random.default_rng(0)

    def with_pictures() -> Any:
        items = [noise(vision, args.side, args.side, noises) for _ in range(args.pictures)]
        return prompt_around(items, vision, 32, model.vocab_size, rng)

    num_tokens = len(with_pictures().token_ids)
    count = int(args.seconds) + 1
    llm = await asyncio.to_thread(AsyncLLM, **settings)
    try:
        report.note_config(resolved_config(llm))
        found: dict[str, list[float]] = {"pictures": [], "text": []}
        firsts: dict[str, list[float]] = {"pictures": [], "text": []}
        for round_index in range(1 + args.rounds):
            for kind in ("pictures", "text"):
                # All made before: making noise takes the loop's time.
                prompts = (
                    [with_pictures() for _ in range(count)]
                    if kind == "pictures"
                    else random_prompts(count, num_tokens, model.vocab_size, rng)
                )
                seconds = 3.0 if round_index == 0 else args.seconds  # the first round only warms up
                gaps, first = await _one_half(llm, args, prompts, seconds, model.vocab_size, rng)
                if round_index:
                    found[kind] += gaps
                    firsts[kind] += first
                    print(f"round {round_index}, beside {kind}: {_summary(gaps)}", flush=True)
        ratio = float(np.percentile(found["pictures"], 99) / np.percentile(found["text"], 99))
        figures = {
            "tokens_of_each_other_request": num_tokens,
            "itl_ms_beside_pictures": _summary(found["pictures"]),
            "itl_ms_beside_text": _summary(found["text"]),
            "p99_ratio": round(ratio, 4),
            "first_token_ms_of_the_others": {
                kind: round(float(np.median(values)) * 1e3, 1) for kind, values in firsts.items()
            },
            "engine": (await llm.stats())["encoders"],
        }
        report.put("text beside pictures", figures)
        verdict = "ok" if ratio <= _MOST_WORSE else "MISSED"
        print(
            f"P99 beside pictures / beside text: {ratio:.3f}, at most {_MOST_WORSE}: {verdict}\n{figures}", flush=True
        )
    finally:
        await llm.close()
    report.print()


async def _one_half(
    llm: AsyncLLM, args: argparse.Namespace, prompts: list[Any], seconds: float, vocab_size: int, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Return times between tokens of the streams, and times to the first token of the requests beside them."""
    ends, gaps, firsts = time.perf_counter() + seconds, [], []

    async def stream() -> None:
        while time.perf_counter() < ends:
            [prompt] = random_prompts(1, args.input_len, vocab_size, rng)
            times = [time.perf_counter()]
            async for _ in llm.generate(prompt, exactly(2048)):
                times.append(time.perf_counter())
                if times[-1] > ends:
                    break
            gaps.extend(np.diff(times[_LEFT_OUT:]).tolist())

    async def other(prompt: Any) -> None:
        sent = time.perf_counter()
        async for _ in llm.generate(prompt, exactly(1)):
            pass
        firsts.append(time.perf_counter() - sent)

    streams = [asyncio.create_task(stream()) for _ in range(args.streams)]
    others = []
    for prompt in prompts:
        await asyncio.sleep(1.0)
        if time.perf_counter() > ends:
            break
        others.append(asyncio.create_task(other(prompt)))
    await asyncio.gather(*streams, *others)
    return gaps, firsts


def _summary(seconds: list[float]) -> dict[str, float]:
    names = ("p50", "p90", "p99", "p99.9")
    values = np.percentile(np.array(seconds) * 1e3, [50, 90, 99, 99.9]).round(3).tolist()
    return {**dict(zip(names, values, strict=True)), "max": round(max(seconds) * 1e3, 3), "count": len(seconds)}


if __name__ == "__main__":
    main()
