"""`/v1/messages` over real HTTP: the text of a chat, in blocks, whole and as typed events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from deltas import deltas_of
from running_app import RunningApp, running_app
from test_event_stream import KEEP_ALIVE_S, Client
from test_responses import dying, output_of

from raypp.openai_api.anthropic_answer import MessageAnswer, MessageErrorResponse, PreparedMessage
from raypp.openai_api.anthropic_request import MessagesRequest
from raypp.openai_api.error_bodies import parse_body
from raypp.openai_api.from_outputs import ResponseHead
from raypp.types import RequestOutput
from serve_app.answers import KEEP_ALIVE, EventStream
from serve_app.chunks import MessageEventWriter

SAMPLED = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOL = {"name": "count", "input_schema": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
USE = {"type": "tool_use", "id": "c1", "name": "count", "input": {"n": 1}}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"n": 1}'}}
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
CONVERSATION = [
    HELLO,
    {"role": "assistant", "content": [{"type": "text", "text": "Well."}, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "fine"}]},
]
CHAT_CONVERSATION = [
    {"role": "system", "content": "You help."},
    HELLO,
    {"role": "assistant", "content": "Well.", "tool_calls": [CHAT_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "fine"},
]


@pytest.fixture(scope="module")
def app() -> Iterator[RunningApp]:
    with running_app(max_model_len=1024) as app:
        yield app


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/messages?beta=true", json={"messages": [HELLO], "max_tokens": 12, **body})


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = post(http, **body)
    assert answer.status_code == 200, answer.text
    MessageAnswer.model_validate(answer.json())
    message: dict[str, Any] = answer.json()
    return message


def stream(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    answer = post(http, **body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return events_of(answer.text)


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for block in (block for block in text.split("\n\n") if block and not block.startswith(":")):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def told(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that events tell, as clients put it together."""
    first, *rest, ended, stop = events
    assert (first["type"], ended["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = {**first["message"], **ended["delta"], "usage": ended["usage"]}
    inputs: dict[int, str] = {}
    for event in rest:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, (_, (field, new)) = message["content"][event["index"]], event["delta"].items()
            if field == "partial_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + new
            else:
                block[field] += new
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def without_names(message: dict[str, Any]) -> Any:
    content = [{**block, "id": ""} for block in message["content"]]
    counted = message["usage"]
    num_input = counted["input_tokens"] + counted["cache_read_input_tokens"]  # the second time more is cached
    return {**message, "id": "", "content": content, "usage": (num_input, counted["output_tokens"])}


def test_thoughts_are_counted(http: httpx.Client) -> None:
    form = {"structured_outputs": {"regex": "<think>\nwhy not\n</think>\n\nfine"}, "max_tokens": 60}
    chat = http.post("/v1/chat/completions", json={"messages": [HELLO], **form}).json()
    num_thought = chat["usage"]["completion_tokens_details"]["reasoning_tokens"]
    usage = ask(http, **form)["usage"]
    assert 0 < num_thought < usage["output_tokens"]
    assert usage["output_tokens_details"] == {"thinking_tokens": num_thought}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("is_long", [False, True])
def test_the_text_is_that_of_a_chat(http: httpx.Client, sampling: dict[str, Any], is_long: bool) -> None:
    given: dict[str, Any] = {"max_tokens": 24, **sampling}
    asked: dict[str, Any] = {"max_tokens": 24, "messages": [HELLO], **sampling}
    if is_long:
        given |= {"messages": CONVERSATION, "system": "You help.", "tools": [TOOL]}
        asked |= {"messages": CHAT_CONVERSATION, "tools": [CHAT_TOOL]}
    chat = http.post("/v1/chat/completions", json=asked).json()
    message = ask(http, **given)
    assert [block["text"] for block in message["content"]] == [chat["choices"][0]["message"]["content"]]
    assert message["stop_reason"] == "max_tokens"
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"] == 24
    import anthropic.types  # takes seconds

    assert usage.keys() == anthropic.types.Usage.model_fields.keys() - {"speed"}
    assert without_names(told(stream(http, **given))) == without_names(message)
    read = {name: given[name] for name in ("messages", "system", "tools") if name in given} or {"messages": [HELLO]}
    counted = http.post("/v1/messages/count_tokens", json=read)
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_a_message_that_the_model_goes_on_with(http: httpx.Client) -> None:
    begun = {"role": "assistant", "content": "Well"}
    chat = {"messages": [HELLO, begun], "add_generation_prompt": False, "continue_final_message": True, **GREEDY}
    expected = http.post("/v1/chat/completions", json={**chat, "max_tokens": 12}).json()
    message = ask(http, messages=[HELLO, begun], **GREEDY)
    assert [block["text"] for block in message["content"]] == [expected["choices"][0]["message"]["content"]]


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_cannot_be_served_says_why(http: httpx.Client, is_stream: bool) -> None:
    for body, status, kind, said in (
        ({"model": "other"}, 404, "not_found_error", "no model"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"stop": ["a"]}, 400, "invalid_request_error", "unknown field stop"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice: tool_choice without tools"),
        ({"messages": [{**HELLO, "content": "a " * 4000}]}, 400, "invalid_request_error", "maximum context length"),
    ):
        answer = post(http, **body, stream=is_stream)
        assert answer.status_code == status, answer.text
        error = MessageErrorResponse.model_validate(answer.json()).error
        assert error.type == kind
        assert said in error.message
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = http.post(path, content=b"{", headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
        assert http.get(path).json()["error"]["type"] == "invalid_request_error"
    assert http.post("/v1/messages/batches", json={}).json()["error"]["type"] == "not_found_error"
    assert "type" not in http.post("/v1/chat/completions", json={}).json()


@pytest.fixture
def prepared(app: RunningApp) -> PreparedMessage:
    body = parse_body(MessagesRequest, {"messages": [HELLO], "max_tokens": 5, "tools": [TOOL]})
    return asyncio.run(app.context.preparer.message(body))


def outputs_of(text: str, num_chars: int, finish_reason: Any, stop_reason: Any) -> list[RequestOutput]:
    """Return what an engine returns of a text, as it comes."""
    outputs = []
    for end in [*range(0, len(text), num_chars), len(text)]:
        output = output_of(text[:end])
        [completion] = output.outputs
        outputs.append(replace(output, outputs=[replace(completion, token_ids=[2] * end)]))
    ended = replace(outputs[-1].outputs[0], finish_reason=finish_reason, stop_reason=stop_reason)
    return [*outputs[:-1], replace(outputs[-1], outputs=[ended])]


THOUGHT = "<think>\nwhy\n</think>\n\n"
CALL = '<tool_call>\n{"name": "count", "arguments": {"n": 1}}\n</tool_call>'


@pytest.mark.parametrize("num_chars", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "ended", "kinds", "reason"),
    [
        (f"{THOUGHT}fine", ("stop", None), ["thinking", "text"], ("end_turn", None)),
        (
            f"{THOUGHT}so {CALL}\n{CALL}",
            ("stop", None),
            ["thinking", "text", "tool_use", "tool_use"],
            ("tool_use", None),
        ),
        ("fi", ("stop", "ne"), ["text"], ("stop_sequence", "ne")),
        ("fi", ("stop", 17), ["text"], ("end_turn", None)),
        (f"so {CALL}", ("length", None), ["text", "tool_use"], ("max_tokens", None)),
        ("<think>\nwh", ("length", None), ["thinking"], ("max_tokens", None)),
        ("", ("stop", None), [], ("end_turn", None)),
    ],
)
def test_a_stream_tells_the_whole_message(
    prepared: PreparedMessage,
    text: str,
    ended: tuple[str, Any],
    kinds: list[str],
    reason: tuple[str, str | None],
    num_chars: int,
) -> None:
    head, outputs = ResponseHead.new("msg_", "tiny"), outputs_of(text, num_chars, *ended)

    async def streamed() -> str:
        writer = MessageEventWriter(head, prepared)
        return "".join([events async for events in writer.events(deltas_of(outputs))])

    message = prepared.response(head, [outputs[-1]]).model_dump()
    assert [block["type"] for block in message["content"]] == kinds
    assert (message["stop_reason"], message["stop_sequence"]) == reason
    assert (message["id"], message["usage"]["output_tokens"]) == (head.id, len(text))
    assert without_names(told(events_of(asyncio.run(streamed())))) == without_names(message)


def test_an_error_on_the_way_ends_the_stream(prepared: PreparedMessage) -> None:
    writer = MessageEventWriter(ResponseHead.new("msg_", "tiny"), prepared)

    async def text() -> str:
        return "".join([events async for events in writer.events(dying("Hel", "Hello"))])

    events = events_of(asyncio.run(text()))
    kinds = ["message_start", "content_block_start", "content_block_delta", "content_block_delta", "error"]
    assert [event["type"] for event in events] == kinds
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert "the engine died" in events[-1]["error"]["message"]


def test_an_error_while_a_stream_waits_is_its_only_event(prepared: PreparedMessage) -> None:
    writer = MessageEventWriter(ResponseHead.new("msg_", "tiny"), prepared)

    async def text() -> str:
        client = Client()
        events = writer.events(dying(after=10 * KEEP_ALIVE_S))
        response = await EventStream.opened(client.receive, events, KEEP_ALIVE_S, writer.failure)
        await response({"type": "http"}, client.receive, client.send)
        return client.text

    said = asyncio.run(text())
    assert said.startswith(KEEP_ALIVE)
    assert [event["type"] for event in events_of(said)] == ["error"]
