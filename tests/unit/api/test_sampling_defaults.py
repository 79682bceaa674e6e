"""A model's own sampling defaults, on a real engine in a thread: where they hold, and where not."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raypp.api.async_llm import AsyncLLM
from raypp.api.llm import LLM
from raypp.models.registry import resolve_model_path
from raypp.testing import launch_in_threads
from raypp.types import SamplingParams

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "stage_num_threads": 1, "kv_cache_bytes": 1 << 22}
RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 3}
DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model whose makers recommend something."""
    directory = tmp_path_factory.mktemp("model")
    for file in resolve_model_path("tiny").iterdir():
        (directory / file.name).symlink_to(file)
    generation = directory / "generation_config.json"
    own = json.loads(generation.read_text())
    generation.unlink()
    generation.write_text(json.dumps(own | RECOMMENDED))
    return directory


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, launch=launch_in_threads, **SETTINGS) as llm:
        yield llm


def test_they_hold_where_no_parameters_are_given(llm: LLM) -> None:
    assert dict(llm.sampling_defaults) == DEFAULTS
    assert llm.get_default_sampling_params() == SamplingParams(**DEFAULTS)
    [prepared] = llm._engine.preparer.prompts(["def main("])
    assert prepared.request.params == SamplingParams(**DEFAULTS)
    [prepared] = llm._engine.preparer.chats([[{"role": "user", "content": "hi"}]])
    assert prepared.request.params == SamplingParams(**DEFAULTS)
    assert len(llm.generate("def main(")[0].outputs[0].token_ids) == 3


def test_parameters_that_are_given_hold_as_they_are(llm: LLM) -> None:
    [prepared] = llm._engine.preparer.prompts(["x"], SamplingParams())
    assert prepared.request.params == SamplingParams()
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM("tiny", launch=launch_in_threads, **SETTINGS) as plain:
        assert not plain.sampling_defaults
        assert plain.get_default_sampling_params() == SamplingParams()
        ours, theirs = (engine.generate("def main(", greedy)[0].outputs[0].token_ids for engine in (llm, plain))
    assert ours == theirs
    assert len(ours) == 5
    some = replace(llm.get_default_sampling_params(), max_tokens=4, ignore_eos=True)
    assert len(llm.generate("def main(", some)[0].outputs[0].token_ids) == 4


def test_the_plan_tells_them(llm: LLM) -> None:
    assert llm.plan()["sampling_defaults"] == DEFAULTS


@pytest.mark.parametrize("setting", ["auto", "none"])
def test_the_start_says_which_hold(model: Path, caplog: pytest.LogCaptureFixture, setting: str) -> None:
    async def body() -> SamplingParams:
        settings = {**SETTINGS, "generation_config": setting}
        async with await AsyncLLM.create(model, launch=launch_in_threads, **settings) as llm:
            return llm.get_default_sampling_params()

    with caplog.at_level(logging.WARNING, "raypp"):
        params = asyncio.run(asyncio.wait_for(body(), 60))
    said = [record.getMessage() for record in caplog.records if "generation_config.json" in record.getMessage()]
    if setting == "none":
        assert params == SamplingParams()
        assert not said
    else:
        assert params == SamplingParams(**DEFAULTS)
        assert len(said) == 1
        assert "temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05, max_tokens=3" in said[0]
