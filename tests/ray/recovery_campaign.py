"""Kills and stops parts of engines under requests of all kinds, and compares what comes with the undisturbed texts.

What is killed, and after how many tokens, comes from a seed. The moment of a kill is the machine's. Each wait has a
deadline.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from answer_comparison import Comparison
from handing_over import Answer, Asked
from leftovers import actor_processes, raypp_processes, wait_until_gone
from request_kinds import requests_of_all_kinds, requests_with_pictures

from raypp import AsyncLLM
from raypp.api.launch import EngineHandle, launch_on_ray
from raypp.api.picture_prompts import EncodedPrompt
from raypp.api.running_request import PreparedRequest
from raypp.config.engine_config import EngineConfig
from raypp.errors import RayppError
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.request import Request
from raypp.testing import launch_in_threads
from raypp.types import FinishReason, RequestOutput, SamplingParams

WAIT_S = 60.0  # for what is expected; only a hang takes this long
SILENCE_S = 3.0  # until a process that is stopped counts as frozen
_POLL_S = 0.002
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

DEATHS = (
    "stage 0",
    "stage 1",
    "stage 2",
    "driver",
    "two at once",
    "stage, in prefill",
    "stage, then another",
    "stage stopped",
    "driver stopped",
)


@dataclass(frozen=True)
class Setting:
    """An engine, what it is asked for, and what is done to it."""

    name: str
    model: str
    settings: dict[str, Any]
    asked: tuple[Asked, ...]
    deaths: tuple[str, ...] = DEATHS


@dataclass
class Kill:
    """One death and what followed.

    Attributes:
        pause_s: From the signal to the next token that any client got; None: nothing was running.
        parts: What the pause consists of, seconds. `notice` is measured here, from the signal on.
        num_starts: Of engines, until one ran; 0: the engine went on.
        num_kept: Stages that kept their process and their weights.
        num_carried_over: Requests that another engine went on with.
    """

    what: str
    num_tokens: int
    pause_s: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    num_starts: int = 0
    num_kept: int = 0
    num_carried_over: int = 0

    def __str__(self) -> str:
        words = f"{self.what} after {self.num_tokens} tokens:"
        words += " nothing ran" if self.pause_s is None else f" pause {self.pause_s:.2f} s"
        if not self.num_starts:
            return f"{words}, the engine went on"
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.parts.items())
        its = f"starts: {self.num_starts}, stages kept: {self.num_kept}"
        return f"{words} ({parts}; {its}), {self.num_carried_over} requests went on"


@dataclass
class Report:
    """What a campaign has shown."""

    kills: list[Kill] = field(default_factory=list)
    comparison: Comparison = field(default_factory=Comparison)
    num_requests: int = 0

    def __str__(self) -> str:
        pauses = sorted(k.pause_s for k in self.kills if k.pause_s is not None and k.num_starts)
        parts: dict[str, list[float]] = {}
        for kill in self.kills:
            for name, seconds in kill.parts.items():
                parts.setdefault(name, []).append(seconds)
        said = f"{len(self.kills)} deaths, {self.num_requests} requests, none failed; {self.comparison.num_tokens} "
        said += f"tokens equal, {self.comparison.num_excused} near-ties excused"
        if pauses:
            said += f"; pause: median {statistics.median(pauses):.1f} s, longest {pauses[-1]:.1f} s"
            said += "; medians: " + ", ".join(f"{name} {statistics.median(s):.2f} s" for name, s in parts.items())
        return said


def text_requests() -> tuple[Asked, ...]:
    """Return 32 requests without pictures, of all kinds."""
    kinds = requests_of_all_kinds()
    longer = [replace(one, params=_longer(one.params)) for one in kinds]
    several = [
        replace(one, name=f"{one.name}, {n} continuations", params=replace(one.params, n=n, seed=i))
        for i, (one, n) in enumerate(zip(longer[1:6], (2, 3, 2, 2, 2), strict=True))
    ]
    salted = [replace(one, name=f"{one.name}, alone", cache_salt=one.name) for one in longer[:4]]
    requests = (*longer, *several, *salted)
    assert len(requests) == 32
    return requests


def picture_requests() -> tuple[Asked, ...]:
    """Return requests with pictures, each twice, with another seed."""
    first = requests_with_pictures()
    again = [
        replace(one, name=f"{one.name}, again", params=replace(one.params, seed=i), cache_salt="again")
        for i, one in enumerate(first)
    ]
    return tuple(replace(one, params=_longer(_endless(one.params))) for one in (*first, *again))


def _endless(params: SamplingParams) -> SamplingParams:
    return params if params.structured_outputs else replace(params, ignore_eos=True)


def _longer(params: SamplingParams) -> SamplingParams:
    """Return the same with four times the tokens, so that there is something to interrupt."""
    ends_otherwise = params.structured_outputs or not params.ignore_eos
    return params if ends_otherwise or params.max_tokens == 1 else replace(params, max_tokens=4 * params.max_tokens)


_SMALL = {
    "num_stages": 3,
    "block_size": 4,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 64,
    "min_prefill_chunk_tokens": 8,
    "num_kv_blocks": 1800,
}


def text_engine(name: str, deaths: tuple[str, ...] = DEATHS, **settings: Any) -> Setting:
    """Return the engine of the model without pictures.

    `stage 3` among `deaths` is the fourth process of the stages: of several members, they follow each other.
    """
    return Setting(name, "tiny", _SMALL | settings, text_requests(), deaths)


def picture_engine(name: str, **settings: Any) -> Setting:
    """Return the engine of the model with pictures; its encoder dies, too."""
    return Setting(name, "tiny-vl", _SMALL | settings, picture_requests(), (*DEATHS, "encoder"))


async def run_campaign(
    setting: Setting, num_kills: int, seed: object, *, kills_per_batch: int = 4, say: Callable[[str], None] = print
) -> Report:
    """Ask for all requests again and again, while parts of their engine die; return what was seen.

    Args:
        setting: Of the engine.
        num_kills: How many deaths there are.
        seed: Of what is killed, and when.
        kills_per_batch: Deaths while the same requests run.
        say: Takes a line for each death.

    Raises:
        AssertionError: a request failed, or has another text, log-probability or usage; something hangs or is left.
    """
    rng, report = random.Random(f"{setting.name} {seed}"), Report()
    deaths = [setting.deaths[i % len(setting.deaths)] for i in range(num_kills)]
    rng.shuffle(deaths)
    expected = await _undisturbed(setting)
    before = raypp_processes()
    async with _mortal_engine(setting) as engine:
        for number, start in enumerate(range(0, num_kills, kills_per_batch)):
            batch = _Batch(setting, engine, rng, expected, f"batch {number}")
            for kill in await batch.run(deaths[start : start + kills_per_batch]):
                report.kills.append(kill)
                say(f"{len(report.kills)} [{setting.name}] {kill}")
            batch.compare(report)
    assert not wait_until_gone(raypp_processes() - before, 2.0)
    return report


async def _undisturbed(setting: Setting) -> list[list[Answer]]:
    """Return, for each request, the answers of an engine that lives, which does not speculate."""
    rows = {"num_stages": 1, "max_num_seqs": len(setting.asked)}
    async with await AsyncLLM.create(setting.model, launch=launch_in_threads, **rows) as llm:
        prompts = [_prompt(one, "") for one in setting.asked]
        outputs = await llm.complete(prompts, [_params(setting, one) for one in setting.asked])
    return [_answers(one, output) for one, output in zip(setting.asked, outputs, strict=True)]


def _prompt(asked: Asked, salt: str) -> EncodedPrompt:
    return EncodedPrompt(asked.prompt, items=asked.items, cache_salt=f"{salt} {asked.cache_salt}")


def _params(setting: Setting, asked: Asked) -> SamplingParams:
    """Return the parameters for the API, which ends requests at the model's tokens: others are asked for."""
    own = load_model_config(resolve_model_path(setting.model)).eos_token_ids
    others = sorted(asked.eos_token_ids - set(own))
    return replace(asked.params, stop_token_ids=(*asked.params.stop_token_ids, *others)) if others else asked.params


def _answers(asked: Asked, output: RequestOutput) -> list[Answer]:
    """Return what became of a request, by continuation, as requests of their own."""
    assert asked.params.seed is not None
    prepared = PreparedRequest(Request("", asked.prompt, asked.params, seed=asked.params.seed))
    answers = []
    for completion in output.outputs:
        params = replace(asked.params, n=1, seed=prepared.seed_of(completion.index))
        answer = Answer(replace(asked, name=f"{asked.name} ({completion.index})", params=params))
        answer.token_ids = completion.token_ids
        answer.logprobs = [{t: its.logprob for t, its in beside.items()} for beside in completion.logprobs or ()]
        if completion.index == 0:
            answer.prompt_logprobs = [
                {t: its.logprob for t, its in beside.items()} for beside in output.prompt_logprobs or () if beside
            ]
        assert completion.finish_reason is not None, f"{asked.name} has not ended"
        answer.finish_reason = _REASONS[completion.finish_reason]
        answer.stop_token_id = completion.stop_reason if isinstance(completion.stop_reason, int) else -1
        answer.text = completion.text
        answers.append(answer)
    return answers


class _Engine:
    """An engine that is started again as often as need be, and what is heard of its lives."""

    def __init__(self) -> None:
        self.llm: AsyncLLM
        self.handle: EngineHandle
        self.num_lost = self.num_back = 0
        self.lost_s = self.back_s = 0.0
        self.final: RayppError | None = None

    def launch(self, config: EngineConfig, **factory: Any) -> EngineHandle:
        self.handle = launch_on_ray(config, **factory)
        self.handle.watch(self)
        return self.handle

    def engine_lost(self, error: RayppError) -> None:
        self.lost_s = time.monotonic()
        self.num_lost += 1

    def engine_back(self, client_address: str, *, is_explained: bool) -> None:
        self.back_s = time.monotonic()
        self.num_back += 1

    def engine_dead(self, error: RayppError) -> None:
        self.final = error

    def is_running(self) -> bool:
        assert self.final is None, self.final
        return self.num_lost == self.num_back


@asynccontextmanager
async def _mortal_engine(setting: Setting) -> AsyncIterator[_Engine]:
    engine = _Engine()
    faults = {
        "max_engine_restarts": 1000,
        "step_timeout_s": SILENCE_S,
        "heartbeat_s": SILENCE_S / 10,
        "close_timeout_s": 5.0,
    }
    async with await AsyncLLM.create(setting.model, launch=engine.launch, **setting.settings, **faults) as engine.llm:
        yield engine


class _Batch:
    """All requests of a setting at once, on an engine of which parts die."""

    def __init__(
        self, setting: Setting, engine: _Engine, rng: random.Random, expected: list[list[Answer]], salt: str
    ) -> None:
        self._setting = setting
        self._engine = engine
        self._rng = rng
        self._expected = expected
        self._salt = salt
        self._num_tokens = self._num_ended = 0
        self._last_token_s = 0.0
        self._outputs: list[RequestOutput] = []

    async def run(self, deaths: Sequence[str]) -> list[Kill]:
        """Return what became of the engine's parts."""
        requests = [asyncio.create_task(self._ask(i, one)) for i, one in enumerate(self._setting.asked)]
        killing = asyncio.create_task(self._kill_all(deaths))
        try:
            ended, _ = await asyncio.wait([*requests, killing], return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
        finally:
            for task in (*requests, killing):
                task.cancel()
        self._outputs = [task.result() for task in requests]
        return killing.result()

    def compare(self, report: Report) -> None:
        """Hold what came against the undisturbed answers."""
        for asked, right, output in zip(self._setting.asked, self._expected, self._outputs, strict=True):
            found = _answers(asked, output)
            report.num_requests += 1
            report.comparison.compare(found, right, excuses=asked.items is None and self._setting.model == "tiny")
            for one, other in zip(found, right, strict=True):
                assert one.token_ids != other.token_ids or one.text == other.text, f"{one.asked.name}: {one.text!r}"
            assert output.prompt_token_ids == asked.prompt.tolist()
            num_cached, size = output.metrics.num_cached_tokens, self._setting.settings["block_size"]
            assert num_cached % size == 0, f"{asked.name}: {num_cached} tokens were found in the prefix cache"
            assert 0 <= num_cached < len(asked.prompt), f"{asked.name}: {num_cached}"
            is_alone = asked.params.prompt_logprobs is not None or asked.cache_salt not in ("", "again")
            assert not (is_alone and num_cached), f"{asked.name} shares nothing, and has {num_cached}"

    async def _ask(self, index: int, asked: Asked) -> RequestOutput:
        """Ask for one; of each four, one is not streamed."""
        prompt, params = _prompt(asked, self._salt), _params(self._setting, asked)
        llm, request_id = self._engine.llm, f"{self._salt}: {asked.name}"
        if index % 4 == 3:
            [output] = await llm.complete([prompt], [params], [request_id])
            self._count(output, None)
        else:
            last = None
            async for output in llm.generate(prompt, params, request_id, priority=asked.priority):
                self._count(output, last)
                last = output
        self._num_ended += 1
        return output

    def _count(self, output: RequestOutput, last: RequestOutput | None) -> None:
        """Take in what came: it goes on from what the client had."""
        for i, now in enumerate(output.outputs):
            before = 0 if last is None else len(last.outputs[i].token_ids)
            if last is not None:
                had = last.outputs[i]
                assert now.token_ids[:before] == had.token_ids, f"{output.request_id}: tokens are taken back"
                assert now.text.startswith(had.text), f"{output.request_id}: text is taken back"
            if len(now.token_ids) > before:
                self._num_tokens += len(now.token_ids) - before
                self._last_token_s = time.monotonic()

    async def _until(self, condition: Callable[[], Any], what: str) -> None:
        ends = time.monotonic() + WAIT_S
        while not condition():
            assert self._engine.final is None, self._engine.final
            assert time.monotonic() < ends, (
                f"never: {what}; {self._num_ended} requests have ended, {self._num_tokens} tokens came, "
                f"{self._engine.num_lost} engines were lost, {self._engine.num_back} came back"
            )
            await asyncio.sleep(_POLL_S)

    @property
    def _all_ended(self) -> bool:
        return self._num_ended == len(self._setting.asked)

    async def _kill_all(self, deaths: Sequence[str]) -> list[Kill]:
        num_tokens = sum(len(answer.token_ids) for answers in self._expected for answer in answers)
        kills = []
        for index, death in enumerate(deaths):
            share, delay_s = self._rng.uniform(0.0, 1.5 / (len(deaths) - index + 1)), self._rng.uniform(0.0, 0.15)
            if death == "stage, in prefill":
                wanted = self._num_tokens
            else:
                wanted, delay_s = self._num_tokens + int(share * (num_tokens - self._num_tokens)), 0.0
            await self._until(lambda wanted=wanted: self._num_tokens >= wanted or self._all_ended, f"{wanted} tokens")  # type: ignore[misc]
            await asyncio.sleep(delay_s)
            kills.append(await self._kill(death))
        await self._until(lambda: self._all_ended, "the end of all requests")
        return kills

    async def _kill(self, death: str) -> Kill:
        """Have something die; return once the engine has gone on."""
        engine, rng = self._engine, self._rng
        await self._until(engine.is_running, "an engine that runs")
        victims, number = await self._victims(death), signal.SIGSTOP if "stopped" in death else signal.SIGKILL
        then_s = rng.uniform(0.0, 3.0)
        kill = Kill(death, self._num_tokens)
        num_back, num_recoveries = engine.num_back, len(engine.handle.recoveries())
        has_ended = self._all_ended
        carried_over = await self._carried_over()
        killed_s = time.monotonic()
        for pid in victims:
            os.kill(pid, number)
        if death == "encoder":
            await self._until(lambda: self._last_token_s > killed_s or self._all_ended, "tokens after a death")
            kill.pause_s = None if has_ended else self._last_token_s - killed_s
            return kill
        await self._until(lambda: engine.num_lost > num_back, "the news of a death")
        lost_s = engine.lost_s
        if death == "stage, then another":
            await asyncio.sleep(then_s)
            await self._kill_any(rng)
        await self._until(lambda: engine.num_back > num_back and engine.is_running(), "an engine after a death")
        await self._until(
            lambda: (self._last_token_s > engine.back_s and engine.is_running()) or self._all_ended,
            "tokens after a recovery",
        )
        recoveries = engine.handle.recoveries()[num_recoveries:]
        kill.num_starts = sum(r.num_starts for r in recoveries)
        kill.num_kept = recoveries[-1].last_start.num_kept_stages
        last = (await engine.llm.stats())["recoveries"]["last"]
        kill.parts = {
            "notice": lost_s - killed_s,
            "end": sum(r.end_s for r in recoveries),
            "start": sum(r.start_s for r in recoveries),
            "of it weights": recoveries[-1].last_start.weights_s,
            "links and graphs": recoveries[-1].last_start.links_and_graphs_s,
            "hand over": last["hand_over_s"],
        }
        if not has_ended:
            kill.pause_s = self._last_token_s - killed_s
            kill.parts["first token"] = self._last_token_s - engine.back_s
        assert not wait_until_gone(victims, 0.0), "what was killed or stopped is left"
        kill.num_carried_over = await self._carried_over() - carried_over
        return kill

    async def _kill_any(self, rng: random.Random) -> None:
        """Kill a driver or a stage, old or new, of an engine that starts or has just started."""
        engine = self._engine
        victims = sorted(pid for pid, name in actor_processes().items() if name != "EncoderActor")
        was_running, num_lost = engine.is_running(), engine.num_lost
        with suppress(ProcessLookupError):
            os.kill(rng.choice(victims), signal.SIGKILL)
        if was_running:
            await self._until(lambda: engine.num_lost > num_lost, "the news of another death")

    async def _carried_over(self) -> int:
        return int((await self._engine.llm.stats())["recoveries"]["num_carried_over"])

    async def _victims(self, death: str) -> list[int]:
        processes, rng = self._engine.handle.processes(), self._rng
        stages = processes["stages"]
        if death.startswith("stage ") and death[-1].isdigit():
            return [stages[int(death[-1])]]
        if death == "two at once":
            return rng.sample([processes["driver"], *stages], 2)
        if death.startswith("driver"):
            return [processes["driver"]]
        if death == "encoder":
            return [processes["encoders"][0]]
        return [rng.choice(stages)]
