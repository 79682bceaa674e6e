"""Whatever a model writes: all routes say the same of it, whole and streamed, and take their own answers back.

An answer that ends with `tool_calls` has whole calls only, and stop strings end it in its content only.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from deltas import deltas_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from raypp.api.picture_prompts import EncodedPrompt
from raypp.api.running_request import RunningCompletion
from raypp.messages import NO_INT32S
from raypp.openai_api.anthropic_answer import PreparedMessage
from raypp.openai_api.anthropic_request import MessagesRequest
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.error_bodies import decode_json, parse_body
from raypp.openai_api.from_outputs import PreparedChat, ResponseHead
from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.response_answer import PreparedResponse
from raypp.openai_api.response_request import ResponseRequest
from raypp.openai_api.syntax import CallSyntax, MessageSyntax, XmlParameters
from raypp.openai_api.syntaxes import CALL_SYNTAXES, THOUGHT_SYNTAXES
from raypp.types import FinishReason, RequestMetrics, RequestOutput
from serve_app.chunks import ChunkWriter, MessageEventWriter, ResponseEventWriter

HELLO = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": ["integer", "null"]}}}
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": SCHEMA}}]
HEAD = ResponseHead("x", 0, "m")
THOUGHTS = {"gpt_oss": "gpt_oss", "mistral": "mistral"}
SYNTAXES = {
    name: MessageSyntax(thoughts=THOUGHT_SYNTAXES[THOUGHTS.get(name, "qwen3")], calls=calls)
    for name, calls in CALL_SYNTAXES.items()
}
PLACE = "{% set a = m.function.arguments %}"
TEMPLATES = [
    "{% for message in messages %}{% for m in message.tool_calls or [] %}"
    + PLACE
    + writing
    + "{% endfor %}{% endfor %}"
    for writing in (
        "{% for name, value in a | items %}{{ name }}={{ value | string }}{% endfor %}",
        "{{ a | tojson }}",
        "{{ 'f' + a + ';' }}",
        "{{ a if a is string else a | tojson }}",
        "{% if m.id | length != 9 %}{{ raise_exception('ids of 9 characters') }}{% endif %}",
    )
]
ARGUMENTS = [
    *('{"cmd": "ls STOP -l"}', "{}", "null", "[]", '""', '"text"', '"{\\"n\\": 1}"', '{"cmd": "a\nb"}'),
    *('{"cmd": "\\ud83d"}', '{"n": NaN}', '{"n": 1e999}', '{"n": ', '{"n": nope}', '{"cmd": "</tool_call>"}', "[1", ""),
    '{"n":' * 250 + "1" + "}" * 250,
]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
LOOSE = [
    "a",
    "STOP",
    " ",
    "\n",
    "{",
    "}",
    '"',
    "]",
    '{"name": "run", "arguments": ',
    '{"arguments": {',
    "\u00fc\U0001f336",
]


class ByteDecoder:
    """Tokens are bytes."""

    special_token_ids = frozenset({256})

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


def bare(syntax: CallSyntax, **values: str) -> str:
    """Return a call whose values are bare texts."""
    assert issubclass(syntax.arguments, XmlParameters)
    around = syntax.arguments.marks
    line, between = "\n" if around.has_lines else "", "".join(around.value)
    written = (f"{around.name}{name}{between}{line}{value}{line}{around.end}" for name, value in values.items())
    return syntax.written([("run", "\n".join(written))])


@st.composite
def written_texts(draw: st.DrawFn, name: str) -> str:
    """Return what a model may write: calls and thoughts in its syntax, their marks, and pieces of all of them."""
    syntax = SYNTAXES[name]
    assert syntax.calls is not None
    assert syntax.thoughts is not None
    both = (*syntax.calls.begins, *syntax.calls.dropped, *syntax.thoughts.begins, *syntax.thoughts.dropped)
    marks = {text for mark in both for text in (mark.opening, mark.closing)} - {"", "{"}
    marks |= {syntax.calls.end, *syntax.thoughts.ends, syntax.thoughts.answer.partition("$")[0]} - {""}
    calls = [syntax.calls.written([("run", arguments)]) for arguments in ARGUMENTS]
    opening = syntax.calls.begins[0].opening
    calls += [
        f'{opening}{{"{key}": {arguments}, "name": "run"}}{syntax.calls.end}'
        for key in ("arguments", "parameters")
        for arguments in ARGUMENTS
        if arguments
    ]
    if issubclass(syntax.calls.arguments, XmlParameters):
        around = syntax.calls.arguments.marks
        some = [{"cmd": "a STOP"}, {"cmd": f"{around.end} {around.name}n", "n": "None"}, {"n": "three"}, {"n": "{1: }"}]
        calls = [bare(syntax.calls, **values) for values in some]
    thoughts = [syntax.thoughts.thought.replace("$thought", text) for text in ("why STOP", "", "\n")]
    piece = st.one_of(*map(st.sampled_from, (calls, calls, thoughts, sorted(marks), LOOSE)))
    text = "".join(draw(st.lists(piece, max_size=6)))
    return text[: draw(st.integers(0, len(text)) | st.just(len(text)))]


def prepared_chat(name: str, **fields: Any) -> PreparedChat:
    request = parse_body(ChatRequest, {"messages": [HELLO], "tools": TOOLS, **fields})
    syntax, begun = SYNTAXES[name], "<|start|>assistant" if name == "gpt_oss" else ""
    make_parser = partial(request.parser, syntax, begun=begun)
    prompt = EncodedPrompt(np.array([1], np.int32), make_stop_scope=make_parser)
    return PreparedChat([prompt], request.sampling_params(100_000, syntax, begun=begun), make_parser)


def outputs_of(prepared: PreparedChat, text: str, sizes: list[int], reason: FinishReason) -> Iterator[RequestOutput]:
    """Yield what the engine has so far of a text that comes in pieces of so many bytes."""
    scope = prepared.prompts[0].make_stop_scope
    completion = RunningCompletion(0, "r", 0, prepared.params, ByteDecoder(), NO_INT32S, scope, streams=True)
    token_ids, start = list(text.encode()), 0
    for size in [*sizes, len(token_ids)]:
        if not completion.is_ended:
            completion.update(token_ids[start : start + size], 0, -1, None)
            start += size
            yield output_of(completion)
    if not completion.is_ended:
        completion.update([256], reason, -1, None)
        yield output_of(completion)


def output_of(completion: RunningCompletion) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1],
        outputs=[completion.output()],
        finished=completion.is_ended,
        metrics=RequestMetrics(arrival_time_s=0.0),
    )


def streamed(writer: Any, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    """Return the events that a writer makes of them."""

    async def written() -> str:
        return "".join([event async for event in writer.events(deltas_of(outputs))])

    found = re.findall(r"^data: (\{.*)$", asyncio.run(written()), re.MULTILINE)
    return [decode_json(event.encode()) for event in found]


def added_up(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that chunks add up to, and why it ended."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None}
    for chunk in chunks:
        [choice] = chunk["choices"]
        message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
        for field in ("content", "reasoning_content"):
            message[field] += choice["delta"].get(field, "")
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
    return message


def as_added_up(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    texts = {field: message[field] or "" for field in ("content", "reasoning_content")}
    return {**texts, "calls": calls, "finish_reason": choice["finish_reason"]}


def is_object(text: str) -> bool:
    try:
        value = json.loads(text, parse_constant=float)
        json.dumps(value, allow_nan=False)
        text_of_all = json.dumps(value, ensure_ascii=False)
        text_of_all.encode()
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not text.replace(" ", "").startswith(
        '{"n":{"n":'
    )  # deeper than JSON parsers follow


def without_names(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "id": "", "call_id": ""} for item in items]


def check_sent_back(body: dict[str, Any]) -> None:
    """Check that a conversation with an answer is taken, and shown to chat templates of all kinds."""
    if "input" in body:
        request = parse_body(ResponseRequest, body).chat().request
    elif "max_tokens" in body:
        request = parse_body(MessagesRequest, body).chat().request
    else:
        request = parse_body(ChatRequest, body)
    conversation = request.conversation(takes_images=False)
    for template in TEMPLATES:
        [text], _ = render_jinja_template(conversations=[conversation], chat_template=template)
        text.encode()


@pytest.mark.parametrize("name", SYNTAXES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_route_says_the_same_and_takes_its_answers_back(name: str, data: st.DataObject) -> None:
    text = data.draw(written_texts(name))
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=12))
    reason = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    chat = prepared_chat(name)
    outputs = list(outputs_of(chat, text, sizes, reason))
    last = outputs[-1:]

    whole = json.loads(chat.response(HEAD, last).model_dump_json())
    [choice] = whole["choices"]
    told = as_added_up(choice)
    assert added_up(streamed(ChunkWriter(HEAD, chat, None), outputs)) == told
    are_whole = [is_object(arguments) for _, arguments in told["calls"]]
    by_itself = "tool_calls" if are_whole and all(are_whole) else "stop"
    assert told["finish_reason"] == ("length" if reason is FinishReason.LENGTH else by_itself)
    check_sent_back({"messages": [HELLO, choice["message"], HELLO]})

    message = PreparedMessage(chat)
    answer = json.loads(message.response(HEAD, last).model_dump_json())
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert [call["input"] for call in calls] == [
        json.loads(arguments) if whole else {"INVALID_JSON": arguments}
        for (_, arguments), whole in zip(told["calls"], are_whole, strict=True)
    ]
    assert (answer["stop_reason"] == "tool_use") == (told["finish_reason"] == "tool_calls")
    *_, ended, _ = streamed(MessageEventWriter(HEAD, message), outputs)
    assert ended["delta"] == {name: answer[name] for name in ended["delta"]}
    assert {"stop_reason", "stop_sequence"} <= ended["delta"].keys()
    check_sent_back({"max_tokens": 9, "messages": [HELLO, {"role": "assistant", "content": answer["content"]}, HELLO]})

    response = PreparedResponse(chat, parse_body(ResponseRequest, {"input": "hello"}))
    output = json.loads(response.response(HEAD, last).model_dump_json())["output"]
    statuses = [item["status"] for item in output if item["type"] == "function_call"]
    cut_off = [
        not whole or (reason is FinishReason.LENGTH and item is output[-1])
        for whole, item in zip(are_whole, (item for item in output if item["type"] == "function_call"), strict=True)
    ]
    assert statuses == ["incomplete" if cut else "completed" for cut in cut_off]
    *_, final = streamed(ResponseEventWriter(HEAD, response), outputs)
    assert without_names(final["response"]["output"]) == without_names(output)
    check_sent_back({"input": [HELLO, *output, HELLO]})


def read(chat: PreparedChat, text: str) -> MessageParser:
    parser = chat.make_parser()
    parser.feed(text, is_last=True)
    return parser


def first_stop(text: str, spans: list[tuple[int, int]], stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Return the text up to the stop string that is complete first in one of the spans, and that string."""
    for start, end in spans:
        for at in range(start + 1, end + 1):
            hits = [stop for stop in stops if text[start:at].endswith(stop)]
            if hits:
                stop = max(hits, key=len)
                return text[: at if include else at - len(stop)], stop
    return text, None


@pytest.mark.parametrize("name", SYNTAXES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_stop_strings_are_about_the_content(name: str, data: st.DataObject) -> None:
    text = data.draw(written_texts(name))
    stops = data.draw(st.lists(st.sampled_from(["STOP", "a", "\n", "OP ", "}", "<", "TOP<t"]), min_size=1, unique=True))
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=12))
    include = data.draw(st.booleans())
    chat = prepared_chat(name, stop=stops, include_stop_str_in_output=include)
    outputs = list(outputs_of(chat, text, sizes, FinishReason.STOP))
    expected = first_stop(text, read(chat, text).content_spans, stops, include=include)
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].stop_reason) == expected
    [choice] = json.loads(chat.response(HEAD, outputs[-1:]).model_dump_json())["choices"]
    assert added_up(streamed(ChunkWriter(HEAD, chat, None), outputs)) == as_added_up(choice)


@pytest.mark.parametrize(
    ("name", "text", "stop", "message"),
    [
        ("hermes", "<think>\nQuestion: a</think>\n\nIt is.\nQuestion: 5", "Question:", ("Question: a", "It is.\n")),
        ("hermes", "<think>\na\n\nb</think>\n\nIt is 4.\n\nAnd", "\n\n", ("a\n\nb", "It is 4.")),
        ("hermes", "<think>\nObservation: a</think>\n\nAction: b\nObservation:", "\nObservation:",
         ("Observation: a", "Action: b")),
        ("mistral", "[THINK]a STOP b[/THINK]c STOP d", "STOP", ("a STOP b", "c ")),
        ("gpt_oss", f"{ANALYSIS}final STOP{FINAL}It STOP", "STOP", ("final STOP", "It ")),
        ("gpt_oss", f"{ANALYSIS}a{FINAL}It is final", "final", ("a", "It is ")),
        ("hermes", "no thought STOP </think>", "STOP", ("", "no thought ")),
    ],
)  # fmt: skip
def test_stop_strings_in_thoughts_end_nothing(name: str, text: str, stop: str, message: tuple[str, str]) -> None:
    chat = prepared_chat(name, stop=[stop])
    outputs = list(outputs_of(chat, text, [1] * 200, FinishReason.STOP))
    told = added_up(streamed(ChunkWriter(HEAD, chat, None), outputs))
    assert (told["reasoning_content"], told["content"]) == message
    assert outputs[-1].outputs[0].stop_reason == stop


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_call_that_the_model_cuts_off_is_not_reported_as_finished(name: str) -> None:
    syntax = SYNTAXES[name].calls
    assert syntax is not None
    is_bare = issubclass(syntax.arguments, XmlParameters)
    arguments = '{cmd:<|"|>ls -l /<|"|>}' if name == "gemma4" else '{"cmd": "ls -l /"}'
    call = bare(syntax, cmd="ls -l /") if is_bare else syntax.written([("run", arguments)])
    chat = prepared_chat(name)
    last = list(outputs_of(chat, call + call[: call.index("-l")], [], FinishReason.STOP))[-1:]
    [choice] = chat.response(HEAD, last).model_dump()["choices"]
    told = as_added_up(choice)
    assert (told["finish_reason"], told["calls"][-1]) == ("stop", ["run", '{"cmd": "ls '])
    answer = PreparedMessage(chat).response(HEAD, last).model_dump()
    inputs = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    assert (answer["stop_reason"], inputs) == ("end_turn", [{"cmd": "ls -l /"}, {"INVALID_JSON": '{"cmd": "ls '}])
    response = PreparedResponse(chat, parse_body(ResponseRequest, {"input": "hello"})).response(HEAD, last).model_dump()
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
