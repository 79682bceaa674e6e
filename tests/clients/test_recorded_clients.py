"""What real clients sent is sent again: each answer has the status and the shape of then, and keeps its form.

The one client that is a development dependency runs by itself, too; tests/soak runs all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from client_packages import CLIENTS, PROGRAMS
from official_types import PATHS, type_faults
from recorder import ENGINE, RECORDINGS, answer_values, load, missing, shape_of
from running_app import RunningApp, running_app


@pytest.fixture(scope="module")
def app() -> Iterator[RunningApp]:
    with running_app(**ENGINE) as app:
        yield app


# One of each route and way; the openai package itself is run below.
IN_CI = ("langchain", "lm_eval", "anthropic", "claude_code", "ai_sdk", "codex")


@pytest.mark.in_ci("anthropic", "codex", "claude_code", "lm_eval")
@pytest.mark.parametrize(
    "client", [client if client in IN_CI else pytest.param(client, marks=pytest.mark.full) for client in CLIENTS]
)
def test_what_a_client_sent_is_answered_as_it_was(app: RunningApp, client: str) -> None:
    exchanges = load(client)["exchanges"]
    with httpx.Client(base_url=app.url, timeout=120) as http, ThreadPoolExecutor(8) as pool:
        wrong = list(pool.map(lambda exchange: _replay(http, exchange), exchanges))
    assert not [f"exchange {index}: {faults}" for index, faults in enumerate(wrong) if faults]


def test_the_openai_package_gets_through(app: RunningApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(PROGRAMS)])
    import use_openai

    use_openai.main(f"{app.url}/v1")


@pytest.mark.parametrize("client", CLIENTS)
def test_recordings_are_of_the_packages_that_are_installed(client: str) -> None:
    recording = load(client)
    for requirement in CLIENTS[client].requirements:
        name, _, version = requirement.rpartition("@" if CLIENTS[client].is_node else "==")
        assert recording["packages"][name.partition("[")[0]] == version
    assert (RECORDINGS / f"{client}.json").stat().st_size < 64 << 10


def test_a_shape_tells_what_a_client_would_miss() -> None:
    recorded = shape_of([{"a": [{"b": 1}, {"b": None}]}, {"c": "x"}])
    assert recorded == {"": "object", ".a": "array", ".a[]": "object", ".a[].b": "null|number", ".c": "string"}
    assert not missing(recorded, shape_of([{"a": [{"b": 2.5}], "c": "", "d": True}]))
    assert missing(recorded, shape_of([{"a": []}])) == [".a[] is gone", ".a[].b is gone", ".c is gone"]
    assert not missing({".a": "null"}, {".a": "string"})
    assert missing({".a": "number"}, {".a": "null|number"}) == [".a is ['null'], not number"]
    assert missing({".a": "null|number"}, {".a": "string"}) == [".a is ['string'], not null|number"]


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    ended = 'event: response.completed\ndata: {"type": "response.completed"}\n\n'
    assert answer_values("text/event-stream", ended) == [{"type": "response.completed"}]
    with pytest.raises(ValueError, match="whole response"):
        answer_values("text/event-stream", ended.replace("completed", "in_progress"))
    assert answer_values("text/event-stream", ': alive\n\ndata: {"a": 1}\n\ndata: [DONE]\n\n') == [{"a": 1}]
    with pytest.raises(ValueError, match="DONE"):
        answer_values("text/event-stream", 'data: {"a": 1}\n\n')


def _replay(http: httpx.Client, exchange: dict[str, Any]) -> list[str]:
    recorded, body = exchange["answer"], exchange["body"]
    if exchange["path"].endswith(("/responses", "/messages")):
        body = {"temperature": 0, **body}  # a text that is drawn at random has another shape now and then
    content = None if body is None else json.dumps(body)
    response = http.request(exchange["method"], exchange["path"], content=content, headers=exchange["headers"])
    if response.status_code != recorded["status"]:
        return [f"status {response.status_code}, not {recorded['status']}: {response.text[:500]}"]
    content_type = response.headers["content-type"].split(";")[0]
    if content_type != recorded["content_type"]:
        return [f"{content_type}, not {recorded['content_type']}"]
    values = answer_values(content_type, response.text)
    faults = missing(recorded["shape"], shape_of(values))
    if exchange["path"] in PATHS:
        is_stream = content_type == "text/event-stream"
        faults += type_faults(exchange["path"], values, is_success=response.is_success, is_stream=is_stream)
    if response.is_success and exchange["path"].endswith("/chat/completions"):
        for content, calls in _messages(values, is_stream=bool(body.get("stream"))):
            _check_forms(body, content, calls)
    if response.is_success and exchange["path"].endswith("/responses"):
        _check_response_forms(body, values[-1].get("response", values[-1]))
    if response.is_success and exchange["path"].endswith("/messages"):
        _check_message_forms(body, values)
    return faults


def _messages(values: list[Any], *, is_stream: bool) -> list[tuple[str, list[list[str]]]]:
    """Return the content of each choice, and the name and arguments of each of its calls."""
    messages: dict[int, tuple[str, list[list[str]]]] = {}
    for choice in (choice for value in values for choice in value["choices"]):
        content, calls = messages.get(choice["index"], ("", []))
        part = choice["delta" if is_stream else "message"]
        for call in part.get("tool_calls") or []:
            if call.get("index", len(calls)) == len(calls):
                calls.append(["", ""])
            calls[call.get("index", -1)][0] += call["function"].get("name") or ""
            calls[call.get("index", -1)][1] += call["function"].get("arguments") or ""
        messages[choice["index"]] = content + (part.get("content") or ""), calls
    return list(messages.values())


def _check_forms(body: dict[str, Any], content: str, calls: list[list[str]]) -> None:
    """Check a structured answer, and the calls of a request that had to call."""
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        jsonschema.validate(json.loads(content), wanted["json_schema"]["schema"])
    if body.get("tool_choice") not in (None, "auto", "none"):
        assert calls
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), parameters[name])


def _check_response_forms(body: dict[str, Any], response: dict[str, Any]) -> None:
    """Check the same of a response; a stream's last event has it whole."""
    texts = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
    calls = [[item["name"], item["arguments"]] for item in response["output"] if item["type"] == "function_call"]
    wanted = (body.get("text") or {}).get("format") or {}
    if wanted.get("type") == "json_schema" and not calls:  # a forced call goes before the form
        jsonschema.validate(json.loads("".join(texts)), wanted["schema"])
    if body.get("tool_choice") not in (None, "auto", "none"):
        assert calls
        parameters = {tool["name"]: tool["parameters"] for tool in body["tools"]}
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), parameters[name])


def _check_message_forms(body: dict[str, Any], values: list[Any]) -> None:
    """Check the same of a message, whole or streamed."""
    blocks = values[0].get("content", [])
    texts = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [block["input"] for block in blocks if block["type"] == "tool_use"]
    if body.get("stream"):
        parts = [value["delta"] for value in values if value["type"] == "content_block_delta"]
        inputs = "".join(part.get("partial_json", "") for part in parts)
        calls = [json.loads(inputs)] if inputs else []
    wanted = (body.get("output_config") or {}).get("format")
    if wanted is not None:
        jsonschema.validate(json.loads(texts), wanted["schema"])
    if (body.get("tool_choice") or {}).get("type") in ("any", "tool"):
        [call] = calls
        jsonschema.validate(call, body["tools"][0]["input_schema"])
