"""Texts become the blocks of a message, whole or in pieces, and the events tell of every step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raypp.openai_api.anthropic_answer import MessageBlocks
from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.syntaxes import HERMES_CALLS, THINK_TAGS

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
DIRECT = {"caller": {"type": "direct"}}
TEXT = f"<think>\nwhy\n</think>\n\nfirst {CALL % 1}\n{CALL % 2}\nthen {CALL % 3}\nlast"


def read(text: str, num_chars: int = 1000) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the blocks of a text that comes in pieces of so many characters, and the events."""
    parser, blocks = MessageParser(thoughts=THINK_TAGS, calls=HERMES_CALLS), MessageBlocks()
    events: list[dict[str, Any]] = []
    for start in range(0, len(text), num_chars):
        piece = text[start : start + num_chars]
        events += blocks.add(parser.feed(piece, is_last=start + num_chars >= len(text)))
    return blocks.blocks, [*events, *blocks.end()]


@pytest.mark.parametrize("num_chars", [1, 3, 17, 1000])
def test_blocks_are_what_the_model_wrote_in_its_order(num_chars: int) -> None:
    blocks, _ = read(TEXT, num_chars)
    assert [block.get("id") is not None for block in blocks] == [False, False, True, True, False, True, False]
    assert [{**block, "id": ""} for block in blocks] == [
        {"type": "thinking", "thinking": "why", "signature": "", "id": ""},
        {"type": "text", "text": "first", "citations": None, "id": ""},
        {"type": "tool_use", "id": "", "name": "f", "input": {"x": 1}, **DIRECT},
        {"type": "tool_use", "id": "", "name": "f", "input": {"x": 2}, **DIRECT},
        {"type": "text", "text": "then", "citations": None, "id": ""},
        {"type": "tool_use", "id": "", "name": "f", "input": {"x": 3}, **DIRECT},
        {"type": "text", "text": "last", "citations": None, "id": ""},
    ]


@pytest.mark.parametrize("num_chars", [1, 3, 17, 1000])
def test_events_tell_every_block_from_its_beginning_to_its_end(num_chars: int) -> None:
    blocks, events = read(TEXT, num_chars)
    assert [event["index"] for event in events] == sorted(event["index"] for event in events)
    for index, block in enumerate(blocks):
        first, *deltas, last = [event for event in events if event["index"] == index]
        assert (first["type"], last) == ("content_block_start", {"type": "content_block_stop", "index": index})
        assert {event["type"] for event in deltas} == {"content_block_delta"}
        kind, field = {
            "text": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[block["type"]]
        assert {event["delta"]["type"] for event in deltas} == {kind}
        said = "".join(event["delta"][field] for event in deltas)
        if block["type"] == "tool_use":
            assert first["content_block"] == {**block, "input": {}}
            assert json.loads(said) == block["input"]
        else:
            assert first["content_block"] == {**block, field: ""}
            assert said == block[field]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"x": 1, "y": "ab', {"INVALID_JSON": '{"x": 1, "y": "ab'}),
        ("null}", {}),
        ('{"x": NaN}}\n</tool_call>', {"INVALID_JSON": '{"x": NaN}'}),
    ],
)
def test_an_input_is_an_object_whatever_the_model_wrote(arguments: str, given: dict[str, Any]) -> None:
    [block], _ = read('<tool_call>\n{"name": "f", "arguments": ' + arguments)
    assert block["input"] == given


def test_an_answer_without_a_text_has_no_blocks() -> None:
    assert read("") == ([], [])
