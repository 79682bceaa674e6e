"""What is wrong with a body is said over HTTP, whatever is wrong with it; and what clients look for is there."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import threading
from typing import Any

import httpx
import openai
import pytest
from running_app import RunningApp, running_app

from raypp.openai_api.error_bodies import decode_json
from serve_app import middleware

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"role": "user", "content": "hello"}
AS_JSON = {"Content-Type": "application/json"}
PLAIN = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


PACKED = gzip.compress(PLAIN, mtime=0)  # a test's name is the same in all processes


@pytest.mark.parametrize(
    ("content", "headers", "said"),
    [
        (PLAIN, {}, "no Content-Type; expected: the header Content-Type: application/json"),
        (PLAIN, {"Content-Type": "text/plain"}, "Content-Type: text/plain"),
        (
            gzip.compress(PLAIN, mtime=0),
            {**AS_JSON, "Content-Encoding": "gzip"},
            "compressed; got: Content-Encoding: gzip",
        ),
        (b'{"prompt": "\xff"}', AS_JSON, "not valid UTF-8; got: the byte 0xff at position 12"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", AS_JSON, "at most 4,300 digits"),
        (b'{"prompt": ' + b"[" * 100_000, AS_JSON, "nesting of the body is too deep"),
        (b"", AS_JSON, "the body is empty"),
        (b'{"prompt": "a", "tempratur": 1}', AS_JSON, "did you mean temperature?"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(
    http: httpx.Client, content: bytes, headers: dict[str, str], said: str
) -> None:
    assert said in error_of(http.post(TEXT, content=content, headers=headers))["message"]


def test_unknown_fields_are_ignored_and_named(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a", "max_tokens": 1, "num_ctx": 4096, "a novel\r\nfield": {"x": 1}, "user": "me", "echo": False}
    with caplog.at_level(logging.WARNING, "raypp"):
        for is_stream in (False, True):
            answer = http.post(TEXT, json={**body, "stream": is_stream})
            assert answer.status_code == 200
            assert answer.headers["X-Raypp-Ignored-Fields"] == "user, num_ctx, a%20novel%0D%0Afield"
    assert sum("'num_ctx', which is ignored" in message for message in caplog.messages) == 1
    assert "X-Raypp-Ignored-Fields" not in http.post(TEXT, json={"prompt": "a", "max_tokens": 1}).headers
    counted = {"messages": [HELLO], "max_tokens": 3, "mcp_servers": []}  # of a message, but not of its count
    answer = http.post("/v1/messages/count_tokens", json=counted)
    assert (answer.status_code, answer.headers["X-Raypp-Ignored-Fields"]) == (200, "max_tokens")


def test_unknown_fields_are_refused_where_that_is_asked_for() -> None:
    with running_app({"unknown_fields": "refuse"}) as app, httpx.Client(base_url=app.url, timeout=60) as http:
        error = error_of(http.post(TEXT, json={"prompt": "a", "max_tokens": 1, "vibe": 1}))
        assert (error["message"], error["param"]) == ("unknown field vibe", "vibe")
        taken = http.post(TEXT, json={"prompt": "a", "max_tokens": 1, "num_ctx": 1, "use_beam_search": False})
        assert (taken.status_code, taken.headers["X-Raypp-Ignored-Fields"]) == (200, "num_ctx")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/vnd.api+json"])
def test_json_has_several_names(http: httpx.Client, content_type: str) -> None:
    assert http.post(TEXT, content=PLAIN, headers={"Content-Type": content_type}).status_code == 200


def test_large_bodies_are_parsed_beside_the_event_loop(
    http: httpx.Client, app: RunningApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noting(raw: bytes) -> Any:
        threads.append(threading.get_ident())
        return decode_json(raw)

    monkeypatch.setattr(middleware, "decode_json", noting)
    for size in (10, 1 << 19):
        http.post(TEXT, json={"prompt": "a", "max_tokens": 1, "user": "x" * size}).raise_for_status()
    small, large = threads
    assert small == app.call(threading.get_ident) != large


def test_who_leaves_before_the_end_of_a_body_is_no_error(http: httpx.Client, app: RunningApp) -> None:
    def num_answers(status: int) -> float:
        labels = f'route="{TEXT}",status="{status}"}}'
        return sum(float(line.split()[-1]) for line in http.get("/metrics").text.splitlines() if labels in line)

    gone, failed = num_answers(499), num_answers(500)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection((http.base_url.host, http.base_url.port or 80), timeout=30) as client:
        client.sendall(head.encode() + b'{"prom')
    app.wait_until(lambda: num_answers(499) + num_answers(500) > gone + failed, "the request is given up")
    assert (num_answers(499), num_answers(500)) == (gone + 1, failed)


def test_deep_schemas_are_no_fault_of_the_server(http: httpx.Client) -> None:
    schema: Any = {"type": "string"}
    for _ in range(250):
        schema = {"type": "object", "properties": {"x": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {"messages": [HELLO], "tools": tools, "tool_choice": "required", "max_tokens": 1}
    assert "at most 200 levels" in error_of(http.post(CHAT, json=body))["message"]


def test_deep_arguments_and_long_token_ids_are_no_fault_of_the_server(http: httpx.Client) -> None:
    arguments = '{"x":' * 990 + "1" + "}" * 990
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": ""}]
    assert error_of(http.post(CHAT, json={"messages": messages}))["param"] == "messages"
    assert error_of(http.post(TEXT, json={"prompt": "a", "logit_bias": {"9" * 4301: 1}}))["param"] == "logit_bias"
    assert error_of(http.post(TEXT, json={"prompt": "a", "stop_token_ids": [10**4000]}))["param"] == "stop_token_ids"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_context_has_openais_code(http: httpx.Client, app: RunningApp, stream: bool) -> None:
    long = "hello " * 300
    for url, body, param in (
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (TEXT, {"prompt": long}, "prompt"),
    ):
        error = error_of(http.post(url, json={**body, "stream": stream}))
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "maximum context length is 256 tokens" in error["message"]


def test_paths_and_methods_that_are_not_there_are_named(http: httpx.Client) -> None:
    assert "POST /v1/embeddings" in error_of(http.post("/v1/embeddings", json={}), 404)["message"]
    assert "expected: POST" in error_of(http.get(TEXT), 405)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_a_continuation(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "def main(", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    scored = {**body, "stream_options": {"include_usage": True}} if stream else body
    answer = http.post(TEXT, json=scored)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        (choice,), usage = events[0]["choices"], events[-1]["usage"]
    else:
        [choice], usage = answer.json()["choices"], answer.json()["usage"]
    whole = http.post(TEXT, json={**body, "max_tokens": 1, "stream": False}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], usage["completion_tokens"]) == ("def main(", "length", 0)
    assert {name: column[:-1] for name, column in whole["logprobs"].items()} == choice["logprobs"]


def test_what_the_model_reads_is_shown_whole(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    tokens = http.post("/tokenize", json={"messages": [HELLO], "tools": tools}).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "get_weather" in text
    assert text.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    silent = http.post("/tokenize", json={"messages": [HELLO], "reasoning_effort": "none"}).json()["tokens"]
    quiet = {"messages": [HELLO], "chat_template_kwargs": {"enable_thinking": False}}
    assert silent == http.post("/tokenize", json=quiet).json()["tokens"]
    assert silent != http.post("/tokenize", json={"messages": [HELLO]}).json()["tokens"]
    error = error_of(http.post("/tokenize", json={"messages": [HELLO], "chat_template_kwargs": {"chat_template": "x"}}))
    assert error["param"] == "chat_template_kwargs"


def test_the_usual_loop_of_a_conversation(app: RunningApp) -> None:
    """The client's own object goes back, and a call as a stream's chunks add up to it."""
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        given: dict[str, Any] = {"model": "tiny", "max_tokens": 3}
        answer = client.chat.completions.create(messages=[HELLO], **given)  # type: ignore[list-item]
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages: list[Any] = [HELLO, answer.choices[0].message.model_dump(), HELLO]
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": "c", "content": "fine"}]
        assert client.chat.completions.create(messages=messages, **given).choices[0].finish_reason
