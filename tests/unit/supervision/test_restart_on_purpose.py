"""An engine is started again with other settings, under its requests."""

from __future__ import annotations

import asyncio

import pytest

from raypp import LLM, AsyncLLM, EngineDeadError, RayppError, ResourceError, SamplingParams
from raypp.testing import launch_in_threads
from raypp.testing.threaded_engine import ThreadedEngine

PROMPTS = ["The capital of France is", "One, two, three", "def f(x):", "Once upon a time"]
SAMPLED = SamplingParams(max_tokens=120, temperature=0.8, seed=5, ignore_eos=True, repetition_penalty=1.1)
CHANGES = [
    {"num_stages": 3, "layer_partition": None},
    {"num_stages": 2, "layer_partition": [4, 2]},
    {"num_stages": 1, "layer_partition": None, "num_kv_blocks": 700, "block_size": 8},
    {"num_stages": 2, "speculative": {"method": "ngram"}},
]
SETTINGS = {"launch": launch_in_threads, "num_kv_blocks": 300, "max_model_len": 512}


@pytest.fixture(scope="module")
def undisturbed():
    with LLM("tiny", num_stages=2, **SETTINGS) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SAMPLED, use_tqdm=False)]


def test_streams_go_on_under_other_settings(undisturbed):
    async def stream(llm, index, counts):
        async for output in llm.generate(PROMPTS[index], SAMPLED, str(index)):
            assert len(output.outputs[0].token_ids) >= counts[index], "nothing is taken back"
            counts[index] = len(output.outputs[0].token_ids)
        return output.outputs[0].token_ids

    async def run():
        llm = await AsyncLLM.create("tiny", num_stages=2, **SETTINGS)
        counts = [0] * len(PROMPTS)
        streams = [asyncio.create_task(stream(llm, index, counts)) for index in range(len(PROMPTS))]
        for number, change in enumerate(CHANGES, 1):
            async with asyncio.timeout(30):
                while min(counts) < 20 * number and not all(task.done() for task in streams):
                    await asyncio.sleep(0.002)
            await llm.restart(**change)
            assert all(getattr(llm.config.parallel, name, value) == value for name, value in change.items())
            assert len(llm.plan()["stages"]) == change["num_stages"]
        texts = await asyncio.gather(*streams)
        stats = await llm.stats()
        await llm.close()
        return texts, stats

    texts, stats = asyncio.run(run())
    assert texts == undisturbed
    assert stats["recoveries"]["count"] == len(CHANGES)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "bfloat16"}, "model.dtype"),
        ({"max_model_len": 256}, "model.max_model_len"),
        ({"kv_cache_dtype": "fp8"}, "cache.kv_cache_dtype"),
        ({"num_kv_blocks": 20}, "too small"),
        ({"num_stages": 3, "layer_partition": [1, 1]}, "layer_partition"),
        ({"num_stages": 9}, "layer"),
    ],
)
def test_what_cannot_change_is_refused_and_nothing_happens(change, named):
    with LLM("tiny", num_stages=2, **SETTINGS) as llm:
        with pytest.raises(RayppError, match=named):
            llm.restart(**change)
        assert llm.stats()["recoveries"]["count"] == 0
        assert llm.config.parallel.num_stages == 2


def test_requests_of_any_length_that_was_allowed_still_fit():
    with LLM("tiny", launch=launch_in_threads, num_kv_blocks=100) as llm:
        with pytest.raises(RayppError, match="too small for requests that the engine has taken"):
            llm.restart(num_kv_blocks=50)
        llm.restart(num_kv_blocks=100, num_stages=2)


@pytest.mark.full
def test_an_engine_that_does_not_start_so_goes_on_as_it_was(monkeypatch, undisturbed):
    start = ThreadedEngine._start_life
    tries = []

    def start_life(engine):
        tries.append(engine._plan.config.parallel.num_stages)
        if len(tries) == 1:
            raise ResourceError("a GPU is missing")
        return start(engine)

    monkeypatch.setattr(ThreadedEngine, "_start_life", start_life)
    with LLM("tiny", num_stages=2, **SETTINGS) as llm:
        with pytest.raises(ResourceError, match="a GPU is missing"):
            llm.restart(num_stages=3)
        assert tries == [3, 2]
        assert llm.config.parallel.num_stages == 2
        outputs = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == undisturbed


def test_restarts_on_purpose_are_not_counted_and_a_closed_engine_has_none():
    with LLM("tiny", max_engine_restarts=0, **SETTINGS) as llm:
        for num_stages in (2, 1):
            llm.restart(num_stages=num_stages)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.restart(num_stages=2)
