"""Requests of all kinds on real actors, of which one or two at a time are killed or stopped at random moments.

RECOVERY_KILLS says how many times in each case (20), RECOVERY_SEED when and whom.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import PIL.Image
import pytest

from raypp.api.async_llm import AsyncLLM
from raypp.types import Prompt, RequestOutput, SamplingParams

NUM_KILLS = int(os.environ.get("RECOVERY_KILLS", "20"))
SEED = os.environ.get("RECOVERY_SEED", "kill -9")
STOPPED_SHARE, TWO_SHARE = 0.1, 0.15
STEP_TIMEOUT_S = 3.0
SETTINGS: dict[str, Any] = {
    "num_stages": 3,
    "kv_cache_bytes": 1 << 24,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
    "min_prefill_chunk_tokens": 16,
    "stage_num_threads": 1,
    "max_engine_restarts": 1000,
    "step_timeout_s": STEP_TIMEOUT_S,
    "heartbeat_s": 0.2,
}
NGRAM = {"method": "ngram", "min_n": 1, "num_speculative_tokens": 3}
HEAD = {"method": "auto", "model": "tiny-eagle3", "num_speculative_tokens": 3}
CODE = "def main("
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"]}

Requests = dict[str, tuple[Prompt, SamplingParams]]


def texts() -> Requests:
    free = {"ignore_eos": True}
    kinds: Requests = {
        "greedy": (CODE, SamplingParams(max_tokens=200, temperature=0.0, **free)),
        "seeded": (CODE, SamplingParams(max_tokens=200, temperature=0.9, seed=1, **free)),
        "many": (CODE, SamplingParams(max_tokens=150, n=2, seed=2)),
        "penalties": (CODE, SamplingParams(max_tokens=200, seed=3, frequency_penalty=1.0, min_tokens=60)),
        "stop": ("import os\n", SamplingParams(max_tokens=200, temperature=0.0, stop=["self", "return", "import"])),
        "logprobs": (CODE, SamplingParams(max_tokens=150, temperature=0.0, logprobs=2, **free)),
        "prompt": (CODE * 30, SamplingParams(max_tokens=60, seed=4, prompt_logprobs=1, logprobs=0, **free)),
        "json": (CODE, SamplingParams(max_tokens=60, seed=5, structured_outputs={"json_schema": SCHEMA})),
    }
    return {f"{kind} {i}": (f"{prompt}{'x' * i}", params) for i in range(4) for kind, (prompt, params) in kinds.items()}


def pictures() -> Requests:
    """Half of them have a picture."""
    seen: Requests = {}
    for index in range(16):
        image = PIL.Image.new("RGB", (64 + 8 * index, 64), (16 * index, 99, 200))
        params = SamplingParams(max_tokens=120, seed=index, ignore_eos=True)
        message = {"prompt": f"<|vision_start|><|image_pad|><|vision_end|>{index}"}
        seen[f"picture {index}"] = ({**message, "multi_modal_data": {"image": [image]}}, params)  # type: ignore[typeddict-item]
        seen[f"text {index}"] = (f"{CODE}{index}", params)
    return seen


async def read(llm: AsyncLLM, prompt: Prompt, params: SamplingParams) -> tuple[RequestOutput, float]:
    """Return a request's last output, and the longest time without a token."""
    outputs, longest_s, last_s = list[RequestOutput](), 0.0, time.monotonic()
    async for output in llm.generate(prompt, params):
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        outputs.append(output)
    for before, after in pairwise(outputs):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
            assert new.text.startswith(old.text)
    return outputs[-1], longest_s


async def read_all(llm: AsyncLLM, requests: Requests) -> dict[str, tuple[RequestOutput, float]]:
    answers = await asyncio.gather(*(read(llm, *request) for request in requests.values()))
    return dict(zip(requests, answers, strict=True))


async def kill_now_and_then(llm: AsyncLLM, rng: random.Random, num_kills: int) -> int:
    """Kill until it is cancelled, or as often as wanted; return how often."""
    done = 0
    try:
        while done < num_kills:
            await asyncio.sleep(rng.uniform(0.0, 2.5))
            processes = await asyncio.to_thread(llm.processes)
            victims = rng.sample([processes["driver"], *processes["stages"]], 2 if rng.random() < TWO_SHARE else 1)
            number = signal.SIGSTOP if rng.random() < STOPPED_SHARE else signal.SIGKILL
            for pid in victims:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue  # the old engine's
                done += 1
            while rng.random() < 0.9 and llm.is_recovering:
                await asyncio.sleep(0.2)
    except asyncio.CancelledError:
        pass
    return done


def check(got: RequestOutput, right: RequestOutput) -> None:
    for mine, theirs in zip(got.outputs, right.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert (mine.text, mine.finish_reason, mine.stop_reason) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        for of_mine, of_right in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            for token_id, logprob in of_right.items():
                assert of_mine[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-4)
    assert len(got.prompt_logprobs or ()) == len(right.prompt_logprobs or ())


@pytest.mark.parametrize(
    ("model", "speculative", "make"),
    [("tiny", NGRAM, texts), ("tiny", HEAD, texts), ("tiny-vl", None, pictures)],
    ids=["n-grams", "a head", "pictures"],
)
def test_nobody_notices_but_for_the_pause(
    note: Callable[[str], None], model: str, speculative: dict[str, Any] | None, make: Callable[[], Requests]
) -> None:
    rng, requests = random.Random(SEED), make()

    async def body() -> None:
        done, num_rounds, longest = 0, 0, list[float]()
        async with await AsyncLLM.create(model, speculative=speculative, **SETTINGS) as llm:
            expected = await read_all(llm, requests)
            while done < NUM_KILLS:
                num_rounds += 1
                killing = asyncio.create_task(kill_now_and_then(llm, rng, NUM_KILLS - done))
                got = await read_all(llm, requests)
                killing.cancel()
                done += await killing
                for name, (output, longest_s) in got.items():
                    check(output, expected[name][0])
                    longest.append(longest_s)
            told = (await llm.stats())["recoveries"]
        note(
            f"{model}, {done} kills in {num_rounds} rounds of {len(requests)} requests: {told['count']} recoveries, "
            f"{told['paused_s'] / max(told['count'], 1):.1f} s each; the longest wait for a token of each request: "
            f"median {statistics.median(longest):.1f} s, most {max(longest):.1f} s"
        )

    asyncio.run(body())
