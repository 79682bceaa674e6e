"""Conversations with tools over several turns in each syntax: read in any pieces, and shown to the model again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from channel_texts import FILE as CHANNEL_TEXTS
from test_call_values import as_gemma_writes, as_written, call_of

from raypp.openai_api.chat_messages import shown_messages
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.error_bodies import parse_body
from raypp.openai_api.message_parser import CallDelta
from raypp.openai_api.syntax import CallSyntax, GemmaArguments, MessageSyntax, XmlParameters
from raypp.openai_api.syntaxes import CALL_SYNTAXES, THOUGHT_SYNTAXES

THOUGHTS = {name: name if name in ("gpt_oss", "mistral", "gemma4") else "qwen3" for name in CALL_SYNTAXES}
START = "<|start|>assistant"
TYPES = {
    "text": "string",
    "n": "integer",
    "x": "number",
    "is": "boolean",
    "no": "null",
    "list": "array",
    "of": "object",
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {key: {"type": TYPES[key]} for key in TYPES}}},
    }
]
HELLO = {"role": "user", "content": "hello"}

Turn = tuple[str, str, list[dict[str, Any]]]
"""Thought, content, and the arguments of each call."""


def turns_of(syntax: MessageSyntax) -> list[Turn]:
    """Return what a model says turn by turn: values of all types, and its own marks inside of texts."""
    assert syntax.calls is not None
    own = {text for mark in syntax.calls.begins for text in (mark.opening, mark.closing)} | {syntax.calls.end}
    values = {
        "text": f'12 "a"\n\\ {{b: [1]}}, {"; ".join(sorted(own))}.',
        **{
            "n": -3,
            "x": 1.5e-7,
            "is": True,
            "no": None,
            "list": [1, [], "]", False],
            "of": {"a": {"b": None}, "c": ""},
        },
    }
    several = [{}, {"text": "None", "is": False}][: 1 if syntax.calls.separator is None else 2]
    return [("so {it\nis}", "I look.", [values]), ("", "", several), ("then", 'It is "12".', [])]


def written_calls(name: str, calls: CallSyntax, of: list[dict[str, Any]]) -> str:
    """Return calls as the model writes them."""
    if issubclass(calls.arguments, GemmaArguments):
        return calls.written(("f", as_gemma_writes(values)) for values in of)
    if not issubclass(calls.arguments, XmlParameters):
        return calls.written(("f", json.dumps(values)) for values in of)
    whole = (call_of(name, **{key: as_written(name, value) for key, value in values.items()}) for values in of)
    return (calls.separator or "").join(whole)


def written(name: str, syntax: MessageSyntax, turn: Turn) -> str:
    """Return a turn as the model writes it."""
    assert syntax.calls is not None
    assert syntax.thoughts is not None
    thought, content, of = turn
    text = syntax.thoughts.thought.replace("$thought", thought) if thought else ""
    calls = written_calls(name, syntax.calls, of) if of else ""
    if name == "gpt_oss":
        preamble = f"<|channel|>commentary<|message|>{content}<|end|>{START}" if content else ""
        answer = f"{syntax.thoughts.answer.replace('$answer', content)}<|return|>"
        return text + (f"{preamble}{calls}<|call|>" if calls else answer)
    is_marked = not syntax.calls.may_be_bare or not content
    return text + content + (f"\n{'' if is_marked else syntax.calls.begins[0].opening}{calls}" if calls else "")


@cache
def request() -> ChatRequest:
    return parse_body(ChatRequest, {"messages": [HELLO], "tools": TOOLS})


def read(name: str, syntax: MessageSyntax, pieces: Iterable[str]) -> tuple[str, str, list[list[str]]]:
    """Return what the deltas add up to; the last piece is empty."""
    parser = request().parser(syntax, begun=START if name == "gpt_oss" else "")
    reasoning, content, calls = "", "", list[list[str]]()
    for delta in (*map(parser.feed, pieces), parser.feed("", is_last=True)):
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    assert parser.has_whole_calls == bool(calls)
    return reasoning, content, calls


@pytest.mark.parametrize("name", CALL_SYNTAXES)
def test_a_conversation_over_several_turns(name: str) -> None:
    syntax = MessageSyntax(calls=CALL_SYNTAXES[name], thoughts=THOUGHT_SYNTAXES[THOUGHTS[name]])
    turns, messages = turns_of(syntax), [HELLO]
    for turn in turns:
        text = written(name, syntax, turn)
        thought, content, calls = whole = read(name, syntax, [text])
        assert (thought, content) == turn[:2], text
        assert [(called, json.loads(arguments)) for called, arguments in calls] == [("f", values) for values in turn[2]]
        assert read(name, syntax, text) == whole
        for cut in range(1, len(text)):
            assert read(name, syntax, [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])
        functions = [{"name": called, "arguments": arguments} for called, arguments in calls]
        answer = {"role": "assistant", "content": content or None, "reasoning_content": thought or None}
        of_calls = [{"id": "123456789", "type": "function", "function": function} for function in functions]
        messages += [answer | ({"tool_calls": of_calls} if of_calls else {})]
        messages += [{"role": "tool", "tool_call_id": "123456789", "content": "1"} for _ in calls] or [HELLO]
    given = parse_body(ChatRequest, {"messages": messages, "tools": TOOLS}).conversation(takes_images=False)
    shown = [message for message in shown_messages(given, syntax) if message["role"] == "assistant"]
    assert [[call["function"]["arguments"] for call in message.get("tool_calls", ())] for message in shown] == [
        turn[2] for turn in turns
    ]
    thoughts = [message.get("thinking" if name == "gpt_oss" else "reasoning_content", "") for message in shown]
    if name == "gpt_oss":  # its template takes one text beside a call
        assert (thoughts, shown[0]["content"]) == (["so {it\nis}\n\nI look.", "", "then"], "")
    else:
        assert thoughts == [thought for thought, _, _ in turns]
        assert shown[0]["content"] == "I look."
    assert shown[2]["content"] == 'It is "12".'


def test_thoughts_content_and_calls_keep_their_order_in_any_pieces() -> None:
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}<|call|>'
    text = START.join([f"<|channel|>commentary<|message|>I look.<|end|>{START}{call}",
        "<|channel|>analysis<|message|>so<|end|>", "<|channel|>final<|message|>It is.<|return|>"])  # fmt: skip
    for num_chars in (1, 7, 1000):
        parser, found = request().parser(CHANNELS, begun=START), list[str]()
        for at in range(0, len(text), num_chars):
            pieces = parser.feed(text[at : at + num_chars], is_last=at + num_chars >= len(text)).pieces
            found += ("call" if isinstance(piece, CallDelta) else piece[0] for piece in pieces)
        assert [kind for kind, before in zip(found, ["", *found], strict=False) if kind != before] == [
            *("content", "call", "reasoning", "content")
        ]


@pytest.mark.parametrize("name", CALL_SYNTAXES)
def test_templates_that_take_one_call_are_shown_one_in_each_message(name: str) -> None:
    """Each with its result behind it, whatever the order in which the results were sent."""
    calls = [{"id": of, "type": "function", "function": {"name": of, "arguments": "{}"}} for of in "abc"]
    both = {"role": "assistant", "content": "I look.", "tool_calls": calls[:2]}
    results = {of: {"role": "tool", "tool_call_id": of, "content": of} for of in "abc"}
    later = {"role": "assistant", "content": "", "tool_calls": calls[2:]}
    messages = [HELLO, both, results["b"], results["a"], HELLO, later, results["c"], HELLO]
    shown = shown_messages(messages, MessageSyntax(calls=CALL_SYNTAXES[name]))
    if name not in ("gpt_oss", "llama3_json"):
        assert shown == messages
        return
    first, second = {**both, "tool_calls": calls[:1]}, {**later, "tool_calls": calls[1:2]}
    assert shown == [HELLO, first, results["a"], second, results["b"], HELLO, later, results["c"], HELLO]


CHANNELS = MessageSyntax(calls=CALL_SYNTAXES["gpt_oss"], thoughts=THOUGHT_SYNTAXES["gpt_oss"])


@pytest.mark.parametrize("part", range(4))
def test_channels_are_read_as_the_published_library_reads_them(part: int) -> None:
    """But for white space around a message, which belongs to none."""
    for case in json.loads(CHANNEL_TEXTS.read_text())[part::4]:
        reasoning, content, calls = "", "", list[list[str]]()
        for channel, recipient, text in case["messages"]:
            if recipient.startswith("functions."):  # it takes the form of `final <|constrain|>json` for a recipient
                calls.append([recipient.removeprefix("functions."), text])
            elif channel == "analysis":
                reasoning += text.strip()
            else:
                content += text.strip()
        for pieces in ([case["text"]], case["text"]):
            found = read("gpt_oss", CHANNELS, pieces)
            assert (found[0].rstrip(), found[1].rstrip(), found[2]) == (reasoning, content, calls), case["text"]
