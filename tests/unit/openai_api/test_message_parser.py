"""Thoughts, content and calls come out of a text the same, in whatever pieces it comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.openai_api.json_scanner import JsonScanner
from raypp.openai_api.message_parser import MessageParser

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
    ("\nwhy\n</think>\n\nhello", {"begins_in_thought": True}, ("why", "hello", [])),
    ("<think>why</think>hello", {"has_thoughts": False}, ("", "<think>why</think>hello", [])),
    (WEATHER, {}, ("", "", [("weather", ARGUMENTS)])),
    (WEATHER, {"has_calls": False}, ("", WEATHER, [])),
    (f"<think>\nso\n</think>\n\nLet me see.\n{WEATHER}\n", {}, ("so", "Let me see.", [("weather", ARGUMENTS)])),
    (f"{WEATHER}\n{SWAPPED}", {}, ("", "", [("weather", ARGUMENTS), ("f", '{"a": 1}')])),
    (f"{WEATHER}\nDone.", {}, ("", "Done.", [("weather", ARGUMENTS)])),
    (NO_CALL, {}, ("", NO_CALL, [])),
    ('<tool_call>\n{"name": "f", "arguments": {"a": ', {}, ("", "", [("f", '{"a": ')])),
    ("<tool_call>\n{", {}, ("", "<tool_call>\n{", [])),
    ("a <tool_cal", {}, ("", "a <tool_cal", [])),
]


def read(pieces: list[str], **settings: Any) -> tuple[str, str, list[tuple[str, str]]]:
    parser = MessageParser(**({"has_thoughts": True, "has_calls": True} | settings))
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
    parser = MessageParser(has_thoughts=False, has_calls=True)
    head = parser.feed('<tool_call>\n{"name": "f", "arguments": {"a')
    assert [(call.name, call.arguments) for call in head.calls] == [("f", '{"a')]
    assert parser.feed('": 1').calls[0].plain() == {"index": 0, "function": {"arguments": '": 1'}}


@settings(max_examples=30)
@given(st.recursive(st.none() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=4))
def test_the_scanner_finds_the_end(value: object) -> None:
    text = json.dumps({"value": value})
    assert JsonScanner().feed(text + '} "behind') == len(text)
