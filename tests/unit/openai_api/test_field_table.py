"""docs/http_api.md has one table of every field of chat and completions; it says what the shapes themselves say."""

from __future__ import annotations

import asyncio
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
from raypp.openai_api.request_fields import IGNORED, RequestFields
from raypp.openai_api.response_request import IGNORED_BY_RESPONSES, UNSUPPORTED, ResponseRequest

HTTP_API = Path(__file__).parents[3] / "docs/http_api.md"
SHAPES: dict[str, type[RequestFields]] = {"chat": ChatRequest, "completions": CompletionRequest}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "completions": {"prompt": [1]},
}
REFUSED: dict[tuple[str, str], tuple[Any, str]] = {
    ("completions", "suffix"): ("b", "text is continued at its end only"),
    ("both", "use_beam_search"): (True, "`LLM.beam_search` has it, HTTP has not"),
    ("both", "length_penalty"): (1.0, "of beam search"),
    ("both", "logits_processors"): (["m.f"], "a request brings no programs"),
    ("both", "kv_transfer_params"): ({}, "prompts are computed where they are continued"),
    ("both", "spaces_between_special_tokens"): (False, "of tokenizers in Python"),
    ("both", "guided_decoding_backend"): ("xgrammar", "there is one"),
    ("both", "guided_whitespace_pattern"): ("a", "`structural_tag` can say it"),
    ("chat", "chat_template"): ("a", "a template is a program; `chat_template` of the engine replaces the model's"),
    ("chat", "documents"): ([{}], "`chat_template_kwargs` passes them to templates that read them"),
    ("chat", "mm_processor_kwargs"): ({}, "images are read as the model was trained"),
    ("chat", "include_reasoning"): (False, "`reasoning_effort` turns thoughts off"),
    ("chat", "echo"): (True, "of completions"),
    ("chat", "audio"): ({}, "answers are text"),
    ("chat", "prediction"): ({}, "speculation is a setting of the engine"),
    ("chat", "web_search_options"): ({}, "there is no search"),
    ("completions", "prompt_embeds"): ("a", "prompts are text or tokens"),
    ("completions", "response_format"): ({"type": "json_object"}, "`structured_outputs` has it"),
}
"""What other servers have: an example, and why it is refused or what there is in its place."""


def fields_of(shape: type[RequestFields]) -> dict[str, str]:
    return {
        field.alias or name: " ".join((field.description or "").split()) for name, field in shape.model_fields.items()
    }


def described(kind: str) -> dict[str, str]:
    return fields_of(SHAPES[kind])


def table() -> list[str]:
    """Return the table's lines: what both have, then what one has."""
    chat, completions = described("chat"), described("completions")
    same = [name for name in chat if completions.get(name) == chat[name]]
    taken = [("both", name, chat[name]) for name in same]
    taken += [("chat", name, text) for name, text in chat.items() if name not in same]
    taken += [("completions", name, text) for name, text in completions.items() if name not in same]
    rows = [(name, of, "taken", text) for of, name, text in taken if name not in IGNORED and (of, name) not in REFUSED]
    rows += [(name, of, "ignored, with a warning", text) for of, name, text in taken if name in IGNORED]
    rows += [(name, of, "refused", why) for (of, name), (_, why) in REFUSED.items()]
    lines = [f"| `{name}` | {of} | {state} | {text} |" for name, of, state, text in rows]
    return ["| field | of | | |", "|---|---|---|---|", *lines]


def test_the_table_says_what_the_shapes_say() -> None:
    expected = table()
    assert all(text.count("|") == 5 for text in expected), "a bar in a description ends its cell"
    there = re.search(r"^\| field \| of .*?(?=\n\n|\n\Z)", HTTP_API.read_text(), re.MULTILINE | re.DOTALL)
    assert there is not None
    assert there[0].splitlines() == expected, "docs/http_api.md should have:\n" + "\n".join(expected)


def own_table(shape: type[RequestFields], of: str, ignored: Sequence[str], refused: Sequence[str] = ()) -> list[str]:
    """Return the lines for a route that asks for a chat: its own fields, and those that say something else there."""
    shared = fields_of(RequestFields)
    rows = [(name, text) for name, text in fields_of(shape).items() if shared.get(name) != text]
    states = dict.fromkeys(ignored, "ignored, with a warning") | dict.fromkeys(refused, "refused")
    lines = [f"| `{name}` | {states.get(name, 'taken')} | {text} |" for name, text in rows]
    order = ["taken", "ignored, with a warning", "refused"]
    lines.sort(key=lambda line: order.index(line.split(" | ")[1]))
    return [f"| field of {of} | | |", "|---|---|---|", *lines]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("responses", own_table(ResponseRequest, "responses", IGNORED_BY_RESPONSES, [*UNSUPPORTED])),
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


@pytest.mark.parametrize(("of", "name"), REFUSED)
def test_what_the_table_calls_refused_is(of: str, name: str) -> None:
    def ask(kind: str) -> None:
        request: Any = parse_body(SHAPES[kind], {**BODIES[kind], name: REFUSED[of, name][0]})
        request.sampling_params(100)

    for kind in SHAPES if of == "both" else [of]:
        with pytest.raises(RequestError) as caught:
            ask(kind)
        assert caught.value.param == name


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
