"""`/v1/responses` over real HTTP: the text of a chat, in items, whole and as typed events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import openai
import pytest
from deltas import deltas_of
from openai.types.responses import Response, ResponseStreamEvent
from openai_tools import HELLO, SILENT, Event, GetWeather, Ping
from pydantic import TypeAdapter
from running_app import RunningApp, running_app
from test_event_stream import KEEP_ALIVE_S, Client

from raypp.errors import EngineDeadError
from raypp.openai_api.body_preparer import BodyPreparer
from raypp.openai_api.error_bodies import parse_body
from raypp.openai_api.from_outputs import ResponseHead
from raypp.openai_api.response_answer import ResponseObject
from raypp.openai_api.response_request import ResponseRequest
from raypp.testing import FakeStage
from raypp.types import CompletionOutput, RequestMetrics, RequestOutput
from serve_app.answers import KEEP_ALIVE, EventStream
from serve_app.chunks import ResponseEventWriter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SAMPLED = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
GREEDY = {"temperature": 0.0, "ignore_eos": True}
TOOLS = [
    {"type": "function", "name": kind.__name__, "parameters": kind.model_json_schema(), "strict": True}
    for kind in (GetWeather, Ping)
]
CALL = {"name": "Ping", "arguments": '{"text": "a"}'}
CONVERSATION = [
    {"role": "user", "content": "hello"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
    {"type": "function_call", "call_id": "c1", **CALL},
    {"type": "function_call_output", "call_id": "c1", "output": "fine"},
]
CHAT_CONVERSATION = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "Well.", "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "c1", "content": "fine"},
]


@pytest.fixture(scope="module")
def app() -> Iterator[RunningApp]:
    with running_app(max_model_len=2048, kv_cache_bytes=1 << 25) as app:
        yield app


@pytest.fixture
def client(app: RunningApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def respond(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses", json={"input": "hello", **body})
    assert answer.status_code == 200, answer.text
    ResponseObject.model_validate(answer.json())
    Response.model_validate(answer.json())
    response: dict[str, Any] = answer.json()
    return response


def stream(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which has its place and OpenAI's shape."""
    answer = http.post("/v1/responses", json={"input": "hello", **body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return checked_events(answer.text)


def checked_events(text: str) -> list[dict[str, Any]]:
    events = []
    for number, block in enumerate(block for block in text.split("\n\n") if block and not block.startswith(":")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        EVENT.validate_python(event)
        events.append(event)
    return events


def text_of(response: dict[str, Any]) -> str:
    return Response.model_validate(response).output_text


def without_names(response: dict[str, Any]) -> Any:
    """Return a response without what is made up anew for each."""
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    times = {"id": "", "created_at": 0, "completed_at": 0}
    usage = {**response["usage"], "input_tokens_details": None}  # the second time more is cached
    return {**response, "output": output, "usage": usage, **times}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("is_long", [False, True])
def test_the_text_is_that_of_a_chat(http: httpx.Client, sampling: dict[str, Any], is_long: bool) -> None:
    given: dict[str, Any] = {"max_output_tokens": 24, **sampling}
    asked: dict[str, Any] = {"max_tokens": 24, **sampling, "messages": HELLO}
    if is_long:
        given |= {"input": CONVERSATION, "instructions": "You help.", "tools": TOOLS, "tool_choice": "none"}
        functions = [{"type": "function", "function": {**tool, "type": None}} for tool in TOOLS]
        asked |= {"messages": CHAT_CONVERSATION, "tools": functions, "tool_choice": "none"}
    chat = http.post("/v1/chat/completions", json=asked).json()
    response = respond(http, **given)
    assert text_of(response) == chat["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == chat["usage"]["completion_tokens"] == 24
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    events = stream(http, **given)
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == text_of(response)


def test_a_response_says_what_was_asked_for(http: httpx.Client) -> None:
    given = {
        "model": "tiny",
        "instructions": "You help.",
        "max_output_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "tools": TOOLS,
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
        "user": "u",
    }
    response = respond(http, **given, store=True, truncation="auto", request_id="mine")
    assert {name: response[name] for name in given if name != "tools"} == {
        name: value for name, value in given.items() if name != "tools"
    }
    assert [tool["name"] for tool in response["tools"]] == ["GetWeather", "Ping"]
    assert (response["id"], response["store"], response["truncation"]) == ("resp_mine", False, "disabled")


@pytest.mark.parametrize(
    "body",
    [
        {"max_output_tokens": 12, **SAMPLED},
        {"max_output_tokens": 12, "top_logprobs": 2, "include": ["message.output_text.logprobs"], **SAMPLED},
        {"tools": TOOLS, "tool_choice": "required", "seed": 1, "max_output_tokens": 200, **SILENT},
        {"structured_outputs": {"regex": "<think>\nwhy not\n</think>\n\nfine"}, "seed": 1, "max_output_tokens": 60},
        {"structured_outputs": {"choice": ["yes"]}},
    ],
    ids=["text", "logprobs", "calls", "thought", "complete"],
)
def test_a_stream_ends_with_the_whole_response(http: httpx.Client, body: dict[str, Any]) -> None:
    whole = respond(http, **body)
    events = stream(http, **body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {event["response"]["status"] for event in events[:2]} == {"in_progress"}
    assert events[-1]["type"] == f"response.{whole['status']}"
    final = events[-1]["response"]
    assert without_names(final) == without_names(whole)
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == final["output"]


def test_thoughts_are_items(http: httpx.Client) -> None:
    body = {"structured_outputs": {"regex": "<think>\nwhy not\n</think>\n\nfine"}, "max_output_tokens": 60}
    response = respond(http, **body)
    thought, message = response["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "why not"}])
    assert message["content"][0]["text"] == "fine"
    usage = response["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


def test_log_probabilities_go_with_the_text(http: httpx.Client) -> None:
    body = {"max_output_tokens": 6, "top_logprobs": 2, **SAMPLED}
    [entry, *_] = entries = respond(http, **body)["output"][0]["content"][0]["logprobs"]
    asked = {"messages": HELLO, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, **SAMPLED}
    chat = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in entries] == [(one["token"], one["logprob"]) for one in chat]
    assert len(entry["top_logprobs"]) == 2


def test_a_call_is_answered_in_the_next_turn(client: openai.OpenAI) -> None:
    """Three turns as people write them: the output goes back as it came, with what the functions said."""
    conversation: list[Any] = [{"role": "user", "content": "hello"}]
    for turn in range(3):
        response = client.responses.create(
            model="tiny",
            input=conversation,
            tools=TOOLS,  # type: ignore[arg-type]
            tool_choice="required",
            max_output_tokens=300,
            extra_body={**SILENT, "seed": turn},
        )
        calls = [item for item in response.output if item.type == "function_call"]
        assert (response.status, bool(calls)) == ("completed", True)
        conversation += response.output
        for call in calls:
            {"GetWeather": GetWeather, "Ping": Ping}[call.name].model_validate_json(call.arguments)
            conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "fine"})
    last = client.responses.create(model="tiny", input=conversation, tools=TOOLS, tool_choice="none")  # type: ignore[arg-type]
    assert {item.type for item in last.output} <= {"message", "reasoning"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_of_a_function_in_a_namespace_names_both(http: httpx.Client, is_stream: bool) -> None:
    space = {"type": "namespace", "name": "weather", "description": "Of today.", "tools": TOOLS[:1]}
    given = {"tools": [{"type": "web_search"}, space], "max_output_tokens": 200, "seed": 1, **SILENT}
    forced = {**given, "tool_choice": "required", "parallel_tool_calls": False}
    response = stream(http, **forced)[-1]["response"] if is_stream else respond(http, **forced)
    [call] = [item for item in response["output"] if item["type"] == "function_call"]
    assert (call["namespace"], call["name"]) == ("weather", "GetWeather")
    [named] = response["tools"]
    assert ([tool["name"] for tool in named["tools"]], named["type"]) == (["GetWeather"], "namespace")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "fine"}
    items = [{"role": "user", "content": "hello"}, *response["output"], output]
    assert respond(http, **given, input=items)["status"] in ("completed", "incomplete")


def test_forms_are_parsed_by_openais_client(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 200}
    extra = {**SILENT, "seed": 1}
    parsed = client.responses.parse(text_format=Event, extra_body=extra, **given)
    assert isinstance(parsed.output_parsed, Event)
    with client.responses.stream(text_format=Event, extra_body=extra, **given) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    assert final.output_parsed == parsed.output_parsed
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    as_object = client.responses.create(
        text={"format": {"type": "json_object"}}, temperature=0, extra_body=SILENT, **given
    )
    assert isinstance(json.loads(as_object.output_text), dict)


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_cannot_be_served_says_why(http: httpx.Client, is_stream: bool) -> None:
    schema = {"type": "array", "uniqueItems": True}
    for body, param, said in (
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the conversation so far as input"),
        ({"input": [{"role": "user", "content": "a " * 4000}]}, "input", "maximum context length"),
        ({"text": {"format": {"type": "json_schema", "schema": schema}}}, "text.format", "uniqueItems"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"model": "other"}, "model", "no model"),
    ):
        answer = http.post("/v1/responses", json={"input": "hello", **body, "stream": is_stream})
        error = answer.json()["error"]
        assert (answer.status_code in (400, 404), error["param"]) == (True, param), answer.text
        assert said in error["message"]


def test_a_client_that_leaves_frees_its_row() -> None:
    with (
        running_app(stage_factory=FakeStage(step_ms=50), num_stages=1) as slow,
        httpx.Client(base_url=slow.url, timeout=30) as http,
    ):
        body = {"input": "hello", "stream": True, "max_output_tokens": 2000, "ignore_eos": True}
        with http.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(4)][::3] == ["event: response.created", "event: response.in_progress"]
            assert slow.stats()["num_running"] == 1
        slow.wait_until(lambda: not slow.stats()["num_running"], "the row is free")
        assert slow.context.admission.num_unfinished == 0


def output_of(text: str) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=[1],
        outputs=[CompletionOutput(index=0, text=text, token_ids=[2], finish_reason=None, stop_reason=None)],
        finished=False,
        metrics=RequestMetrics(arrival_time_s=0.0, num_cached_tokens=0),
    )


async def dying(*texts: str, after: float = 0) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    await asyncio.sleep(after)
    async for delta in deltas_of(map(output_of, texts)):
        yield delta
    raise EngineDeadError("the engine died")


@pytest.fixture
def writer(app: RunningApp) -> ResponseEventWriter:
    preparer: BodyPreparer = app.context.preparer
    prepared = asyncio.run(preparer.response(parse_body(ResponseRequest, {"input": "hello"})))
    return ResponseEventWriter(ResponseHead.new("resp_", "tiny"), prepared)


def test_an_error_on_the_way_ends_items_and_response(writer: ResponseEventWriter) -> None:
    async def text() -> str:
        return "".join([events async for events in writer.events(dying("Hel", "Hello"))])

    events = checked_events(asyncio.run(text()))
    last = events[-1]["response"]
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.failed"]
    assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
    assert "the engine died" in last["error"]["message"]
    [message] = last["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "Hello")


def test_an_error_while_a_stream_waits_is_a_failed_response(writer: ResponseEventWriter) -> None:
    async def text() -> str:
        client = Client()
        events = writer.events(dying(after=10 * KEEP_ALIVE_S))
        response = await EventStream.opened(client.receive, events, KEEP_ALIVE_S, writer.failure)
        await response({"type": "http"}, client.receive, client.send)
        return client.text

    said = asyncio.run(text())
    assert said.startswith(KEEP_ALIVE)
    kinds = [event["type"] for event in checked_events(said)]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
