"""`AsyncLLM` against an engine that speaks the real wire."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator

import pytest
from fake_engine import FakeEngine

from raypp.api.async_llm import AsyncLLM
from raypp.api.launch import freeze_start
from raypp.api.tokenizer import Tokenizer
from raypp.errors import ConfigError, EngineDeadError, RequestError, StageDiedError
from raypp.types import RequestOutput, SamplingParams

MakeEngine = Callable[..., FakeEngine]


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """A process in which no engine has started yet, as far as the garbage collector knows."""
    freeze_start.cache_clear()
    gc.unfreeze()
    gc.collect()  # what imports of test files left behind is not counted
    yield
    gc.unfreeze()


ENDLESS = SamplingParams(max_tokens=100_000)


def run(coroutine: Coroutine[object, object, None]) -> None:
    async def with_deadline() -> None:
        async with asyncio.timeout(20):
            await coroutine

    asyncio.run(with_deadline())


async def seen(engine: FakeEngine, condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(engine.wait_until, condition)


def test_outputs_are_cumulative_and_end_finished(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(["Grüße, 世界! 🎉🎉 argv"])[0].tolist()

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=make_engine(lambda _: ids).launch) as llm:
            outputs = [o async for o in llm.generate("x", SamplingParams(max_tokens=99), "r1")]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        last = outputs[-1].outputs[0]
        assert last.token_ids == ids
        assert last.text == tokenizer.decode(ids)
        assert outputs[-1].request_id == "r1"
        previous = outputs[0].outputs[0]
        for output in outputs[1:]:
            completion = output.outputs[0]
            assert completion.token_ids[: len(previous.token_ids)] == previous.token_ids
            assert completion.text.startswith(previous.text)
            assert "\ufffd" not in completion.text
            previous = completion
            assert output.finished == (output.metrics.finish_time_s is not None)

    run(body())


@pytest.mark.parametrize("stop", [(), ("argv",)])
def test_deltas_join_to_the_whole(make_engine: MakeEngine, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    ids = tokenizer.encode(["Grüße, 世界! 🎉🎉 argv end"])[0].tolist()
    params = SamplingParams(max_tokens=99, n=2, stop=stop)

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=make_engine(lambda _: ids).launch) as llm:
            whole = [o async for o in llm.generate("x", params)][-1]
            deltas = [o async for o in llm.generate("x", params, deltas=True)]
        assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]
        for index, completion in enumerate(whole.outputs):
            pieces = [o.outputs[index] for o in deltas]
            assert "".join(piece.text for piece in pieces) == completion.text
            assert [token for piece in pieces for token in piece.token_ids] == completion.token_ids
            assert pieces[-1].finish_reason == completion.finish_reason

    run(body())


def test_a_slow_reader_gets_the_newest_and_the_end(make_engine: MakeEngine) -> None:
    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=make_engine().launch) as llm:
            params = SamplingParams(max_tokens=40)
            outputs = []
            async for output in llm.generate("a", params):
                outputs.append(output)
                async for _ in llm.generate("b", params):  # meanwhile the first one ends
                    pass
            assert outputs[-1].finished
            assert len(outputs[-1].outputs[0].token_ids) == 40
            assert len(outputs) < 40

    run(body())


def test_stop_strings_are_never_shown(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(["import os\nimport sys"])[0].tolist()

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=make_engine(lambda _: ids).launch) as llm:
            params = SamplingParams(max_tokens=99, stop="\nimport")
            texts = [o.outputs[0].text async for o in llm.generate("x", params)]
        assert all("import os".startswith(text) for text in texts)
        assert texts[-1] == "import os"

    run(body())


@pytest.mark.parametrize("way", ["break", "cancel"])
def test_leaving_early_aborts(make_engine: MakeEngine, way: str) -> None:
    engine = make_engine()

    async def read_one(llm: AsyncLLM) -> None:
        async for _ in llm.generate("a", ENDLESS, "r"):
            if way == "break":
                break

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            reading = asyncio.create_task(read_one(llm))
            await seen(engine, lambda: len(engine.added) == 1)
            if way == "break":
                engine.grant_steps(1)
                await reading
            else:
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
            await seen(engine, lambda: engine.aborted == ["r"])

    run(body())


def test_abort_ends_the_iterator_with_what_there_is(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            engine.grant_steps(1)
            outputs: list[RequestOutput] = []
            async for output in llm.generate("a", ENDLESS, "r"):
                if not outputs:
                    await llm.abort("r")
                outputs.append(output)
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason == "abort"
            assert (await llm.stats())["num_running"] == 0

    run(body())


def test_many_at_once_and_a_bad_one_among_them(make_engine: MakeEngine) -> None:
    async def one(llm: AsyncLLM, index: int) -> int:
        count = 0
        async for output in llm.generate(f"number {index}", SamplingParams(max_tokens=5 + index % 7)):
            count = len(output.outputs[0].token_ids)
        return count

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=make_engine().launch) as llm:
            tasks = [asyncio.create_task(one(llm, i)) for i in range(50)]
            with pytest.raises(RequestError):
                llm.generate("")
            assert await asyncio.gather(*tasks) == [5 + i % 7 for i in range(50)]
            chat = llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=2))
            assert [o async for o in chat][-1].finished

    run(body())


def test_a_rejected_request_raises(make_engine: MakeEngine) -> None:
    engine = make_engine(rejects=lambda r: RequestError("too much", request_id=r.request_id))

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            with pytest.raises(RequestError, match="too much") as caught:
                async for _ in llm.generate("a", None, "r"):
                    pass
            assert caught.value.request_id == "r"

    run(body())


@pytest.mark.parametrize("way", ["die_unseen", "die_loudly"])
def test_a_dead_engine_ends_every_request(make_engine: MakeEngine, way: str) -> None:
    engine = make_engine()

    async def drain(llm: AsyncLLM) -> None:
        async for _ in llm.generate("a"):
            pass

    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=engine.launch) as llm:
            engine.set_gate(is_open=False)
            tasks = [asyncio.create_task(drain(llm)) for _ in range(3)]
            await seen(engine, lambda: len(engine.added) == 3)
            getattr(engine, way)(StageDiedError("stage 0 died", stage_index=0))
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(r) for r in results] == [StageDiedError] * 3
            assert len({id(r) for r in results}) == 3
            with pytest.raises(StageDiedError):
                await drain(llm)

    run(body())
    assert engine.num_closed == 1


def test_made_outside_of_a_loop_and_used_in_one_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    llm = AsyncLLM("tiny", launch=engine.launch)

    async def use() -> None:
        assert [o async for o in llm.generate("a")][-1].finished
        assert llm.processes()["driver"] == 1
        assert llm.plan() == {"stages": []}

    loop = asyncio.new_event_loop()
    loop.run_until_complete(use())
    with pytest.raises(ConfigError, match="one event loop"):
        asyncio.run(use())
    loop.run_until_complete(llm.close())
    loop.run_until_complete(llm.close())
    with pytest.raises(EngineDeadError, match="closed"):
        loop.run_until_complete(use())
    loop.close()
    assert engine.num_closed == 1


def test_a_forgotten_one_is_closed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    llm = AsyncLLM("tiny", launch=engine.launch)
    del llm
    gc.collect()
    assert engine.num_closed == 1


def test_a_driver_that_says_nothing_is_given_up(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()  # it sends no heartbeats
        llm = await AsyncLLM.create("tiny", launch=engine.launch, step_timeout_s=0.2, heartbeat_s=0.02)
        engine.set_gate(is_open=False)
        with pytest.raises(EngineDeadError, match="the driver is frozen"):
            async for _ in llm.generate("a", ENDLESS):
                pass
        await llm.close()

    run(body())


def test_closing_in_another_loop_while_the_first_one_runs(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        llm = await AsyncLLM.create("tiny", launch=engine.launch)
        engine.set_gate(is_open=False)

        async def generate() -> None:
            async for _ in llm.generate("a", ENDLESS):
                pass

        pending = asyncio.create_task(generate())
        await seen(engine, lambda: bool(engine.added))
        await asyncio.to_thread(asyncio.run, llm.close())
        with pytest.raises(EngineDeadError, match="closed"):
            await pending
        assert engine.num_closed == 1

    run(body())


def test_closing_when_the_first_loop_has_ended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    opened: list[AsyncLLM] = []

    async def use() -> None:
        opened.append(await AsyncLLM.create("tiny", launch=engine.launch))
        async for _ in opened[0].generate("a", SamplingParams(max_tokens=2)):
            pass

    run(use())
    run(opened[0].close())
    assert engine.num_closed == 1


@pytest.mark.usefixtures("unfrozen")
def test_collections_do_not_visit_what_the_start_left_behind(make_engine: MakeEngine) -> None:
    async def body() -> None:
        before = len(gc.get_objects())
        async with await AsyncLLM.create("tiny", launch=make_engine().launch):
            frozen = gc.get_freeze_count()
            assert frozen > 0.9 * before
            # What a full collection visits now, and so the time for which it stops all streams.
            assert len(gc.get_objects()) < 0.1 * before
            async with await AsyncLLM.create("tiny", launch=make_engine().launch):
                assert gc.get_freeze_count() <= frozen  # once per process: what runs by now is not frozen

    run(body())


@pytest.mark.usefixtures("unfrozen")
def test_freezing_can_be_turned_off(make_engine: MakeEngine) -> None:
    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=make_engine().launch, freeze_gc=False):
            assert gc.get_freeze_count() == 0

    run(body())
