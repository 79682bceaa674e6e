"""Jobs and Ray Data's callable on a real engine, in a thread of this process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from batch_engines import make_settings, read_errors, read_output

from raypp.api.async_llm import AsyncLLM
from raypp.api.llm import LLM
from raypp.batch_job.job import BatchJob
from raypp.batch_job.ray_data import Completer
from raypp.config.engine_config import EngineConfig
from raypp.errors import EngineDeadError, NonFiniteLogitsError
from raypp.testing import launch_in_threads
from raypp.types import RequestOutput, SamplingParams

PROMPTS = ["def main(", "import ", "class A:", "return "]


async def open_engine(config: EngineConfig) -> AsyncLLM:
    return await AsyncLLM.create(config, launch=launch_in_threads)


def test_every_parameter_reaches_the_engine_and_texts_are_its_own(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"custom_id": f"g{i}", "prompt": prompt, "temperature": 0, "max_tokens": 8} for i, prompt in enumerate(PROMPTS)
    ]
    lines += [
        {"custom_id": "n", "prompt": "def ", "n": 3, "max_tokens": 4, "seed": 5, "logprobs": 2, "echo": True},
        {"custom_id": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "logprobs": True},
        {"custom_id": "response", "url": "/v1/responses", "body": {"input": "hello", "max_output_tokens": 4}},
        {"custom_id": "long", "prompt": [1] * 5000},
        {"custom_id": "vocabulary", "prompt": [[1], [10**9]]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asyncio.run(BatchJob(make_settings(tmp_path), open_engine).run())
    found = {line["custom_id"]: line["response"] for line in read_output(tmp_path)}

    with LLM("tiny", launch=launch_in_threads) as llm:
        expected = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=8))
    for i, output in enumerate(expected):
        assert found[f"g{i}"]["body"]["choices"][0]["text"] == output.outputs[0].text
    choices = found["n"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice in choices:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["text"].startswith("def ")
        assert choice["logprobs"]["token_logprobs"][0] is None
    content = found["chat"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(content) == found["chat"]["body"]["usage"]["completion_tokens"]
    response = found["response"]["body"]
    assert (response["object"], response["status"]) == ("response", "incomplete")
    assert response["usage"]["output_tokens"] == 4
    failed = {line["custom_id"]: line["response"] for line in read_errors(tmp_path)}
    for name, words in (("long", "max_model_len"), ("vocabulary", "vocabulary")):
        assert failed[name]["status_code"] == 400
        assert words in failed[name]["body"]["error"]["message"]


def test_a_stage_that_dies_does_not_restart_the_job(tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"l{i}", "prompt": prompt, "temperature": 0, "max_tokens": 40} for i, prompt in enumerate(PROMPTS)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened: list[AsyncLLM] = []

    async def open_once(config: EngineConfig) -> AsyncLLM:
        opened.append(await open_engine(config))
        return opened[-1]

    async def run() -> None:
        job = asyncio.create_task(
            BatchJob(make_settings(tmp_path, model_settings={"heartbeat_s": 0.05}), open_once).run()
        )
        while not opened or not (await opened[0].stats()).get("num_generated_tokens"):
            await asyncio.sleep(0.005)
        opened[0]._engine.handle.kill_stage(0)  # type: ignore[attr-defined]
        await job

    asyncio.run(run())
    assert len(opened) == 1
    assert len(opened[0]._engine.handle.recoveries()) == 1
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in read_output(tmp_path)}
    with LLM("tiny", launch=launch_in_threads) as llm:
        expected = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40))
    assert found == {f"l{i}": output.outputs[0].text for i, output in enumerate(expected)}


def test_ray_data_callable() -> None:
    completer = Completer("tiny", launch=launch_in_threads, sampling_params={"temperature": 0.0, "max_tokens": 5})
    batch = {"id": np.arange(4), "prompt": np.array(["def main(", "", "import ", "x" * 100_000], object)}
    result = completer(batch)
    assert list(result) == [
        "id",
        "prompt",
        "completion",
        "completion_finish_reason",
        "completion_num_tokens",
        "completion_error",
    ]
    assert [text is None for text in result["completion"]] == [False, True, False, True]
    assert result["completion_num_tokens"].tolist() == [5, 0, 5, 0]
    assert ["no tokens" in str(error) for error in result["completion_error"]] == [False, True, False, False]
    chat = Completer("tiny", launch=launch_in_threads, messages_column="talk", sampling_params={"max_tokens": 3})
    talks = np.empty(2, object)
    talks[:] = [np.array([{"role": "user", "content": "hi"}], object), [{"role": "user", "content": "ho"}]]
    assert chat({"talk": talks})["completion_num_tokens"].tolist() == [3, 3]


def column(*rows: Any) -> npt.NDArray[Any]:
    result = np.empty(len(rows), object)
    result[:] = rows
    return result


def test_a_row_that_fails_fails_alone() -> None:
    greedy = {"launch": launch_in_threads, "sampling_params": {"temperature": 0.0, "max_tokens": 3}}
    completer = Completer("tiny", **greedy)
    result = completer({"prompt": column(7, "import ", None, np.array([1, 2]), {"prompt": "x"}, {"text": "x"}, [-1])})
    assert [text is None for text in result["completion"]] == [True, False, True, False, False, True, True]
    assert [error is None for error in result["completion_error"]] == [False, True, False, True, True, False, False]
    assert completer({"prompt": column(7)})["completion"].tolist() == [None]
    assert completer({"prompt": column()})["completion"].tolist() == []

    hi = [{"role": "user", "content": "hi"}]
    chat = Completer("tiny", messages_column="talk", **greedy)
    result = chat({"talk": column({"role": "user", "content": "hi"}, np.array(hi, object), None, [], "hi", [7])})
    assert [text is None for text in result["completion"]] == [True, False, True, True, True, True]
    assert "a list of messages" in result["completion_error"][0]


@pytest.mark.parametrize(
    ("error", "words"),
    [(NonFiniteLogitsError("not finite"), "not finite"), (KeyError("secret"), "internal error: KeyError")],
)
def test_a_row_that_fails_at_the_engine_fails_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    completer = Completer("tiny", launch=launch_in_threads, sampling_params={"max_tokens": 1})
    generate = LLM.generate

    def generate_or_fail(llm: LLM, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
        if "bad" in prompts:
            raise error
        return generate(llm, prompts, params)

    monkeypatch.setattr(LLM, "generate", generate_or_fail)
    result = completer({"prompt": column("a", "bad", "b")})
    assert result["completion_num_tokens"].tolist() == [1, 0, 1]
    assert result["completion_error"].tolist() == [None, words, None]
    error = EngineDeadError("gone")
    with pytest.raises(EngineDeadError):
        completer({"prompt": column("a", "bad")})


def test_messages_are_the_same_in_arrow_and_in_python() -> None:
    def in_arrow(part: dict[str, Any]) -> npt.NDArray[Any]:
        return column({"role": "user", "content": column({"text": None, "image_url": None, **part}), "name": None})

    text = {"type": "text", "text": "what is 1 + 1?"}
    picture = {"type": "image_url", "image_url": {"url": "data:,", "detail": None}}
    params = {"temperature": 0.0, "max_tokens": 5}
    chat = Completer("tiny", launch=launch_in_threads, messages_column="talk", sampling_params=params)
    result = chat({"talk": column([{"role": "user", "content": [text]}], in_arrow(text), in_arrow(picture))})
    first, second, _ = result["completion"]
    assert first == second
    assert "takes no images" in result["completion_error"][2]  # and does not pass over them


def test_ray_data_callable_without_its_column() -> None:
    completer = Completer("tiny", launch=launch_in_threads)
    with pytest.raises(Exception, match="lacks a column"):
        completer({"text": np.array(["a"], object)})
