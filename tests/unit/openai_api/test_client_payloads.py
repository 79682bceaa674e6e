"""What real clients send: conversations with the server's own answers, explicit nulls, numbers as JavaScript has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from raypp.errors import RequestError
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.error_bodies import BodyError, decode_json, describe_error, parse_body
from raypp.openai_api.response_request import ResponseRequest

HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
PLAIN_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def chat(**fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, {"messages": [HELLO], **fields})


def complete(**fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, {"prompt": "a", **fields})


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the assistant as the chat template reads it."""
    [_, read] = chat(messages=[HELLO, {"role": "assistant", **message}]).conversation(takes_images=False)
    return read


@pytest.mark.parametrize(
    "sent",
    [
        {"content": "hi", "annotations": [], "audio": None, "function_call": None, "refusal": None, "tool_calls": None},
        {"content": "hi", "parsed": {"name": "x"}, "refusal": None},
        {"content": "hi", "reasoning": None, "reasoning_content": None, "reasoning_details": [{"type": "text"}]},
        {"content": "hi", "provider_specific_fields": {"refusal": None}, "images": [], "thinking_blocks": None},
        {"content": "hi", "cache_control": {"type": "ephemeral"}},
        {"content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "annotations": []}]},
        {"content": "hi", "tool_calls": []},
    ],
)
def test_an_answer_can_be_sent_back_as_it_came(sent: dict[str, Any]) -> None:
    assert plain(sent) == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (CALL, PLAIN_CALL),
        ({**CALL, "index": 0}, PLAIN_CALL),
        ({**CALL, "function": {**CALL["function"], "parsed_arguments": {"x": 1}}}, PLAIN_CALL),  # type: ignore[dict-item]
        ({**CALL, "provider_specific_fields": None, "cache_control": None}, PLAIN_CALL),
        ({**CALL, "function": {"name": "f", "arguments": {"x": 1}}}, PLAIN_CALL),
        ({**CALL, "type": None}, PLAIN_CALL),
        (
            {**CALL, "function": {"name": "f", "arguments": ""}},
            {**PLAIN_CALL, "function": {"name": "f", "arguments": {}}},
        ),
        (
            {**CALL, "function": {"name": "f", "arguments": "[1"}},
            {**PLAIN_CALL, "function": {"name": "f", "arguments": {"INVALID_JSON": "[1"}}},
        ),
    ],
)
def test_calls_can_be_sent_back_as_they_came(sent: dict[str, Any], read: dict[str, Any]) -> None:
    assert plain({"content": None, "tool_calls": [sent]}) == {"role": "assistant", "content": "", "tool_calls": [read]}


def test_an_image_may_be_its_address_alone() -> None:
    for image_url in ("data:x", {"url": "data:x"}):
        parts = [{"type": "image_url", "image_url": image_url}]
        [message] = chat(messages=[{"role": "user", "content": parts}]).conversation(takes_images=True)
        assert message["content"] == [{"type": "image_url", "image_url": {"url": "data:x"}}]
    with pytest.raises(BodyError, match=r"messages\[0\].content\[0\].image_url"):
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": 3}]}])


def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    assert decode_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    with pytest.raises(BodyError, match="position 6"):
        decode_json(b'\xef\xbb\xbf{"a": \xff}')


def test_reasoning_has_two_names() -> None:
    assert plain({"content": "a", "reasoning": "so"})["reasoning_content"] == "so"
    assert plain({"content": "a", "reasoning": "so", "reasoning_content": "why"})["reasoning_content"] == "why"
    assert "reasoning" not in plain({"content": "a", "reasoning": {"effort": "low"}})


def test_tools_may_have_notes() -> None:
    function = {"name": "f", "parameters": {"type": "object"}, "returns": {"type": "string"}}
    tools = [{"type": "function", "function": function, "cache_control": {"type": "ephemeral"}, "strict": None}]
    [tool] = chat(tools=tools).rendering().chat_template_kwargs["tools"]
    assert tool == {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_what_would_be_lost_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        plain({"audio": {"id": "a"}})
    assert caught.value.param == "messages[1].audio"


def test_every_field_may_be_null() -> None:
    required = {"messages", "prompt"}
    foreign = {"audio": None, "prediction": None, "web_search_options": None}
    assert chat(**dict.fromkeys(ChatRequest.model_fields.keys() - required), **foreign) == chat()
    assert complete(**dict.fromkeys(CompletionRequest.model_fields.keys() - required), **foreign) == complete()
    options = {"include_usage": None, "foreign": None}
    assert chat(stream_options=options, response_format={"type": "text", "json_schema": None, "foreign": None})
    with pytest.raises(BodyError, match="messages is missing"):
        chat(messages=None)


@pytest.mark.parametrize(
    ("fields", "param", "nearest"),
    [
        ({"vibe": {}}, "vibe", None),
        ({"max_token": 3}, "max_token", "max_tokens"),
        ({"stream_options": {"include_usag": True}}, "stream_options.include_usag", "include_usage"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "json_schema"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "json"),
    ],
)
def test_what_is_not_known_and_says_something_is_refused(fields: dict[str, Any], param: str, nearest: str) -> None:
    with pytest.raises(BodyError, match=f"unknown field {param}") as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.expected == (f"did you mean {nearest}?" if nearest else None)


def test_open_webui_sends_advanced_parameters_beside_those_of_openai() -> None:
    # `apply_params_to_form_data` of 0.12.4 puts all that are set into the body: one of Ollama's may be among them
    ollama = {"num_ctx": 8192, "keep_alive": "5m"}
    asks = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "frequency_penalty": 0.1, "seed": 7}
    sent = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "stop": ["END"], **asks}
    request = chat(**sent, max_tokens=128, logit_bias={"5": 10}, reasoning_effort="low", **ollama)
    assert set(request.ignored()) == ollama.keys()
    params = request.sampling_params(1000)
    assert (params.max_tokens, params.top_k, params.seed, params.logit_bias) == (128, 40, 7, {5: 10.0})
    for name, value in {"repeat_penalty": 1.1, "think": False, "mirostat": 1, "num_predict": 5}.items():
        with pytest.raises(RequestError, match=name):  # each would change the text
            chat(**sent, **{name: value})
    of_the_machine = {"num_batch": 512, "num_keep": 24, "num_gpu": 1, "num_thread": 2, "use_mmap": True}
    assert set(parse_body(ChatRequest, {"messages": [HELLO], **of_the_machine}, "warn").ignored()) == {*of_the_machine}


def test_whole_numbers_are_integers_however_they_are_written() -> None:
    body = {"max_tokens": 20.0, "n": 2.0, "seed": 7.0, "top_k": 3.0, "stop_token_ids": [5.0], "min_tokens": 1.0}
    params = complete(**body).sampling_params(100)
    assert (params.max_tokens, params.n, params.seed, params.top_k, params.stop_token_ids) == (20, 2, 7, 3, (5,))
    assert type(params.max_tokens) is int
    assert chat(max_completion_tokens=20.0).sampling_params(100).max_tokens == 20
    for value in (20.5, True, "20", float("inf"), 1e400):
        with pytest.raises(BodyError, match="max_tokens"):
            complete(max_tokens=value)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 3}}]}],
            "[0].content[0].image_url.url",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "[0].content[0].image_url.url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "sound"}]}], "[0].content[0]"),
        ([{"role": "user", "content": [{"text": "a"}]}], "[0].content[0]"),
        ([{"content": "a"}], "[0].role"),
    ],
)
def test_a_path_holds_what_was_sent_and_no_names_of_ours(messages: list[Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        chat(messages=messages)
    assert caught.value.param == f"messages{param}"
    assert f"messages{param}" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ([1], "a JSON object"),
        ({"prompt": "a", "logit_bias": [1]}, "a JSON object"),
        ({"prompt": "a", "seed": 2**63}, f"less than {2**63}"),
        ({"prompt": [1, 2**63]}, f"a token of the model's vocabulary, less than {2**31}"),
        ({"prompt": "a", "stop": [""]}, "at least 1 character"),
    ],
)
def test_what_is_expected_is_said_in_words_of_json(body: object, expected: str) -> None:
    with pytest.raises(BodyError) as caught:
        parse_body(CompletionRequest, body)
    assert caught.value.expected == expected


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": [-1] * 10_000}, "prompt[0]"),
        (CompletionRequest, {"prompt": [[1]] + [[-1]] * 10_000}, "prompt[1][0]"),
        (CompletionRequest, {"prompt": "a", "stop": [""] * 10_000}, "stop[0]"),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 10_000}, "stop_token_ids[0]"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "a" for i in range(10_000)}}, "logit_bias"),
        (CompletionRequest, {"prompt": "a", **{f"x{i}": 1 for i in range(10_000)}}, "x0"),
        (ChatRequest, {"messages": [5] * 10_000}, "messages[0]"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "a"}] * 10_000}]}, "messages[0].content[0]"),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "tools": [5] * 10_000}, "tools[0]"),
        (ResponseRequest, {"input": [5] * 10_000}, "input[0]"),
        (ResponseRequest, {"input": [{"role": "user", "content": [{"type": "a"}] * 10_000}]}, "input[0].content[0]"),
        (ResponseRequest, {"input": "a", "tools": [5] * 10_000}, "tools[0]"),
    ],
)
def test_a_body_costs_no_complaint_for_each_of_its_mistakes(
    kind: type[ChatRequest | CompletionRequest | ResponseRequest], body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 10
    with pytest.raises(BodyError) as told:
        parse_body(kind, body)
    assert told.value.param == param


def test_a_conversation_has_a_message() -> None:
    with pytest.raises(BodyError, match=r"for messages; .*; expected: a list of at least 1$"):
        chat(messages=[])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 4301: 1}}, "logit_bias"),
        ({"temperature": 0, "n": 2}, "n"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
            "response_format.json_schema",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_what_parses_and_makes_no_sense_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields).sampling_params(100)
    status, response = describe_error(caught.value)
    assert (status, response.error.param) == (400, param)
    assert len(response.error.message) < 1000


@pytest.mark.parametrize("depth", [150, 990, 100_000])
def test_arguments_may_be_as_deep_as_a_model_writes_them(depth: int) -> None:
    arguments = '{"x":' * depth + "1" + "}" * depth
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    request = chat(messages=[HELLO, {"role": "assistant", "tool_calls": [call]}])
    shown = request.conversation(takes_images=False)[1]["tool_calls"][0]["function"]["arguments"]
    assert str(shown) == arguments
    assert shown == (json.loads(arguments) if depth <= 200 else {"INVALID_JSON": arguments})


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "the body is empty"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b"[" * 100_000, "at most 200 levels"),
        (b'{"a": ' + b"1" * 5000 + b"}", "4,300 digits"),
        (b'{"a": "\xff"}', "not valid UTF-8; got: the byte 0xff at position 7"),
        (b"\xff\xfe{\x00", "not valid UTF-8; got: the byte 0xff at position 0"),
        (rb'{"a": "\ud800"}', "invalid escape"),
    ],
)
def test_what_is_no_json_is_said_why(raw: bytes, said: str) -> None:
    with pytest.raises(BodyError, match=said):
        decode_json(raw)
