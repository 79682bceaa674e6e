"""Clients keep their requests while an engine is started again, and hand them over with the tokens that they have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from raypp.api.async_llm import AsyncLLM
from raypp.api.engine_connection import EngineClient
from raypp.api.llm import LLM
from raypp.api.tokenizer import Tokenizer
from raypp.client_messages import StatsCall
from raypp.errors import ConfigError, EngineDeadError, FatalRequestError, QueueFullError, StageDiedError
from raypp.request import Request
from raypp.types import RequestOutput, SamplingParams

MakeEngine = Callable[..., FakeEngine]

DIED = StageDiedError("stage 1 died", stage_index=1)
NUM_TOKENS = 12
PARAMS = SamplingParams(max_tokens=NUM_TOKENS)


def count_up(request: Request) -> list[int]:
    """Return tokens that differ by request and position."""
    return [10 + (7 * index + int(request.prompt_token_ids.sum()) + request.seed) % 250 for index in range(100)]


def run(coroutine: Coroutine[object, object, None]) -> None:
    async def with_deadline() -> None:
        async with asyncio.timeout(20):
            await coroutine

    asyncio.run(with_deadline())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


class Reader:
    """Reads a stream beside the test."""

    def __init__(self, llm: AsyncLLM, prompt: str, params: SamplingParams = PARAMS, request_id: str = "r") -> None:
        self.outputs: list[RequestOutput] = []
        self.task = asyncio.create_task(self._read(llm, prompt, params, request_id))

    @property
    def num_tokens(self) -> int:
        return sum(len(o.token_ids) for o in self.outputs[-1].outputs) if self.outputs else 0

    async def _read(self, llm: AsyncLLM, prompt: str, params: SamplingParams, request_id: str) -> RequestOutput:
        async for output in llm.generate(prompt, params, request_id):
            self.outputs.append(output)
        return self.outputs[-1]


async def let_die(llm: AsyncLLM, engine: FakeEngine, way: str) -> None:
    getattr(engine, way)(DIED)
    await until(lambda: llm.is_recovering)


@pytest.mark.parametrize("way", ["die_loudly", "die_unseen"])
@pytest.mark.parametrize("num_before", [0, 1, 5, NUM_TOKENS - 1])
def test_a_stream_goes_on_where_it_was(
    make_engine: MakeEngine, tokenizer: Tokenizer, num_before: int, way: str
) -> None:
    engine = make_engine(count_up, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            reader = Reader(llm, "a", SamplingParams(max_tokens=NUM_TOKENS, seed=5))
            await until(lambda: len(engine.added) == 1)
            engine.grant_steps(num_before)
            await until(lambda: reader.num_tokens == num_before)
            await let_die(llm, engine, way)
            await asyncio.sleep(0.02)
            assert reader.num_tokens == num_before
            engine.come_back()
            last = await reader.task
        first, again = engine.added
        assert again.output_token_ids == count_up(first)[:num_before]
        for name in ("request_id", "handle", "seed", "priority", "is_streamed", "eos_token_ids", "params"):
            assert getattr(first, name) == getattr(again, name), name
        assert again.goes_first == (num_before == 0), "what may have killed the engine must not wait for long"
        [completion] = last.outputs
        assert completion.token_ids == count_up(first)[:NUM_TOKENS]
        assert completion.text == tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"
        counts = [len(output.outputs[0].token_ids) for output in reader.outputs]
        assert counts == sorted(set(counts)), "nothing is repeated"
        metrics, num_lives = last.metrics, 2 if num_before else 1
        assert (metrics.num_cached_tokens, metrics.num_preemptions) == (16, num_lives)
        assert metrics.drafted_by_position == [2 * num_lives, 2 * num_lives]
        assert metrics.accepted_by_position == [2 * num_lives, num_lives]
        assert metrics.queue_s is not None
        assert (metrics.queue_s == 0.002) == bool(num_before), "waiting for the engine is waiting"

    run(body())


def test_unfinished_continuations_are_handed_over_one_by_one_in_the_old_order(make_engine: MakeEngine) -> None:
    def script(request: Request) -> list[int]:
        tokens = count_up(request)
        return [*tokens[:2], 2] if request.request_id.endswith("1") else tokens  # the second ends by itself

    engine = make_engine(script, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            params = SamplingParams(max_tokens=NUM_TOKENS, n=3, seed=1, prompt_logprobs=1)
            readers = [Reader(llm, prompt, params, f"r{prompt}") for prompt in "abc"]
            await until(lambda: len(engine.added) == 9)
            engine.grant_steps(4)
            await until(lambda: all(reader.num_tokens == 4 + 3 + 4 for reader in readers))
            await let_die(llm, engine, "die_loudly")
            engine.come_back()
            for reader in readers:
                output = await reader.task
                assert [len(o.token_ids) for o in output.outputs] == [NUM_TOKENS, 3, NUM_TOKENS]
        again = engine.added[9:]
        assert [request.handle for request in again] == [0, 2, 3, 5, 6, 8]
        assert [len(request.output_token_ids) for request in again] == [4] * 6
        assert len({id(request.prompt_token_ids) for request in again}) == 3
        seeds = {request.handle: request.seed for request in engine.added[:9]}
        assert all(seeds[request.handle] == request.seed for request in again)

    run(body())


@pytest.mark.parametrize("num_before", [1, 3, 4])
def test_stop_strings_are_found_across_a_death(make_engine: MakeEngine, tokenizer: Tokenizer, num_before: int) -> None:
    ids = tokenizer.encode(["xyzwvq"])[0].tolist()
    assert len(ids) == 6
    engine = make_engine(lambda _: ids, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            reader = Reader(llm, "a", SamplingParams(max_tokens=50, stop="zwv"))
            await until(lambda: len(engine.added) == 1)
            engine.grant_steps(num_before)
            await until(lambda: reader.num_tokens == num_before)
            await let_die(llm, engine, "die_unseen")
            engine.come_back()
            completion = (await reader.task).outputs[0]
            assert (completion.text, completion.stop_reason) == ("xy", "zwv")
            assert all("xy".startswith(output.outputs[0].text) for output in reader.outputs)
            await until(lambda: "r" in engine.aborted)

    run(body())


def test_requests_end_while_there_is_no_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(count_up, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            readers = {name: Reader(llm, "a", PARAMS, name) for name in ("aborted", "cancelled", "late", "kept")}
            await until(lambda: len(engine.added) == 4)
            engine.grant_steps(2)
            await until(lambda: all(reader.num_tokens == 2 for reader in readers.values()))
            await let_die(llm, engine, "die_loudly")
            await llm.abort("aborted")
            output = await readers["aborted"].task
            assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("abort", 2)
            readers["cancelled"].task.cancel()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await readers["late"].task
            with pytest.raises(asyncio.CancelledError):
                await readers["cancelled"].task
            assert (await llm.stats())["num_waiting"] == 1
            engine.come_back()
            assert len((await readers["kept"].task).outputs[0].token_ids) == NUM_TOKENS
        assert [request.request_id for request in engine.added[4:]] == ["kept"]

    run(body())


def test_new_requests_wait_within_the_limits(make_engine: MakeEngine) -> None:
    engine = make_engine(count_up, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch, max_waiting_bytes=1 << 20) as llm:
            engine.set_gate(is_open=False)
            running = Reader(llm, "a")
            engine.grant_steps(1)
            await until(lambda: running.num_tokens == 1)
            await let_die(llm, engine, "die_unseen")
            later: list[Reader] = []
            while not later or not later[-1].task.done():
                later.append(Reader(llm, "b", PARAMS, f"l{len(later)}"))
                await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match=f"max_waiting_bytes = {1 << 20}"):
                await later.pop().task
            assert len(later) == (1 << 20) // (4096 + 4) - 1
            with pytest.raises(QueueFullError):
                await llm.complete(["c", "d"], PARAMS)
            later.pop().task.cancel()
            await asyncio.sleep(0)
            after = Reader(llm, "b", PARAMS, "after")  # there is room for one again
            assert len(engine.added) == 1
            engine.come_back()
            for reader in (running, *later, after):
                assert len((await reader.task).outputs[0].token_ids) == NUM_TOKENS
        names = [request.request_id for request in engine.added[1:]]
        assert names == ["r", *(f"l{index}" for index in range(len(later))), "after"]

    run(body())


def test_a_long_list_goes_on_and_more_of_it_is_sent(make_engine: MakeEngine) -> None:
    engine = make_engine(count_up, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch, max_waiting_bytes=1 << 20) as llm:
            engine.set_gate(is_open=False)
            task = asyncio.create_task(llm.complete(["a"] * 300, PARAMS))
            await until(lambda: len(engine.added) > 100)
            assert len(engine.added) < 200
            engine.grant_steps(3)
            await let_die(llm, engine, "die_loudly")
            engine.come_back()
            outputs = await task
        assert [len(output.outputs[0].token_ids) for output in outputs] == [NUM_TOKENS] * 300

    run(body())


def test_what_is_told_of_an_engine_that_is_started_again(make_engine: MakeEngine) -> None:
    engine = make_engine(count_up, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            reader = Reader(llm, "a")
            await until(lambda: len(engine.added) == 1)
            engine.answers_stats = False
            pending = asyncio.create_task(llm.stats())
            await asyncio.sleep(0.01)
            await let_die(llm, engine, "die_loudly")
            for stats in (await pending, await llm.stats()):
                assert stats["is_recovering"]
                assert (stats["num_running"], stats["num_waiting"]) == (0, 1)
                assert stats["recoveries"]["count"] == 0
            await asyncio.sleep(0.02)
            assert (await llm.stats())["recoveries"]["paused_s"] > 0.02
            await llm.check_health()
            llm.check_alive()
            with pytest.raises(ConfigError, match="started again"):
                await llm.timeline()
            engine.answers_stats = True
            engine.come_back()
            await reader.task
            stats = await llm.stats()
            assert not stats["is_recovering"]
            assert not llm.is_recovering
            told = stats["recoveries"]
            assert (told["count"], told["num_carried_over"]) == (1, 1)
            last = told["last"]
            assert 0.02 < told["paused_s"] == last["paused_s"] < 60
            assert (last["died"], last["notice_s"], last["end_s"], last["start_s"]) == ("stage 1", 0.1, 0.2, 0.3)
            assert 0 <= last["hand_over_s"] <= last["paused_s"]

    run(body())


@pytest.mark.parametrize("when", ["paused", "back"])
def test_it_may_die_again(make_engine: MakeEngine, when: str) -> None:
    engine = make_engine(count_up, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            reader = Reader(llm, "a")
            for num_tokens in (2, 4, 6):
                await until(lambda: engine.num_running == 1)
                engine.grant_steps(2)
                await until(lambda wanted=num_tokens: reader.num_tokens == wanted)  # type: ignore[misc]
                await let_die(llm, engine, "die_loudly")
                if when == "paused":
                    for watcher in engine._watchers:  # while it starts, which is the same pause
                        watcher.engine_lost(DIED)
                engine.opens_gate = num_tokens == 6
                engine.come_back()
                await until(lambda: not llm.is_recovering)
            last = await reader.task
            assert last.outputs[0].token_ids == count_up(engine.added[-1])[:NUM_TOKENS]
            assert (last.metrics.num_cached_tokens, last.metrics.num_preemptions) == (16, 4)
            assert [len(request.output_token_ids) for request in engine.added] == [0, 2, 4, 6]

    run(body())


def test_when_it_does_not_come_back_requests_end_with_the_reason(make_engine: MakeEngine) -> None:
    engine = make_engine(count_up, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            before = Reader(llm, "a")
            await until(lambda: len(engine.added) == 1)
            await let_die(llm, engine, "die_loudly")
            during = Reader(llm, "a", PARAMS, "during")
            await asyncio.sleep(0)
            engine.recovers = False
            engine.die_unseen(EngineDeadError("no more restarts"))
            for reader in (before, during):
                with pytest.raises(EngineDeadError, match="no more restarts"):
                    await reader.task
            with pytest.raises(EngineDeadError, match="no more restarts"):
                await llm.stats()
            with pytest.raises(EngineDeadError, match="no more restarts"):
                llm.check_alive()
            assert not llm.is_recovering

    run(body())


def test_closing_while_there_is_no_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(count_up, recovers=True)

    async def body() -> None:
        llm = await AsyncLLM.create("tiny", launch=engine.launch)
        engine.set_gate(is_open=False)
        reader = Reader(llm, "a")
        await until(lambda: len(engine.added) == 1)
        await let_die(llm, engine, "die_loudly")
        await llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await reader.task

    run(body())


def test_blocking_calls_go_on(make_engine: MakeEngine) -> None:
    engine = make_engine(count_up, recovers_by_itself=True)
    with LLM("tiny", launch=engine.launch) as llm:
        deaths = iter([True, False, True])
        engine.kills = lambda _: next(deaths, False)
        outputs = llm.generate(["a", "b"], PARAMS)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [NUM_TOKENS] * 2
        assert [len(output.outputs[0].token_ids) for output in llm.stream("a", PARAMS)][-1] == NUM_TOKENS
        assert llm.stats()["recoveries"]["num_carried_over"] == 4
    assert engine.num_deaths == 2


def test_what_may_have_killed_the_engine_is_handed_over_after_others(make_engine: MakeEngine) -> None:
    engine = make_engine(count_up, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            first = Reader(llm, "a", PARAMS, "first")
            await until(lambda: len(engine.added) == 1)
            engine.grant_steps(2)
            await until(lambda: first.num_tokens == 2)
            readers = [first, *(Reader(llm, "a", PARAMS, name) for name in "xyz")]
            await until(lambda: len(engine.added) == 4)
            engine.opens_gate = False
            await let_die(llm, engine, "die_loudly")
            engine.come_back()
            await until(lambda: len(engine.added) == 5)
            for num_added in (6, 7, 8):
                engine.grant_steps(1)
                await until(lambda wanted=num_added: len(engine.added) == wanted)  # type: ignore[misc]
            engine.set_gate(is_open=True)
            for reader in readers:
                assert len((await reader.task).outputs[0].token_ids) == NUM_TOKENS
        assert [request.request_id for request in engine.added[4:]] == ["first", "x", "y", "z"]

    run(body())


def test_what_a_driver_says_last_counts_if_its_holder_was_quicker(make_engine: MakeEngine) -> None:
    engine = make_engine(count_up, recovers=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            readers = {name: Reader(llm, "a", PARAMS, name) for name in ("first", "x", "y")}
            await until(lambda: len(engine.added) == 3)
            await let_die(llm, engine, "die_unseen")
            assert [r.request.request_id for r in engine._running] == ["first", "x", "y"]
            del engine._running[2]  # the last has to wait for a row
            engine.grant_steps(2)  # on their way when the holder told of the death
            await until(lambda: readers["first"].num_tokens == 2)
            frontend = llm._frontend_here()
            engine.die_loudly(DIED)
            await until(lambda: frontend._connection._client is None)
            engine.come_back()
            for reader in readers.values():
                assert len((await reader.task).outputs[0].token_ids) == NUM_TOKENS
        again = {request.request_id: request for request in engine.added[3:]}
        assert {name: len(request.output_token_ids) for name, request in again.items()} == {"first": 2, "x": 2, "y": 0}
        assert not again["y"].goes_first, "it was in no step, and cannot have done it"

    run(body())


@pytest.mark.parametrize("num_continuations", [1, 3])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_request_that_kills_engines_fails_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, position: int, num_continuations: int
) -> None:
    engine = make_engine(count_up, recovers_by_itself=True, kills=lambda r: r.request_id.startswith("poison"))
    monkeypatch.setattr("raypp.api.poison_requests._TIMES_AS_OLD", 1.0)  # a busy machine makes engines old
    params = replace(PARAMS, n=num_continuations)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            names = [f"r{index}" for index in range(8)]
            names[position] = "poison"
            readers = {name: Reader(llm, name, params, name) for name in names}
            await until(lambda: len(engine.added) == 8 * num_continuations)
            engine.set_gate(is_open=True)
            with pytest.raises(FatalRequestError) as caught:
                await readers.pop("poison").task
            assert caught.value.request_id == "poison"
            for reader in readers.values():
                for completion in (await reader.task).outputs:
                    assert len(completion.token_ids) == NUM_TOKENS
            assert len([o async for o in llm.generate("x", PARAMS)]) > 0
        assert engine.num_deaths == (5 if position == 0 else 4), "the first suspect's first run proves nothing"
        assert engine.num_excused == engine.num_deaths - 1

    run(body())


def test_a_silent_driver_is_reported_and_its_requests_go_on(make_engine: MakeEngine) -> None:
    engine = make_engine(count_up, recovers_by_itself=True)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch, heartbeat_s=0.02, step_timeout_s=0.05) as llm:
            engine.set_gate(is_open=False)
            reader = Reader(llm, "a")
            await until(lambda: len(engine.added) == 1)
            engine.grant_steps(3)
            last = await reader.task
            assert last.outputs[0].token_ids == count_up(engine.added[0])[:NUM_TOKENS]
            assert engine.num_deaths >= 1

    run(body())


def test_a_connection_to_a_dead_driver_is_closed_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypp.api.engine_connection._LINGER_MS", 60_000)

    async def body() -> None:
        client = EngineClient(f"ipc://{tmp_path}/nobody", lambda _: None)
        client.send(StatsCall(1))
        started_s = time.monotonic()
        client.close(delivers=False)
        assert time.monotonic() - started_s < 30, "all streams of the loop would stand still"

    run(body())


def test_a_connection_that_is_lost_is_left_without_waiting(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, closed, close = make_engine(count_up, recovers=True), [], EngineClient.close

    def noted(client: EngineClient, *, delivers: bool = True) -> None:
        closed.append(delivers)
        close(client, delivers=delivers)

    monkeypatch.setattr(EngineClient, "close", noted)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            await llm.stats()  # it is connected now
            await let_die(llm, engine, "die_unseen")

    run(body())
    assert closed == [False]
