"""Thoughts, content and calls come out of a text the same, in whatever pieces it comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.syntax import JsonScanner
from raypp.openai_api.syntaxes import HERMES_CALLS, LLAMA3_CALLS, THINK_TAGS

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "a \\"}{\\" b", "days": [1, {"x": 2}]}}\n</tool_call>'
ARGUMENTS = '{"city": "a \\"}{\\" b", "days": [1, {"x": 2}]}'
NO_CALL = "<tool_call>nothing of the kind</tool_call>"
SWAPPED = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'

CASES: list[tuple[str, dict[str, Any], tuple[str, str, list[tuple[str, str]]]]] = [
    ("", {}, ("", "", [])),
    ("hello", {}, ("", "hello", [])),
    ("  hello \n", {}, ("", "  hello \n", [])),
    ("<think>\nwhy\nnot\n</think>\n\nhello", {}, ("why\nnot", "hello", [])),
    ("\n<think></think>hello", {}, ("", "hello", [])),
    ("a < b <think>no</think>", {}, ("", "a < b <think>no</think>", [])),
    ("<think>\nnever ends\n", {}, ("never ends", "", [])),
    ("\nwhy\n</think>\n\nhello", {"begun": "<think>"}, ("why", "hello", [])),
    (" why</think>hello", {"begun": "<think>", "is_continued": True}, (" why", "hello", [])),
    (" <think>no</think>", {"is_continued": True}, ("", " <think>no</think>", [])),
    ("<think>why</think>hello", {"thoughts": None}, ("", "<think>why</think>hello", [])),
    (WEATHER, {}, ("", "", [("weather", ARGUMENTS)])),
    (WEATHER, {"calls": None}, ("", WEATHER, [])),
    (f"<think>\nso\n</think>\n\nLet me see.\n{WEATHER}\n", {}, ("so", "Let me see.", [("weather", ARGUMENTS)])),
    (f"{WEATHER}\n{SWAPPED}", {}, ("", "", [("weather", ARGUMENTS), ("f", '{"a": 1}')])),
    (f"{WEATHER}\nDone.", {}, ("", "Done.", [("weather", ARGUMENTS)])),
    (NO_CALL, {}, ("", NO_CALL, [])),
    ('<tool_call>\n{"name": "f", "arguments": {"a": ', {}, ("", "", [("f", '{"a": ')])),
    ("<tool_call>\n{", {}, ("", "<tool_call>\n{", [])),
    ("a <tool_cal", {}, ("", "a <tool_cal", [])),
]

BARE = '{"name": "weather", "parameters": {"city": "a \\"}{\\" b", "days": [1, {"x": 2}]}}'
LLAMA = {"calls": LLAMA3_CALLS}
CALLED = ("", "", [("weather", ARGUMENTS)])
CASES += [
    ("", LLAMA, ("", "", [])),
    (" hello \n", LLAMA, ("", " hello \n", [])),
    (BARE, LLAMA, CALLED),
    (f"\n {BARE}\n", LLAMA, CALLED),
    (f"<|python_tag|>{BARE}", LLAMA, CALLED),
    (f"<|python_tag|>{BARE}<|eom_id|>", LLAMA, CALLED),  # of who asks for special tokens
    (f"Let me see. <|python_tag|> {BARE}", LLAMA, ("", "Let me see.", CALLED[2])),
    (f"<think>so</think>\n{BARE}", LLAMA, ("so", "", CALLED[2])),
    (f"{BARE}; {BARE}", LLAMA, ("", "", CALLED[2] * 2)),
    (f"{BARE}\nDone.", LLAMA, ("", "Done.", CALLED[2])),
    (f'{BARE[:-1]}, "x": 1}}', LLAMA, CALLED),
    ('{"type": "function", "name": "f", "parameters": {"a": 1}}', LLAMA, ("", "", [("f", '{"a": 1}')])),
    ('{"parameters": {"a": 1}, "name": "f"}', LLAMA, ("", "", [("f", '{"a": 1}')])),
    ('{"name": "f", "arguments": {}}', LLAMA, ("", "", [("f", "{}")])),
    ('{"name": "f", "parameters": null} ...', LLAMA, ("", "...", [("f", "{}")])),
    ('{"name": "Ada", "age": 3} {"x": 1}', LLAMA, ("", '{"name": "Ada", "age": 3} {"x": 1}', [])),
    ('{"answer": {"name": "f", "parameters": {}}}', LLAMA, ("", '{"answer": {"name": "f", "parameters": {}}}', [])),
    (f"Like {BARE}", LLAMA, ("", f"Like {BARE}", [])),
    ('<|python_tag|>search.call(query="x")', LLAMA, ("", '<|python_tag|>search.call(query="x")', [])),
    ('{"name": "f", "parameters": {"a": ', LLAMA, ("", "", [("f", '{"a": ')])),
    ('{"na', LLAMA, ("", '{"na', [])),
    ("<|python", LLAMA, ("", "<|python", [])),
    (BARE, {"calls": None}, ("", BARE, [])),
]


def read(pieces: list[str], **settings: Any) -> tuple[str, str, list[tuple[str, str]]]:
    parser = MessageParser(**({"thoughts": THINK_TAGS, "calls": HERMES_CALLS} | settings))
    reasoning, content, names, arguments = "", "", [], []
    for index, piece in enumerate(pieces):
        delta = parser.feed(piece, is_last=index == len(pieces) - 1)
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.id
                assert call.index == len(names)
                names.append(call.name)
                arguments.append("")
            arguments[call.index] += call.arguments
    assert parser.num_calls == len(names)
    return reasoning, content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize(("text", "settings", "expected"), CASES)
def test_whole_and_character_by_character(text: str, settings: dict[str, Any], expected: Any) -> None:
    assert read([text], **settings) == expected
    assert read([*text, ""], **settings) == expected


@given(st.data())
def test_in_any_pieces(data: st.DataObject) -> None:
    text, settings, expected = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces, **settings) == expected


def test_arguments_stream_as_they_come() -> None:
    parser = MessageParser(thoughts=None, calls=HERMES_CALLS)
    head = parser.feed('<tool_call>\n{"name": "f", "arguments": {"a')
    assert [(call.name, call.arguments) for call in head.calls] == [("f", '{"a')]
    assert parser.feed('": 1').calls[0].plain() == {"index": 0, "function": {"arguments": '": 1'}}


def test_an_answer_that_is_json_is_not_kept_back() -> None:
    parser = MessageParser(thoughts=None, calls=LLAMA3_CALLS)
    assert parser.feed('{"answer": [1').content == '{"answer": [1'


@settings(max_examples=30)
@given(st.recursive(st.none() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=4))
def test_the_scanner_finds_the_end(value: object) -> None:
    text = json.dumps({"value": value})
    assert JsonScanner().feed(text + '} "behind') == len(text)
