"""Texts become the items of a response, whole or in pieces, and the events tell of every step."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.response_answer import ResponseItems
from raypp.openai_api.syntaxes import HERMES_CALLS, THINK_TAGS

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
TEXT = f"<think>\nwhy\n</think>\n\nfirst {CALL % 1}\n{CALL % 2}\nthen {CALL % 3}\nlast"


def read(text: str, num_chars: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the items of a text that comes in pieces of so many characters, and the events."""
    parser, items = MessageParser(thoughts=THINK_TAGS, calls=HERMES_CALLS), ResponseItems()
    events: list[dict[str, Any]] = []
    for start in range(0, len(text), num_chars):
        piece = text[start : start + num_chars]
        events += items.add(parser.feed(piece, is_last=start + num_chars >= len(text)))
    events += items.end(is_complete=True)
    return list(items.items), events


def said(item: dict[str, Any]) -> str:
    return item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


@pytest.mark.parametrize("num_chars", [1, 3, 17, 1000])
def test_items_are_what_the_model_wrote_in_its_order(num_chars: int) -> None:
    items, _ = read(TEXT, num_chars)
    assert [(item["type"], said(item)) for item in items] == [
        ("reasoning", "why"),
        ("message", "first"),
        ("function_call", '{"x": 1}'),
        ("function_call", '{"x": 2}'),
        ("message", "then"),
        ("function_call", '{"x": 3}'),
        ("message", "last"),
    ]
    assert {item["status"] for item in items} == {"completed"}
    assert len({item["id"] for item in items}) == 7


@pytest.mark.parametrize("num_chars", [1, 3, 17, 1000])
def test_events_tell_every_item_from_its_beginning_to_its_end(num_chars: int) -> None:
    items, events = read(TEXT, num_chars)
    for number, event in enumerate(events):
        EVENT.validate_python({**event, "sequence_number": number})
    for index, item in enumerate(items):
        first, *between, last = [event for event in events if event["output_index"] == index]
        assert (first["type"], first["item"]["id"]) == ("response.output_item.added", item["id"])
        assert first["item"]["status"] == "in_progress"
        assert (last["type"], last["item"]) == ("response.output_item.done", item)
        assert {event["item_id"] for event in between} == {item["id"]}
        assert "".join(event["delta"] for event in between if event["type"].endswith(".delta")) == said(item)
        kinds = [event["type"].removeprefix("response.") for event in between if not event["type"].endswith(".delta")]
        assert (
            kinds
            == {
                "reasoning": ["content_part.added", "reasoning_text.done", "content_part.done"],
                "message": ["content_part.added", "output_text.done", "content_part.done"],
                "function_call": ["function_call_arguments.done"],
            }[item["type"]]
        )
    assert [event["output_index"] for event in events] == sorted(event["output_index"] for event in events)


def test_what_was_cut_off_is_incomplete() -> None:
    items = ResponseItems()
    parser = MessageParser(thoughts=THINK_TAGS, calls=HERMES_CALLS)
    for _ in items.add(parser.feed("<think>why</think>\n\nbeca", is_last=True)):
        pass
    assert list(items.end(is_complete=False))[-1]["item"]["status"] == "incomplete"
    assert [item["status"] for item in items.items] == ["completed", "incomplete"]


def test_a_response_without_any_text_has_an_empty_message() -> None:
    items = ResponseItems()
    kinds = [event["type"] for event in items.end(is_complete=True)]
    assert (kinds[0], kinds[-1]) == ("response.output_item.added", "response.output_item.done")
    assert [said(item) for item in items.items] == [""]


def test_a_thought_alone_is_followed_by_an_empty_message_unless_it_was_cut_off() -> None:
    for is_complete, texts in ((True, ["why", ""]), (False, ["why"])):
        items = ResponseItems()
        parser = MessageParser(thoughts=THINK_TAGS, calls=None)
        list(items.add(parser.feed("<think>why", is_last=True)))
        list(items.end(is_complete=is_complete))
        assert [said(item) for item in items.items] == texts


def test_log_probabilities_are_those_of_the_text() -> None:
    items = ResponseItems()
    parser = MessageParser(thoughts=None, calls=None)
    events = [*items.add(parser.feed("a"), [{"token": "a"}]), *items.add(parser.feed("b"), [{"token": "b"}])]
    events += items.end(is_complete=True, logprobs=[{"token": ""}])
    told = [event["logprobs"] for event in events if event["type"].endswith("text.delta")]
    assert told == [[{"token": "a"}], [{"token": "b"}]]
    assert items.items[0]["content"][0]["logprobs"] == [{"token": "a"}, {"token": "b"}, {"token": ""}]
