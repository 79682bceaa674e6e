"""A whole engine in threads dies under requests of all kinds: whoever asked sees a pause and nothing else.

TEST_RECOVERIES is how often the engine dies; with it, what takes some seconds runs, too. RECOVERY_SEED is when it dies.
Grammars, whose process takes seconds to start, are in tests/parity/test_handed_over.py and in soak.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from raypp.api.async_llm import AsyncLLM
from raypp.api.engine_connection import EngineConnection
from raypp.client_messages import AddRequests, ClientMessage
from raypp.driver.engine_loop import ChannelPipeline, Engine
from raypp.errors import EngineDeadError, FatalRequestError, StageDiedError
from raypp.messages import StepPlan, StepResult
from raypp.models.config import ModelConfig
from raypp.request import RequestUpdate
from raypp.scheduler.scheduler import Scheduler
from raypp.stage.stage_spec import StageSpec
from raypp.testing import FakeStage, launch_in_threads
from raypp.testing.fake_stage import FakeModel
from raypp.testing.threaded_engine import ThreadedEngine
from raypp.types import RequestOutput, SamplingParams

ENGINE: dict[str, Any] = {
    "num_stages": 2,
    "kv_cache_bytes": 1 << 23,
    "max_model_len": 256,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 32,
    "min_prefill_chunk_tokens": 8,
    "stage_num_threads": 1,
    "max_engine_restarts": 100,
    "heartbeat_s": 0.05,
}
NGRAM = {"method": "ngram", "min_n": 1, "num_speculative_tokens": 3}
CODE = "def main("
POISON = 500
"""A token."""
KINDS: dict[str, tuple[str, SamplingParams]] = {
    "greedy": (CODE, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)),
    "seeded": (CODE, SamplingParams(max_tokens=24, temperature=0.9, seed=1, ignore_eos=True)),
    "many": (CODE, SamplingParams(max_tokens=30, n=3, seed=2)),
    "penalties": (CODE, SamplingParams(max_tokens=24, seed=3, frequency_penalty=1.0, min_tokens=10)),
    "stop": ("import os\n", SamplingParams(max_tokens=60, temperature=0.0, stop=["self", "return", "import"])),
    "logprobs": (CODE, SamplingParams(max_tokens=30, temperature=0.0, logprobs=2, ignore_eos=True)),
    "prompt": (CODE * 30, SamplingParams(max_tokens=10, seed=4, prompt_logprobs=1, logprobs=0, ignore_eos=True)),
}


@asynccontextmanager
async def open_llm(**settings: Any) -> AsyncIterator[AsyncLLM]:
    async with await AsyncLLM.create("tiny", launch=launch_in_threads, **ENGINE, **settings) as llm:
        yield llm


async def read(llm: AsyncLLM, kind: str) -> list[RequestOutput]:
    prompt, params = KINDS[kind]
    return [output async for output in llm.generate(prompt, params, kind)]


async def answers_of(llm: AsyncLLM, kill_after_s: Sequence[float] = ()) -> dict[str, list[RequestOutput]]:
    engine = llm._engine.handle
    assert isinstance(engine, ThreadedEngine)
    tasks = {kind: asyncio.create_task(read(llm, kind)) for kind in KINDS}
    for index, seconds in enumerate(kill_after_s):
        await asyncio.sleep(seconds)
        engine.kill_stage(index % 2)
        while not llm.is_recovering:
            await asyncio.sleep(0.001)
        while llm.is_recovering:
            await asyncio.sleep(0.001)
    return {kind: await task for kind, task in tasks.items()}


def check_logprobs(got: RequestOutput, expected: RequestOutput) -> None:
    for mine, right in zip(got.outputs, expected.outputs, strict=True):
        if right.logprobs is not None:
            assert mine.logprobs is not None
            assert len(mine.logprobs) == len(mine.token_ids)
            assert mine.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-3)
            for of_mine, of_right in zip(mine.logprobs, right.logprobs, strict=True):
                for token_id, logprob in of_right.items():
                    assert of_mine[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-4)
    if expected.prompt_logprobs is not None:
        assert got.prompt_logprobs is not None
        assert len(got.prompt_logprobs) == len(got.prompt_token_ids)
        for of_mine, of_right in zip(got.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert of_mine is not None
            assert of_right is not None
            assert of_mine.keys() == of_right.keys()


def test_requests_of_all_kinds_do_not_notice() -> None:
    rng = random.Random(os.environ.get("RECOVERY_SEED", "0"))
    num_deaths = int(os.environ.get("TEST_RECOVERIES", "2"))

    async def body() -> None:
        async with open_llm(speculative=NGRAM) as llm:
            expected = await answers_of(llm)
            got = await answers_of(llm, [0.02, *(rng.choice((0.02, 0.1, 0.3)) for _ in range(1, num_deaths))])
            stats = await llm.stats()
        assert stats["recoveries"]["count"] == num_deaths
        assert stats["recoveries"]["num_carried_over"] >= 1
        for kind, outputs in got.items():
            last, right = outputs[-1], expected[kind][-1]
            assert [c.token_ids for c in last.outputs] == [c.token_ids for c in right.outputs], kind
            assert [(c.text, c.finish_reason, c.stop_reason) for c in last.outputs] == [
                (c.text, c.finish_reason, c.stop_reason) for c in right.outputs
            ]
            check_logprobs(last, right)
            for before, after in pairwise(outputs):
                for old, new in zip(before.outputs, after.outputs, strict=True):
                    assert new.token_ids[: len(old.token_ids)] == old.token_ids
                    assert new.text.startswith(old.text)

    asyncio.run(asyncio.wait_for(body(), 60 + 5 * num_deaths))


class HeldStage(FakeStage):
    """A stage factory that waits until it may go on."""

    def __init__(self) -> None:
        super().__init__(step_ms=0)
        self.may_start = threading.Event()
        self.may_start.set()

    def __call__(self, spec: StageSpec, config: ModelConfig) -> FakeModel:
        assert self.may_start.wait(30)
        return super().__call__(spec, config)


def test_the_same_requests_are_computed_in_the_same_steps_whenever_they_are_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_requests, params = 40, SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    lives: dict[Scheduler, list[tuple[int, list[int], list[int]]]] = {}
    num_known: list[int] = []
    schedule = Scheduler.schedule

    def recorded(scheduler: Scheduler) -> StepPlan | None:
        plan = schedule(scheduler)
        if plan is not None:
            if scheduler not in lives:
                stats = scheduler.stats()
                num_known.append(stats.num_running + stats.num_waiting)
            lives.setdefault(scheduler, []).append(
                (plan.cohort, plan.rows.tolist(), plan.num_scheduled_tokens.tolist())
            )
        return plan

    async def one(llm: AsyncLLM, index: int) -> None:
        await llm.complete([{"prompt_token_ids": [1] * (20 + 7 * index % 30)}], params)

    async def hand_over(llm: AsyncLLM, may_start: threading.Event) -> None:
        may_start.clear()
        restart = asyncio.create_task(llm.restart())
        while not llm.is_recovering:
            await asyncio.sleep(0.001)
        tasks = [asyncio.create_task(one(llm, index)) for index in range(num_requests)]
        while (await llm.stats())["num_waiting"] < num_requests:
            await asyncio.sleep(0.001)
        may_start.set()
        await asyncio.gather(restart, *tasks)

    async def body() -> None:
        settings = ENGINE | {"max_num_seqs": 64, "kv_cache_bytes": 1 << 26, "skip_tokenizer_init": True}
        factory = HeldStage()
        async with await AsyncLLM.create("tiny", launch=launch_in_threads, stage_factory=factory, **settings) as llm:
            assert (await llm.stats())["recoveries"]["count"] == 0  # it is connected now, and hears of restarts
            for _ in range(2):
                await hand_over(llm, factory.may_start)
            assert (await llm.stats())["recoveries"]["num_carried_over"] == 2 * num_requests

    monkeypatch.setattr(Scheduler, "schedule", recorded)
    asyncio.run(asyncio.wait_for(body(), 60))
    assert num_known == [num_requests] * 2, "the first step knew of some only"
    first, second = lives.values()
    num_steps = 1 + max(index for index, (_, _, num_tokens) in enumerate(first) if max(num_tokens) > 1)
    assert num_steps > 4, "more than are in flight at a time"
    assert first[:num_steps] == second[:num_steps], "until then none ends"


def test_requests_that_end_in_the_moment_of_a_death_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage dies while it is handed a plan, in a turn whose results have ended requests."""
    step, submit, update = Engine.step, ChannelPipeline.submit, Scheduler.update
    ended: list[str] = []  # in this turn
    died_with: list[str] = []  # those that had ended in the turn of the death

    def noted_step(engine: Engine) -> object:
        ended.clear()
        return step(engine)

    def noted_update(scheduler: Scheduler, result: StepResult) -> list[RequestUpdate]:
        updates = update(scheduler, result)
        ended.extend(u.request.request_id for u in updates if u.request.finish_reason)
        return updates

    def dying_submit(pipeline: ChannelPipeline, plan: StepPlan) -> None:
        if ended and not died_with:
            died_with.extend(ended)
            raise StageDiedError("stage 0 died", stage_index=0)
        submit(pipeline, plan)

    async def body() -> None:
        settings = ENGINE | {"max_num_seqs": 64, "skip_tokenizer_init": True}
        factory = FakeStage(step_ms=0)
        async with await AsyncLLM.create("tiny", launch=launch_in_threads, stage_factory=factory, **settings) as llm:
            params = [SamplingParams(max_tokens=8 + index % 24, ignore_eos=True) for index in range(32)]
            outputs = await llm.complete([{"prompt_token_ids": [1 + index]} for index in range(32)], params)
            stats = await llm.stats()
        assert died_with
        for output, of_output in zip(outputs, params, strict=True):
            [completion] = output.outputs
            assert (len(completion.token_ids), completion.finish_reason) == (of_output.max_tokens, "length")
        assert stats["recoveries"]["num_carried_over"] <= 32 - len(died_with), "what had ended was computed again"

    monkeypatch.setattr(Engine, "step", noted_step)
    monkeypatch.setattr(Scheduler, "update", noted_update)
    monkeypatch.setattr(ChannelPipeline, "submit", dying_submit)
    asyncio.run(asyncio.wait_for(body(), 60))


def test_as_many_requests_as_the_new_engine_has_rows_are_handed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    send, num_requests = EngineConnection.send, list[int]()

    def noted(connection: EngineConnection, message: ClientMessage) -> None:
        if isinstance(message, AddRequests):
            num_requests.append(len(list(message.requests)))
        send(connection, message)

    async def body() -> None:
        settings = ENGINE | {"skip_tokenizer_init": True, "max_num_batched_tokens": 128}
        factory = FakeStage(step_ms=1)
        async with await AsyncLLM.create("tiny", launch=launch_in_threads, stage_factory=factory, **settings) as llm:
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            prompts = [{"prompt_token_ids": [1 + index]} for index in range(50)]
            task = asyncio.create_task(llm.complete(prompts, params))
            while sum(num_requests) < 50:
                await asyncio.sleep(0.001)
            num_requests.clear()
            await llm.restart(max_num_seqs=40)
            assert llm.config.scheduler.max_num_seqs == 40
            await task

    monkeypatch.setattr(EngineConnection, "send", noted)
    asyncio.run(asyncio.wait_for(body(), 60))
    assert num_requests[0] == 40


class PoisonedStage(FakeStage):
    """A stage factory whose models fail when they see a token."""

    def __call__(self, spec: StageSpec, config: ModelConfig) -> FakeModel:
        model = super().__call__(spec, config)
        embed = model.embed

        def embed_or_fail(input_ids: torch.Tensor) -> torch.Tensor:
            if bool((input_ids == POISON).any()):
                raise EngineDeadError("a token that this stage cannot take")
            return embed(input_ids)

        model.embed = embed_or_fail  # type: ignore[method-assign]
        return model


@pytest.mark.skipif("TEST_RECOVERIES" not in os.environ, reason="takes some seconds; set TEST_RECOVERIES")
def test_a_request_that_ends_a_stage_whenever_it_runs_fails_alone() -> None:
    position = 9

    async def one(llm: AsyncLLM, index: int) -> RequestOutput:
        prompt = [POISON] if index == position else [1 + index]
        [output] = await llm.complete([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=30, ignore_eos=True))
        return output

    async def body() -> None:
        settings = ENGINE | {"max_engine_restarts": 3, "max_num_seqs": 8, "skip_tokenizer_init": True}
        factory = PoisonedStage(step_ms=0)
        async with await AsyncLLM.create("tiny", launch=launch_in_threads, stage_factory=factory, **settings) as llm:
            answers = await asyncio.gather(*(one(llm, index) for index in range(32)), return_exceptions=True)
            [after] = await llm.complete([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=3))
            stats = await llm.stats()
        assert isinstance(answers.pop(position), FatalRequestError)
        assert all(isinstance(answer, RequestOutput) and len(answer.outputs[0].token_ids) == 30 for answer in answers)
        assert len(after.outputs[0].token_ids) == 3
        assert stats["recoveries"]["count"] <= 4

    asyncio.run(asyncio.wait_for(body(), 60))
