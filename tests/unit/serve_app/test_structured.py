"""Constraints over HTTP, with the threads for grammars of a real engine; clients' own helpers: tests/clients."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai_tools import HELLO, SILENT, Ping
from running_app import RunningApp, running_app

from raypp.grammar import grammar_threads
from raypp.grammar.compile import CompiledGrammar
from raypp.grammar.text_grammar import TextGrammar
from raypp.grammar.vocabulary import Vocabulary
from raypp.messages import Int32s

WAIT_S = 60.0
FREE = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def app() -> Iterator[RunningApp]:
    with running_app(max_model_len=1024, grammar_compile_timeout_s=4, speculative={"method": "ngram"}) as app:
        yield app


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[a-z]{3}-[0-9]{2}"}, "[a-z]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "a" "b"? "c"'}, "ab?c"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 5}}, "[345]"),
    ],
)
def test_constraints_at_both_endpoints(http: httpx.Client, constraint: dict[str, Any], pattern: str) -> None:
    body = {"max_tokens": 40, "structured_outputs": constraint}
    [choice] = http.post("/v1/completions", json={"prompt": "def", **body}).json()["choices"]
    assert re.fullmatch(pattern, choice["text"])
    assert choice["finish_reason"] == "stop"
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, "n": 2, **body}).json()
    for choice in answer["choices"]:
        assert re.fullmatch(pattern, choice["message"]["content"])


def test_json_object(http: httpx.Client) -> None:
    body = {
        "messages": HELLO,
        "response_format": {"type": "json_object"},
        "temperature": 0,
        "max_tokens": 200,
        **SILENT,
    }
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_told_apart(http: httpx.Client, name: str) -> None:
    thought = {
        "structured_outputs": {"regex": "<think>\nwhy not\n</think>\n\nfine"},
        "max_tokens": 60,
        "temperature": 0,
    }
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, **thought}).json()
    [choice], usage = answer["choices"], answer["usage"]
    assert choice["message"][name] == "why not"
    assert choice["message"]["content"] == "fine"
    assert usage["completion_tokens"] > usage["completion_tokens_details"]["reasoning_tokens"] > 3
    reasoning = content = ""
    streamed = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, **thought}
    with http.stream("POST", "/v1/chat/completions", json=streamed) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {") and '"choices":[]' in line:
                assert json.loads(line[6:])["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
            elif line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                reasoning += delta.get(name, "")
                content += delta.get("content", "")
    assert (reasoning, content) == ("why not", "fine")


def test_functions_are_called_as_they_once_were(app: RunningApp) -> None:
    function = openai.pydantic_function_tool(Ping)["function"]
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none") as client:
        given: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "temperature": 0, **{"extra_body": SILENT}}
        given |= {"functions": [function], "function_call": {"name": "Ping"}}
        [choice] = client.chat.completions.create(**given).choices
        call = choice.message.function_call
        assert choice.finish_reason == "function_call"
        assert call is not None
        assert (call.name, bool(Ping.model_validate_json(call.arguments))) == ("Ping", True)
        pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
        streamed = [piece.delta.function_call for piece in pieces if piece.delta.function_call is not None]
        assert "".join(piece.name or "" for piece in streamed) == "Ping"
        assert "".join(piece.arguments or "" for piece in streamed) == call.arguments
        assert pieces[-1].finish_reason == "function_call"
        said = {"role": "assistant", "content": None, "function_call": call.model_dump()}
        heard = {"role": "function", "name": "Ping", "content": "pong"}
        given |= {"messages": [*HELLO, said, heard], "function_call": "none"}
        assert client.chat.completions.create(**given).choices[0].message.function_call is None


HOSTILE: dict[str, tuple[dict[str, Any], str | None]] = {
    "remote reference": ({"json_schema": {"$ref": "http://example.com/schema.json"}}, "part of the schema itself"),
    "deep nesting": ({"json_schema": json.loads('{"items":' * 200 + "true" + "}" * 200)}, "nesting"),
    "nested parentheses": ({"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}, "cannot be compiled"),
    "left recursion without an end": ({"grammar": "root ::= root"}, "no token of the model continues"),
    "huge enum": (
        {"json_schema": {"enum": [f"v{index:05}" for index in range(99_000)]}},
        "too big|too long",
    ),
    "nested quantifiers": ({"regex": "((a|aa)+)+b"}, None),
    "huge repetition": ({"regex": "([a-z]{1,3000}-){1,3000}"}, None),
    "what is not enforced": ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "no grammar at all": ({"grammar": "what is this?"}, "cannot be compiled"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_harm_nobody(http: httpx.Client, name: str) -> None:
    constraint, said = HOSTILE[name]
    plain = http.post("/v1/completions", json=FREE).json()["choices"][0]["text"]
    began_s = time.monotonic()
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "structured_outputs": constraint})
    took_s = time.monotonic() - began_s
    if said is not None:
        assert answer.status_code == 400, answer.text
        assert re.search(said, answer.json()["error"]["message"])
        is_of_body = name == "deep nesting"  # JSON that nobody reads
        assert answer.json()["error"]["param"] == (None if is_of_body else "structured_outputs")
    else:  # either is fine: it is compiled in time, or said to take too long
        assert answer.status_code in (200, 400), answer.text
    assert took_s < 30  # of a machine that has other things to do; the limit is 4
    assert http.post("/v1/completions", json=FREE).json()["choices"][0]["text"] == plain


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_said_of_the_field_that_has_it(http: httpx.Client, stream: bool) -> None:
    schema = {"schema": {"type": "array", "uniqueItems": True}}
    body = {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": schema}, "stream": stream}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert ("uniqueItems" in error["message"], error["param"]) == (True, "response_format")


def with_regex(pattern: str) -> dict[str, Any]:
    return {"prompt": "def", "max_tokens": 40, "structured_outputs": {"regex": pattern}, "temperature": 0}


def test_what_takes_too_long_to_compile_is_refused_and_keeps_nothing_else(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, compile_constraint = threading.Event(), grammar_threads.compile_constraint

    def compile_held(source: str, vocabulary: Vocabulary) -> CompiledGrammar:
        assert "held" not in source or may_go_on.wait(WAIT_S)
        return compile_constraint(source, vocabulary)

    monkeypatch.setattr(grammar_threads, "compile_constraint", compile_held)
    grammars = [f'root ::= "held{index}"' for index in range(2 * grammar_threads.MAX_COMPILERS + 1)]
    held = [{**with_regex(""), "structured_outputs": {"grammar": grammar}} for grammar in grammars]
    other = {**held[0], "structured_outputs": {"grammar": "root ::= [xyz]"}}
    with ThreadPoolExecutor(len(held)) as clients:
        answers = [clients.submit(http.post, "/v1/completions", json=body) for body in held]
        assert http.post("/v1/completions", json=FREE).status_code == 200
        said = [answer.result(WAIT_S).json()["error"]["message"] for answer in answers]
    assert sum("takes longer than grammar_compile_timeout_s = 4" in message for message in said) == len(held) - 1
    assert sum("no thread is left" in message for message in said) == 1
    assert "no thread is left" in http.post("/v1/completions", json=other).text
    assert http.post("/v1/completions", json=with_regex("[xyz]")).status_code == 200, "no grammar that a user wrote"
    may_go_on.set()
    ends_s = time.monotonic() + WAIT_S
    while http.post("/v1/completions", json=other).status_code != 200:
        assert time.monotonic() < ends_s
    assert http.post("/v1/completions", json=held[0]).json()["choices"][0]["text"] == "held0"


def test_a_text_whose_mask_takes_too_long_ends_and_the_others_go_on(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypp.driver.grammars.MASK_TIMEOUT_S", 1.0)
    may_go_on, masks = threading.Event(), TextGrammar.masks

    def masks_held(text: TextGrammar, draft_ids: Sequence[int]) -> tuple[list[int], Int32s]:
        assert text.num_accepted != 3 or may_go_on.wait(WAIT_S)
        return masks(text, draft_ids)

    slow, short = with_regex("[a-z]{9}-[0-9]{2}"), with_regex("a?b|yes")
    before = http.post("/v1/completions", json=slow).json()["choices"][0]["text"]
    monkeypatch.setattr(TextGrammar, "masks", masks_held)
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(http.post, "/v1/completions", json=slow)
        assert http.post("/v1/completions", json=short).status_code == 200
        assert "takes too long to compute masks" in answer.result(WAIT_S).json()["error"]["message"]
    may_go_on.set()
    assert http.post("/v1/completions", json=slow).json()["choices"][0]["text"] == before
