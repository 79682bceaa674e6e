"""docs/http_api.md has one table of every field of chat and completions; it says what the shapes themselves say."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raypp.errors import RequestError
from raypp.openai_api.anthropic_request import IGNORED_BY_MESSAGES, MessagesRequest
from raypp.openai_api.body_preparer import BodyPreparer
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.error_bodies import parse_body
from raypp.openai_api.foreign_fields import OF_ALL, ForeignField
from raypp.openai_api.request_fields import IGNORED, RequestFields
from raypp.openai_api.response_request import IGNORED_BY_RESPONSES, ResponseRequest

HTTP_API = Path(__file__).parents[3] / "docs/http_api.md"
SHAPES: dict[str, type[RequestFields]] = {"chat": ChatRequest, "completions": CompletionRequest}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "completions": {"prompt": [1]},
}


def fields_of(shape: type[RequestFields]) -> dict[str, str]:
    return {
        field.alias or name: " ".join((field.description or "").split()) for name, field in shape.model_fields.items()
    }


def described(kind: str) -> dict[str, str]:
    return fields_of(SHAPES[kind])


def foreign_fields(shape: type[RequestFields]) -> dict[str, ForeignField]:
    """Return what other servers have and this body has not."""
    return {name: foreign for name, foreign in shape.foreign.items() if name not in shape.known_names()}


def state_of(foreign: ForeignField) -> str:
    if not foreign.has_effect:
        return "ignored, with a warning"
    return ", but for ".join(["refused", *(f"`{json.dumps(value)}`" for value in foreign.nothing)])


def table() -> list[str]:
    """Return the table's lines: what both have, then what one has, then what neither has."""
    chat, completions = described("chat"), described("completions")
    same = [name for name in chat if completions.get(name) == chat[name]]
    taken = [("both", name, chat[name]) for name in same]
    taken += [("chat", name, text) for name, text in chat.items() if name not in same]
    taken += [("completions", name, text) for name, text in completions.items() if name not in same]
    rows = [(name, of, "taken", text) for of, name, text in taken if name not in IGNORED]
    rows += [(name, of, "ignored, with a warning", text) for of, name, text in taken if name in IGNORED]
    of_chat, of_completions = map(foreign_fields, SHAPES.values())
    both = {name: foreign for name, foreign in of_chat.items() if of_completions.get(name) == foreign}
    for of, foreigns in (("both", both), ("chat", of_chat), ("completions", of_completions)):
        mine = {name: foreign for name, foreign in foreigns.items() if of == "both" or name not in both}
        rows += [(name, of, state_of(foreign), foreign.reason) for name, foreign in mine.items()]
    lines = [f"| `{name}` | {of} | {state} | {text} |" for name, of, state, text in rows]
    return ["| field | of | | |", "|---|---|---|---|", *lines]


def test_the_table_says_what_the_shapes_say() -> None:
    expected = table()
    assert all(text.count("|") == 5 for text in expected), "a bar in a description ends its cell"
    there = re.search(r"^\| field \| of .*?(?=\n\n|\n\Z)", HTTP_API.read_text(), re.MULTILINE | re.DOTALL)
    assert there is not None
    assert there[0].splitlines() == expected, "docs/http_api.md should have:\n" + "\n".join(expected)


def own_table(shape: type[RequestFields], of: str, ignored: Sequence[str]) -> list[str]:
    """Return the lines for a route that asks for a chat: its own fields, and those that say something else there."""
    shared = fields_of(RequestFields)
    rows = [(name, text) for name, text in fields_of(shape).items() if shared.get(name) != text]
    rows.sort(key=lambda row: row[0] in ignored)
    states = dict.fromkeys(ignored, "ignored, with a warning")
    lines = [f"| `{name}` | {states.get(name, 'taken')} | {text} |" for name, text in rows]
    foreigns = [(name, foreign) for name, foreign in shape.foreign.items() if name not in OF_ALL]
    lines += [f"| `{name}` | {state_of(foreign)} | {foreign.reason} |" for name, foreign in foreigns]
    return [f"| field of {of} | | |", "|---|---|---|", *lines]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("responses", own_table(ResponseRequest, "responses", IGNORED_BY_RESPONSES)),
        ("messages", own_table(MessagesRequest, "messages", [*IGNORED, *IGNORED_BY_MESSAGES])),
    ],
)
def test_the_table_of_a_route_says_what_its_shape_says(of: str, expected: list[str]) -> None:
    there = re.search(rf"^\| field of {of} .*?(?=\n\n|\n\Z)", HTTP_API.read_text(), re.MULTILINE | re.DOTALL)
    assert there is not None, "docs/http_api.md should have:\n" + "\n".join(expected)
    assert there[0].splitlines() == expected, "docs/http_api.md should have:\n" + "\n".join(expected)


@pytest.mark.parametrize("shape", [ResponseRequest, MessagesRequest])
def test_other_routes_have_the_fields_of_both_but_for_those_that_the_text_names(shape: type[RequestFields]) -> None:
    both = ChatRequest.model_fields.keys() & CompletionRequest.model_fields.keys() - {"max_tokens", "logprobs"}
    lacking = sorted(both - fields_of(shape).keys())
    assert f"but for {', '.join(f'`{name}`' for name in lacking)}. Beside" in " ".join(HTTP_API.read_text().split())


def test_fields_of_responses_that_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {
        "service_tier": "auto",
        "store": True,
        "truncation": "auto",
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
    }
    body = parse_body(ResponseRequest, {"input": "a", **given})
    with caplog.at_level(logging.WARNING, "raypp"), pytest.raises(RequestError, match="tokenizer"):
        asyncio.run(BodyPreparer(None, None, max_model_len=100).response(body))
    assert set(re.findall(r"field '(.*?)'", caplog.text)) == set(body.ignored())
    assert body.ignored() == [
        "include=reasoning.encrypted_content",
        "max_tool_calls",
        "reasoning.summary",
        "service_tier",
        "store",
        "text.verbosity",
        "truncation",
    ]
    assert not parse_body(ResponseRequest, {"input": "a", "store": False, "truncation": "disabled"}).ignored()


FOREIGN = [(of, name) for of, shape in SHAPES.items() for name in foreign_fields(shape)]


@pytest.mark.parametrize("unknown_fields", ["refuse", "warn"])
@pytest.mark.parametrize(("of", "name"), FOREIGN)
def test_fields_of_other_servers_are_what_the_table_calls_them(of: str, name: str, unknown_fields: Any) -> None:
    shape, body, foreign = SHAPES[of], BODIES[of], SHAPES[of].foreign[name]
    plain = parse_body(shape, body)
    for value in (None, *foreign.nothing):
        assert parse_body(shape, {**body, name: value}, unknown_fields) == plain
    if not foreign.has_effect:
        assert parse_body(shape, {**body, name: "x"}, unknown_fields).ignored() == [name]
        return
    with pytest.raises(RequestError, match=re.escape(foreign.reason.replace("`", ""))) as caught:
        parse_body(shape, {**body, name: "x"}, unknown_fields)
    assert caught.value.param == name
    assert caught.value.message == f"{name} is not supported"


def test_json_has_no_number_that_is_true() -> None:
    with pytest.raises(RequestError, match=r"got: True; expected: length_penalty = 1, or without length_penalty"):
        parse_body(ChatRequest, {**BODIES["chat"], "length_penalty": True})
    with pytest.raises(RequestError, match=r"got: 0; expected: echo = false"):
        parse_body(ChatRequest, {**BODIES["chat"], "echo": 0})


def test_ignored_fields_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    examples = {"metadata": {"a": "b"}, "store": True}
    preparer = BodyPreparer(None, None, max_model_len=100)
    fields = {name: examples.get(name, "x") for name in IGNORED - {"verbosity"}}
    with caplog.at_level(logging.WARNING, "raypp"):
        for more in ({}, fields, fields):
            body = parse_body(CompletionRequest, {"prompt": [1], **more})
            assert asyncio.run(preparer.prepare(body)).params.max_tokens == 16
    assert sorted(re.findall(r"field '(\w+)'", caplog.text)) == sorted(fields)
    assert parse_body(ChatRequest, {**BODIES["chat"], "verbosity": "low", "user": None}).ignored() == ["verbosity"]
