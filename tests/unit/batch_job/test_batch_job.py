"""Whole jobs on a fake engine: every line answered once, whatever happened before."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from batch_engines import ShoutingEngine, Starter, make_settings, read_errors, read_output, shout, texts, write_input
from hypothesis import given, settings
from hypothesis import strategies as st

import raypp
from raypp.api.tokenizer import Tokenizer
from raypp.batch_job import job
from raypp.batch_job.job import BatchJob, Window
from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, EngineDeadError, ModelLoadError, QueueFullError, RequestError
from raypp.openai_api.body_preparer import BodyPreparer
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.from_outputs import ResponseHead
from raypp.openai_api.response_request import ResponseRequest
from raypp.types import RequestOutput


def run(folder: Path, *engines: ShoutingEngine, **changes: Any) -> tuple[Starter, list[str]]:
    said: list[str] = []
    starter = Starter(*engines)
    asyncio.run(BatchJob(make_settings(folder, **changes), starter).run(said.append))
    return starter, said


def write_lines(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_every_form_of_a_line(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "chat"}], "chat_template_kwargs": {"enable_thinking": False}}
    write_lines(
        tmp_path,
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny", **chat}},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": ["x", "y"], "echo": True}},
        {"custom_id": "c", "prompt": "plain", "temperature": 0, "max_tokens": 5},
        {"custom_id": "d", "priority": -3, **chat},
    )
    engine = ShoutingEngine()
    _, said = run(tmp_path, engine, defaults={"max_tokens": 7, "temperature": 0.5})
    lines = {line["custom_id"]: line for line in read_output(tmp_path)}
    assert list(lines["a"]) == ["id", "custom_id", "response", "error"]
    assert lines["a"]["error"] is None
    assert lines["a"]["response"]["status_code"] == 200
    assert lines["a"]["response"]["body"]["object"] == "chat.completion"
    assert lines["a"]["response"]["body"]["choices"][0]["message"]["content"] == "CHAT"
    assert [choice["text"] for choice in lines["b"]["response"]["body"]["choices"]] == ["xX", "yY"]
    assert lines["c"]["response"]["body"]["choices"][0]["text"] == "PLAIN"
    assert lines["c"]["response"]["body"]["usage"]["total_tokens"] == 5
    assert len({line["id"] for line in lines.values()}) == 4
    assert sorted((params.max_tokens, params.temperature) for params in engine.params) == [(5, 0), *[(7, 0.5)] * 3]
    assert [prompt.endswith("<think>\n\n</think>\n\n") for prompt in engine.prompts if "chat" in prompt] == [True] * 2
    assert sorted(engine.priorities) == [-3, 0, 0, 0]
    assert engine.num_closed == 1
    assert "4 completed, 0 failed" in said[-1]


def test_the_models_defaults_hold_where_neither_line_nor_job_says_a_value(tmp_path: Path) -> None:
    conversation = {"messages": [{"role": "user", "content": "hi"}]}
    write_lines(tmp_path, {"custom_id": "a", "prompt": "x", "top_k": 3}, {"custom_id": "b", **conversation})
    engine = ShoutingEngine()
    engine.sampling_defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    run(tmp_path, engine, defaults={"temperature": 0.5})
    assert sorted((p.temperature, p.top_k, p.max_tokens) for p in engine.params) == [(0.5, 3, 9), (0.5, 20, 9)]


def test_a_line_becomes_what_the_same_body_becomes_over_http(tmp_path: Path) -> None:
    """Also where the template begins a thought: a form then comes behind it."""
    tiny, folder = Path(raypp.__file__).parent / "assets" / "tiny", tmp_path / "thinker"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(tiny / name)
    template = (tiny / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template + "{{- '<think>\\n' -}}")
    body = {"messages": [{"role": "user", "content": "so\n</think>\n\n{}"}], "response_format": {"type": "json_object"}}
    write_lines(tmp_path, {"custom_id": "a", "seed": 1, **body})
    engine = ShoutingEngine()
    engine.tokenizer = Tokenizer(folder)
    run(tmp_path, engine)
    preparer = BodyPreparer(engine.tokenizer, None, max_model_len=engine.max_model_len)
    expected = asyncio.run(preparer.prepare(ChatRequest(seed=1, **body)))
    assert engine.prompts == [expected.prompts[0].text]
    assert engine.params == [expected.params]
    assert "</think>" in str(expected.params.structured_outputs)
    [line] = read_output(tmp_path)
    message = line["response"]["body"]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("SO\n</THINK>\n\n{}", "")


def test_the_syntax_that_the_engines_settings_name(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "F"}}]
    text = "[THINK]so[/THINK]yes[TOOL_CALLS]f[ARGS]{}"
    write_lines(tmp_path, {"custom_id": "a", "tools": tools, "messages": [{"role": "user", "content": text}]})
    run(tmp_path, ShoutingEngine(), model_settings={"tool_call_parser": "mistral", "reasoning_parser": "mistral"})
    [line] = read_output(tmp_path)
    [choice] = line["response"]["body"]["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("SO", "YES")
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "F", "arguments": "{}"}
    with pytest.raises(ConfigError, match=r"names an unknown syntax.*mistral_json"):
        make_settings(tmp_path, model_settings={"tool_call_parser": "mistrel"})


def test_an_error_of_the_engine_about_a_form_names_the_field_that_asked_for_it(tmp_path: Path) -> None:
    def refuse(number: int) -> None:
        raise RequestError("this json_schema cannot be compiled", param="structured_outputs")

    chat = {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}
    write_lines(tmp_path, {"custom_id": "a", **chat}, {"custom_id": "b", "prompt": "a", "structured_outputs": {}})
    run(tmp_path, ShoutingEngine(on_question=refuse))
    params = {line["custom_id"]: line["error"]["param"] for line in read_errors(tmp_path)}
    assert params == {"a": "response_format", "b": "structured_outputs"}


def test_lines_bring_no_template(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "mine"}}
    write_lines(tmp_path, {"custom_id": "a", **chat})
    run(tmp_path, ShoutingEngine())
    [line] = read_errors(tmp_path)
    assert line["response"]["status_code"] == 400
    assert "chat_template_kwargs must not have chat_template" in line["error"]["message"]


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ({"url": "/v1/completions", "body": {"prompt": "a", "temprature": 1}}, 400, "did you mean temperature?"),
        ({"promt": "a"}, 400, "unknown field promt; expected: did you mean prompt?"),
        ({"url": "/v1/completions", "body": {"prompt": "a", "model": "gpt-5"}}, 404, "there is no model 'gpt-5'"),
        ({"url": "/v1/chat/completions", "body": {"messages": []}}, 400, "invalid value for messages"),
        ({"prompt": "a", "stream": True}, 400, "cannot be streamed"),
        ({"url": "/v1/responses", "body": {"input": "a", "stream": True}}, 400, "cannot be streamed"),
        ({"input": "a", "previous_response_id": "resp_1"}, 400, "no responses are kept here"),
        ({"input": "a", "background": True}, 400, "without background; hint: no responses are kept"),
        ({"input": []}, 400, "input"),
        ({"prompt": "x" * 100_000}, 400, "max_model_len"),
        ({"prompt": "nan"}, 500, "logits are not finite"),
        ({"prompt": "poison"}, 503, "an encoder died"),
        ({"prompt": ""}, 400, "no tokens"),
        ({"text": "a"}, 400, "prompt is missing"),
        ({"prompt": "crash"}, 500, "internal error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            400,
            "takes no images",
        ),
    ],
)
def test_what_is_wrong_with_a_line_is_its_answer(tmp_path: Path, line: dict[str, Any], status: int, words: str) -> None:
    write_lines(tmp_path, {"custom_id": "bad", **line}, {"custom_id": "good", "prompt": "a"})
    _, said = run(tmp_path, ShoutingEngine())
    assert [line["custom_id"] for line in read_output(tmp_path)] == ["good"]
    [failed] = read_errors(tmp_path)
    assert (failed["custom_id"], failed["error"]["line"]) == ("bad", 1)
    assert failed["response"]["status_code"] == status
    assert words in failed["error"]["message"]
    assert "1 completed, 1 failed" in said[-2]
    assert said[-1] == f"errors are in {tmp_path / 'out.jsonl.errors.jsonl'}"


def test_a_line_that_finds_no_room_waits_for_others(tmp_path: Path) -> None:
    def refuse(_: int) -> None:
        if engine.num_at_once > 2:
            raise QueueFullError("no room", retry_after_s=0)

    ids = write_input(tmp_path, 10)
    engine = ShoutingEngine(num_turns=5, on_question=refuse)
    run(tmp_path, engine, max_in_flight=6)
    assert engine.num_asked > 10
    assert set(texts(tmp_path)) == set(ids)


def test_a_line_that_finds_no_room_when_it_is_alone_fails(tmp_path: Path) -> None:
    def refuse(_: int) -> None:
        raise QueueFullError("no room", retry_after_s=0)

    write_input(tmp_path, 3)
    run(tmp_path, ShoutingEngine(on_question=refuse))
    assert [line["response"]["status_code"] for line in read_errors(tmp_path)] == [429] * 3


BAD_INPUT = b"""{"custom_id": "a", "prompt": "x"}
{"custom_id": "a", "prompt": "y"}
[1]

{"custom_id": "b", "prompt": "\xff"}
{"custom_id": "c", "url": "/v1/embeddings", "body": {"input": "x"}}
{"prompt": "z"}
{"custom_id": "b", "url": "/v1/responses", "body": {"input": "z", "stream": false}}"""


def test_bad_lines_stop_no_others(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(BAD_INPUT)
    _, said = run(tmp_path, ShoutingEngine())
    assert {line["custom_id"] for line in read_output(tmp_path)} == {"a", "b"}
    found = {line["error"]["line"]: (line["custom_id"], line["error"]["param"]) for line in read_errors(tmp_path)}
    assert found == {2: ("a", "custom_id"), 3: (None, None), 5: (None, None), 6: ("c", "url"), 7: (None, "custom_id")}
    assert said[-2].endswith("in all: 7 lines, 2 completed, 5 failed")
    starter, said = run(tmp_path)
    assert starter.num_started == 0
    assert said[0] == "nothing to do: 7 lines, 2 completed, 5 failed"


def test_only_bad_lines_need_no_engine(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"a\nb\n")
    starter, said = run(tmp_path)
    assert starter.num_started == 0
    assert said[-2].endswith("in all: 2 lines, 0 completed, 2 failed")
    assert read_output(tmp_path) == []
    assert [line["error"]["line"] for line in read_errors(tmp_path)] == [1, 2]


def test_bad_lines_are_told_of_before_an_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(BAD_INPUT)

    async def cannot_start(_: EngineConfig) -> ShoutingEngine:
        assert len(read_errors(tmp_path)) == 5
        raise ConfigError("there is no such model")

    with pytest.raises(ConfigError, match="no such model"):
        asyncio.run(BatchJob(make_settings(tmp_path), cannot_start).run())
    run(tmp_path, ShoutingEngine())
    assert (len(read_output(tmp_path)), len(read_errors(tmp_path))) == (2, 5)


def test_without_the_error_file_failed_lines_are_tried_again(tmp_path: Path) -> None:
    write_lines(tmp_path, {"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "poison"}, {})
    run(tmp_path, ShoutingEngine())
    before = read_output(tmp_path)
    (tmp_path / "out.jsonl.errors.jsonl").unlink()
    run(tmp_path, (engine := ShoutingEngine()))
    assert engine.prompts == ["poison"]
    assert read_output(tmp_path) == before
    assert sorted(line["error"]["line"] for line in read_errors(tmp_path)) == [2, 3]


def test_a_response_is_what_the_same_body_is_over_http(tmp_path: Path) -> None:
    """`/v1/responses` prepares and answers with the same functions; what is left are the job's own defaults."""
    body = {"input": [{"role": "user", "content": "hi"}], "instructions": "be", "metadata": {"a": "b"}, "top_p": None}
    write_lines(tmp_path, {"custom_id": "a", "url": "/v1/responses", "body": {"model": "tiny", **body}})
    engine = ShoutingEngine()
    run(tmp_path, engine, defaults={"max_tokens": 7, "top_p": 0.5, "logprobs": 2, "n": 2, "prompt_logprobs": 1})
    [line] = read_output(tmp_path)
    found = line["response"]["body"]
    assert found["object"] == "response"
    assert found["output"][0]["content"][0]["text"] == "HI"
    [params] = engine.params
    request = ResponseRequest(seed=params.seed, max_output_tokens=7, top_logprobs=2, **body | {"top_p": 0.5})
    prepared = asyncio.run(BodyPreparer(engine.tokenizer, None, max_model_len=1000).response(request))
    assert engine.prompts == [prepared.prompts[0].text]
    assert params == prepared.params
    expected = prepared.response(ResponseHead.new("resp_", "tiny"), [shout("hi", "x")]).model_dump()
    for name in ("id", "created_at", "completed_at"):
        assert type(found.pop(name)) is type(expected.pop(name))
    assert found["output"][0].pop("id")[:4] == expected["output"][0].pop("id")[:4]
    assert found == expected


def test_defaults_have_the_names_of_each_url(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    write_lines(
        tmp_path,
        {"custom_id": "a", "prompt": "a"},
        {"custom_id": "b", **chat},
        {"custom_id": "c", "input": "a"},
        {"custom_id": "d", "logprobs": False, **chat},
    )
    engine = ShoutingEngine()
    defaults = {"n": 2, "logprobs": 3, "max_tokens": 5, "logit_bias": {"7": 1.0}}
    run(tmp_path, engine, defaults=defaults, max_in_flight=1)
    assert read_errors(tmp_path) == []
    assert [(p.n, p.logprobs, p.max_tokens) for p in engine.params] == [(2, 3, 5), (2, 3, 5), (1, 3, 5), (2, None, 5)]
    assert [dict(p.logit_bias or {}) for p in engine.params] == [{7: 1.0}] * 4


def test_a_second_run_finds_nothing_to_do(tmp_path: Path) -> None:
    ids = write_input(tmp_path, 5)
    run(tmp_path, ShoutingEngine())
    before = (tmp_path / "out.jsonl").read_bytes()
    starter, said = run(tmp_path)
    assert starter.num_started == 0
    assert said == ["nothing to do: 5 lines, 5 completed, 0 failed"]
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert set(texts(tmp_path)) == set(ids)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_torn_anywhere_the_next_run_completes_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("job")
    prompts = data.draw(st.lists(st.sampled_from(["good", "poison", None]), min_size=1, max_size=12))
    lines = [{"custom_id": f"id-{i}", "prompt": prompt} if prompt else {} for i, prompt in enumerate(prompts)]
    write_lines(folder, *lines)
    run(folder, ShoutingEngine())
    files = [folder / "out.jsonl", folder / "out.jsonl.errors.jsonl"]
    for _ in range(2):
        for file in files:
            whole = file.read_bytes()
            file.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        num_kept = sum(file.read_bytes().count(b"\n") for file in files)
        _, said = run(folder, ShoutingEngine())
        assert said[0].startswith(
            "nothing" if num_kept == len(prompts) else f"{len(prompts)} lines, {num_kept} of them"
        )
        completed = [line["custom_id"] for line in read_output(folder)]
        failed = [line["error"]["line"] - 1 for line in read_errors(folder)]
        assert sorted(completed) == sorted(f"id-{i}" for i, prompt in enumerate(prompts) if prompt == "good")
        assert sorted(failed) == [i for i, prompt in enumerate(prompts) if prompt != "good"]


def test_cancelled_at_any_moment_the_next_run_completes_it(tmp_path: Path) -> None:
    ids = write_input(tmp_path, 30)

    async def run_until_question(number: int) -> bool:
        engine = ShoutingEngine(num_turns=5, on_question=lambda n: task.cancel() if n == number else None)
        task = asyncio.create_task(BatchJob(make_settings(tmp_path, max_in_flight=4), Starter(engine)).run())
        await asyncio.wait([task])
        return task.cancelled()

    num_lines_after = []
    while asyncio.run(run_until_question(1 + len(num_lines_after))):
        num_lines_after.append(len(texts(tmp_path)))
    assert num_lines_after == sorted(num_lines_after)
    assert len(num_lines_after) > 3
    assert set(texts(tmp_path)) == set(ids)


def test_a_dead_engine_is_replaced(tmp_path: Path) -> None:
    ids = write_input(tmp_path, 20)
    engines = [ShoutingEngine(lives_for=7), ShoutingEngine(lives_for=0), ShoutingEngine(lives_for=0), ShoutingEngine()]
    starter, _ = run(tmp_path, *engines, max_in_flight=3)
    assert starter.num_started == 4
    assert [engine.num_closed for engine in engines] == [1, 1, 1, 1]
    assert set(texts(tmp_path)) == set(ids)


def test_engines_that_die_without_an_answer_end_the_job(tmp_path: Path) -> None:
    ids = write_input(tmp_path, 4)
    with pytest.raises(EngineDeadError):
        run(tmp_path, *[ShoutingEngine(lives_for=0) for _ in range(3)])
    assert read_output(tmp_path) == []
    run(tmp_path, ShoutingEngine())
    assert set(texts(tmp_path)) == set(ids)


@pytest.mark.parametrize(("limits", "expected"), [({"max_in_flight": 5}, 5), ({"max_in_flight_bytes": 130}, 3)])
def test_the_window_bounds_what_is_at_the_engine(tmp_path: Path, limits: dict[str, int], expected: int) -> None:
    write_input(tmp_path, 50)  # lines of 36 to 38 bytes
    engine = ShoutingEngine(num_turns=100)
    run(tmp_path, engine, **limits)
    assert engine.most_at_once == expected


@pytest.mark.parametrize(("max_requests", "max_bytes"), [(2, 1000), (1000, 100)])
def test_the_window_gives_back_what_has_left(max_requests: int, max_bytes: int) -> None:
    async def use() -> None:
        window = Window(max_requests, max_bytes)
        await window.enter(40)  # stays: one that is alone always gets in
        async with asyncio.timeout(10):
            for _ in range(5):
                await window.enter(60)
                window.leave(60)

    asyncio.run(use())


@pytest.fixture
def synced_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How large the output was whenever it was brought to the disk."""
    sizes: list[int] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        fsync(fd)
        if os.fstat(fd).st_ino == (tmp_path / "out.jsonl").stat().st_ino:
            sizes.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fsync", watched)
    return sizes


def test_at_the_end_every_answer_is_on_the_disk(tmp_path: Path, synced_bytes: list[int]) -> None:
    write_input(tmp_path, 5)
    run(tmp_path, ShoutingEngine())
    assert synced_bytes[-1:] == [(tmp_path / "out.jsonl").stat().st_size]


def test_answers_come_to_the_disk_while_others_are_waited_for(
    tmp_path: Path, synced_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class WaitingEngine(ShoutingEngine):
        async def complete(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
            if self.num_asked:
                with suppress(TimeoutError):
                    async with asyncio.timeout(10):
                        while not synced_bytes:
                            await asyncio.sleep(0.005)
                seen.append(bool(synced_bytes))
            return await super().complete(*args, **kwargs)

    monkeypatch.setattr(job, "_SYNC_INTERVAL_S", 0.01)
    write_input(tmp_path, 2)
    run(tmp_path, WaitingEngine(), max_in_flight=1)
    assert seen == [True]


def test_lines_without_a_seed_get_one_from_their_name(tmp_path: Path) -> None:
    write_lines(tmp_path, {"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "x", "seed": 5})
    seeds = []
    for model_seed in (0, 0, 1):
        engine = ShoutingEngine()
        run(tmp_path, engine, model_seed=model_seed, overwrite=True)
        assert engine.params[1].seed == 5
        seeds.append(engine.params[0].seed)
    assert seeds[0] is not None
    assert seeds[0] == seeds[1] != seeds[2]


def test_another_job_may_not_go_on(tmp_path: Path) -> None:
    write_input(tmp_path, 3)
    run(tmp_path, ShoutingEngine(), defaults={"temperature": 0})
    with pytest.raises(ConfigError, match=r"default temperature: 0 then, 0.5 now"):
        run(tmp_path, defaults={"temperature": 0.5})
    with pytest.raises(ConfigError, match="model: 'tiny' then, 'other' now"):
        run(tmp_path, model="other", defaults={"temperature": 0})
    write_input(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"the input: 3 requests in .* bytes then, 4 in"):
        run(tmp_path, defaults={"temperature": 0})
    assert len(texts(tmp_path)) == 3
    run(tmp_path, ShoutingEngine(), overwrite=True)
    assert len(texts(tmp_path)) == 4


def test_a_job_whose_engine_never_started_may_be_corrected(tmp_path: Path) -> None:
    write_input(tmp_path, 3)

    async def open_nothing(config: EngineConfig) -> ShoutingEngine:
        raise ModelLoadError("there is no model 'tinny'")

    with pytest.raises(ModelLoadError):
        asyncio.run(BatchJob(make_settings(tmp_path, model="tinny"), open_nothing).run(print))
    run(tmp_path, ShoutingEngine())
    assert len(texts(tmp_path)) == 3


def test_errors_of_one_job_are_in_one_file(tmp_path: Path) -> None:
    write_lines(tmp_path, {"custom_id": "a", "prompt": "x"}, {})
    run(tmp_path, ShoutingEngine())
    with pytest.raises(ConfigError, match=r"error file: 'out.jsonl.errors.jsonl' then, 'other.jsonl' now"):
        run(tmp_path, error_path=tmp_path / "other.jsonl")
    run(tmp_path, ShoutingEngine(), error_path=tmp_path / "other.jsonl", overwrite=True)
    assert (tmp_path / "other.jsonl").read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.errors.jsonl"])
def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, name: str) -> None:
    write_input(tmp_path, 3)
    (tmp_path / name).write_text("my diary\n")
    with pytest.raises(ConfigError, match="exists without a manifest"):
        run(tmp_path)
    assert (tmp_path / name).read_text() == "my diary\n"


def test_an_error_file_that_cannot_be_written_is_told_of_first(tmp_path: Path) -> None:
    write_input(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"the error file cannot be written; got: .*No such file"):
        run(tmp_path, error_path=tmp_path / "no" / "errors.jsonl")
    run(tmp_path, ShoutingEngine())
    assert len(read_output(tmp_path)) == 3


@pytest.mark.parametrize("same", ["in.jsonl", "out.jsonl", "sub/../out.jsonl", "out.jsonl.job.json", "link", "hard"])
def test_no_two_files_of_a_job_are_one(tmp_path: Path, same: str) -> None:
    write_input(tmp_path, 3)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("in.jsonl")
    (tmp_path / "hard").hardlink_to(tmp_path / "in.jsonl")
    with pytest.raises(ConfigError, match="are the same file"):
        make_settings(tmp_path, error_path=tmp_path / same)
