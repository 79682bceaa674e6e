"""Streams of a server whose stages are killed: none breaks, none says anything twice, all have their texts."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from batch_jobs import actors_below, wait_for
from exactness import TIE_GAP
from hf_models import hf_logits
from sampling_reference import Case, reference_scores

from raypp import LLM, SamplingParams
from raypp.api.tokenizer import Tokenizer
from raypp.models.registry import resolve_model_path
from raypp.testing import launch_in_threads

pytestmark = pytest.mark.part("chaos")

NUM_STREAMS, NUM_KILLS, KILL_EVERY_S = 50, 6, 20.0
NUM_TOKENS = 300
WAIT_S = 150.0


@contextmanager
def server(*options: str) -> Iterator[tuple[str, int]]:
    """Have `raypp serve tiny --num-stages 3` run; yields its address and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "raypp", "serve", "tiny", "--num-stages", "3", "--port", str(port), *options]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        said: list[str] = []
        assert process.stderr is not None
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: said.extend(process.stderr or ()))
            try:
                wait_for(lambda: process.poll() is not None or _status(f"{url}/ready") == 200, "a server")
                assert process.poll() is None, "".join(said)
                yield url, process.pid
            finally:
                print("".join(line for line in said if "engine" in line))
                process.terminate()
                try:
                    process.wait(60.0)
                finally:
                    process.kill()


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=10.0).status_code
    except httpx.TransportError:
        return 0


class Streams:
    """Clients that read one stream after the other, and hold each against what it has to be."""

    def __init__(self, url: str, right: list[tuple[str, list[int]]]) -> None:
        self.num_streams = self.num_tied = 0
        self.longest_silence_s = 0.0
        self._right = right
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)

    async def read(self, index: int, until: asyncio.Event) -> None:
        """Read until told to stop, to the end of a stream."""
        while not until.is_set():
            stream = await self._client.completions.create(
                model="tiny",
                prompt=prompt_of(index),
                max_tokens=NUM_TOKENS,
                temperature=params_of(index).temperature,
                seed=index,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            text, usage, reasons, ids, last_s = "", None, list[str](), set[str](), time.monotonic()
            async for chunk in stream:
                now_s = time.monotonic()
                self.longest_silence_s, last_s = max(self.longest_silence_s, now_s - last_s), now_s
                ids.add(chunk.id)
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.text
                    reasons += [choice.finish_reason] if choice.finish_reason else []
            assert reasons == ["length"], f"stream {index} ended with {reasons}"
            assert len(ids) == 1
            assert usage is not None
            assert usage.completion_tokens == NUM_TOKENS
            self._compare(index, text)
            self.num_streams += 1

    def _compare(self, index: int, text: str) -> None:
        """Two texts are equal, or part at a near-tie of the reference."""
        right, token_ids = self._right[index]
        if text == right:
            return
        params, tokenizer = params_of(index), Tokenizer(resolve_model_path("tiny"))
        prompt = tokenizer.encode([prompt_of(index)])[0].tolist()
        gaps = []
        for place in range(len(token_ids)):  # the first one whose text is another one
            if not text.startswith(tokenizer.decode(token_ids[: place + 1]).rstrip("\ufffd")):
                known = prompt + token_ids[:place]
                scores = reference_scores(hf_logits(resolve_model_path("tiny"), known)[-1], known, Case(prompt, params))
                best = scores.topk(2).values
                gaps.append(float(best[0] - best[1]))
                break
        assert gaps, f"stream {index}: {text!r} instead of {right!r}"
        assert gaps[0] < TIE_GAP, f"stream {index}: {text!r} instead of {right!r}, by a gap of {gaps[0]:.2e}"
        self.num_tied += 1


def prompt_of(index: int) -> str:
    return f"def f{index}(self, name):\n"


def params_of(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7 * (index % 2), seed=index, ignore_eos=True)


def test_streams_of_a_server_whose_stages_are_killed(note: Callable[[str], None]) -> None:
    with LLM("tiny", launch=launch_in_threads, max_num_seqs=64) as llm:
        outputs = llm.generate([prompt_of(i) for i in range(NUM_STREAMS)], [params_of(i) for i in range(NUM_STREAMS)])
    right = [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]
    rng = random.Random(0)
    seen: dict[str, set[Any]] = {"/health": set(), "/ready": set()}

    async def body(url: str, pid: int) -> Streams:
        streams, over = Streams(url, right), asyncio.Event()

        async def look() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
                while not over.is_set():
                    for path in seen:
                        answer = await client.get(path)
                        said = answer.json()
                        seen[path].add((answer.status_code, said.get("status") or said["error"]["code"]))
                    await asyncio.sleep(0.2)

        async def kill() -> None:
            for number in range(NUM_KILLS):
                await asyncio.sleep(KILL_EVERY_S)
                stage = rng.randrange(3)
                [victim] = await asyncio.to_thread(actors_below, pid, f"StageActor{stage}")
                os.kill(victim, signal.SIGKILL)
                print(f"kill {number + 1}: stage {stage}, {streams.num_streams} streams have ended")
            await asyncio.sleep(KILL_EVERY_S / 2)
            over.set()

        await asyncio.gather(look(), kill(), *(streams.read(index, over) for index in range(NUM_STREAMS)))
        return streams

    with server("--max-engine-restarts", "30", "--max-num-seqs", "64") as (url, pid):
        streams = asyncio.run(asyncio.wait_for(body(url, pid), KILL_EVERY_S * NUM_KILLS + WAIT_S))
        text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
        [restarts] = re.findall(r"^raypp_engine_restarts_total\{.*\} (\S+)$", text, re.MULTILINE)
    note(
        f"{NUM_STREAMS} clients of a server, a stage killed every {KILL_EVERY_S:.0f} s: {streams.num_streams} streams, "
        f"all whole, {streams.num_tied} near-ties; {float(restarts):.0f} restarts, longest silence "
        f"{streams.longest_silence_s:.1f} s"
    )
    assert float(restarts) == NUM_KILLS
    assert seen["/health"] == {(200, "ok"), (200, "recovering")}
    assert seen["/ready"] == {(200, "ready"), (503, "recovering")}
    assert streams.num_tied <= max(1, streams.num_streams * NUM_TOKENS // 1000)
