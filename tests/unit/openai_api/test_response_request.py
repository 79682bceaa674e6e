"""Bodies of `/v1/responses` become the chats that they ask for, or are refused by the names of their own fields."""

from __future__ import annotations

from typing import Any

import pytest

from raypp.errors import RequestError
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.error_bodies import BodyError, parse_body
from raypp.openai_api.response_input import chat_tools, own_names
from raypp.openai_api.response_request import ResponseRequest

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
FUNCTION = {"name": "f", "description": "Do it.", "parameters": SCHEMA, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def respond(**fields: Any) -> ResponseRequest:
    return parse_body(ResponseRequest, {"input": "hello", **fields})


def messages_of(**fields: Any) -> list[dict[str, Any]]:
    return respond(**fields).chat().request.conversation(takes_images=True)


def chat_messages(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return parse_body(ChatRequest, {"messages": list(messages)}).conversation(takes_images=True)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(text: str, **fields: Any) -> dict[str, Any]:
    """Return a message as it comes out of a response."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part], **fields}


OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "fine"}
CHAT_OUTPUT = {"role": "tool", "tool_call_id": "c1", "content": "fine"}

CONVERSATIONS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("hello", [user("hello")]),
    ([user("hello")], [user("hello")]),
    ([{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], [user("a")]),
    ([{"role": "developer", "content": "be kind"}, user("a")], [{"role": "system", "content": "be kind"}, user("a")]),
    ([user("a"), answered("b"), user("c")], [user("a"), {"role": "assistant", "content": "b"}, user("c")]),
    (
        [user("a"), REASONING, answered("b"), {**CALL, "id": "fc_1", "status": "completed"}, OUTPUT],
        [
            user("a"),
            {"role": "assistant", "reasoning_content": "hm", "content": "b", "tool_calls": [CHAT_CALL]},
            CHAT_OUTPUT,
        ],
    ),
    (
        [user("a"), CALL, {**CALL, "call_id": "c2"}, OUTPUT, {**OUTPUT, "call_id": "c2"}],
        [
            user("a"),
            {"role": "assistant", "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}]},
            CHAT_OUTPUT,
            {**CHAT_OUTPUT, "tool_call_id": "c2"},
        ],
    ),
    # A text behind a call is a message of its own, since a chat's message has its text before its calls.
    (
        [user("a"), CALL, answered("b"), user("c")],
        [
            user("a"),
            {"role": "assistant", "tool_calls": [CHAT_CALL]},
            {"role": "assistant", "content": "b"},
            user("c"),
        ],
    ),
    ([user("a"), {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"}], [user("a")]),
    (
        [user("a"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [user("a"), {"role": "assistant", "content": "no"}],
    ),
    (
        [{"role": "user", "content": [{"type": "input_image", "detail": "auto", "image_url": "data:x"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}],
    ),
    (
        [user("a"), CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "fine"}]}],
        [user("a"), {"role": "assistant", "tool_calls": [CHAT_CALL]}, CHAT_OUTPUT],
    ),
]


@pytest.mark.parametrize(("given", "messages"), CONVERSATIONS)
def test_items_are_the_messages_of_a_chat(given: Any, messages: list[dict[str, Any]]) -> None:
    assert messages_of(input=given) == chat_messages(*messages)


def test_instructions_come_first() -> None:
    system = {"role": "system", "content": "be brief"}
    assert messages_of(instructions="be brief") == chat_messages(system, user("hello"))
    assert messages_of(instructions="be brief", input=[]) == chat_messages(system)


def test_fields_are_those_of_the_chat() -> None:
    body = respond(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        top_k=4,
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        top_logprobs=2,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        chat_template_kwargs={"enable_thinking": False},
        user="u",
        metadata={"a": "b"},
    )
    chat = parse_body(
        ChatRequest,
        {
            "messages": [user("hello")],
            "max_completion_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 3,
            "top_k": 4,
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "reasoning_effort": "low",
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False},
            "user": "u",
            "metadata": {"a": "b"},
        },
    )
    assert body.chat().request == chat
    assert respond(include=["message.output_text.logprobs"]).chat().request.sampling_params(9).logprobs == 0


@pytest.mark.parametrize(
    ("choice", "chat_choice"),
    [
        (None, None),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tools_are_those_of_the_chat(choice: Any, chat_choice: Any) -> None:
    tools = [{"type": "function", **FUNCTION}]
    chat = parse_body(
        ChatRequest,
        {
            "messages": [user("hello")],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": chat_choice,
            "parallel_tool_calls": False,
        },
    )
    given = respond(tools=tools, tool_choice=choice, parallel_tool_calls=False).chat().request
    assert (given.tools, given.tool_choice, given.parallel_tool_calls) == (chat.tools, chat.tool_choice, False)


SPACE = {"type": "namespace", "name": "n", "description": "Words.", "tools": [{"type": "function", **FUNCTION}]}


def test_functions_of_a_namespace_are_called_by_both_names() -> None:
    other = {"type": "function", "name": "g", "description": "Go."}
    space = {**SPACE, "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "c"}, other]}
    given = respond(
        tools=[{"type": "function", **FUNCTION}, space],
        tool_choice={"type": "function", "name": "n.f"},
        input=[user("a"), {**CALL, "namespace": "n"}, OUTPUT],
    )
    chat = given.chat().request
    functions = [tool.function for tool in chat.tools or ()]
    assert [(function.name, function.description) for function in functions] == [
        ("f", "Do it."),
        ("n.f", "Words.\nDo it."),
        ("n.g", "Go."),
    ]
    assert (functions[1].parameters, functions[1].strict) == (SCHEMA, True)
    [_, turn, _] = chat.conversation(takes_images=False)
    assert turn["tool_calls"][0]["function"]["name"] == "n.f"
    assert own_names(given.tools) == {
        "n.f": {"namespace": "n", "name": "f"},
        "n.g": {"namespace": "n", "name": "g"},
    }
    long = "x" * 64
    [named] = chat_tools(respond(tools=[{**SPACE, "name": long, "tools": [{**other, "name": long}]}]).tools)
    assert named.function.name == f"{long}.{long}"


def test_tools_that_cannot_be_called_are_left_out_of_the_chat() -> None:
    others = [{"type": "web_search", "external_web_access": False}, {"type": "mcp", "server_label": "a"}]
    for tool_choice in (None, "auto", "none"):
        given = respond(tools=[*others, {"type": "function", **FUNCTION}], tool_choice=tool_choice)
        assert [tool.function.name for tool in given.chat().request.tools or ()] == ["f"]
        assert given.ignored() == ["tools=mcp", "tools=web_search"]
        assert respond(tools=others, tool_choice=tool_choice).chat().request.tools == []
    assert respond(tools=[*others, {"type": "function", **FUNCTION}], tool_choice="required").chat()


def test_notes_of_a_client_about_itself_are_ignored() -> None:
    given = respond(client_metadata={"a": "b", "c": {"d": 1}})
    assert given.chat().request == respond().chat().request
    assert given.ignored() == ["client_metadata"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            "with tools of type web_search",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "got: web_search"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the conversation so far as input"),
        ({"conversation": {"id": "c"}}, "conversation", "send the conversation so far as input"),
        ({"background": True}, "background", "without background; hint: no responses are kept"),
        ({"prompt": {"id": "p"}}, "prompt", "send instructions and input"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "leave older items out"),
        ({"input": []}, "input", "there is no input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "store=false"),
        (
            {"input": [user("a"), {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[1].content[0]",
            "no files are kept",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "has no schema"),
    ],
)
def test_what_is_not_supported_says_what_to_do(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        respond(**fields).chat()
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"content": "a"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"tools": [{"type": "websearch"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tool_choice": {"type": "websearch"}}, "tool_choice"),
        ({"include": ["file_search"]}, "include[0]"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"messages": [user("a")]}, "messages"),
    ],
)
def test_what_has_another_shape_is_said_where_it_stands(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        respond(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_errors_about_the_chat_name_the_fields_of_the_response() -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}
    chat = respond(input=[user("a"), CALL, CALL, image], instructions="i").chat()
    with pytest.raises(RequestError, match="takes no images") as caught, chat.naming():
        chat.request.conversation(takes_images=False)
    assert caught.value.param == "input[3]"


def test_every_field_may_be_null() -> None:
    assert respond(**dict.fromkeys(ResponseRequest.model_fields.keys() - {"input"})) == respond()


def test_a_long_turn_of_calls_is_read_in_one_pass() -> None:
    [_, turn] = messages_of(input=[user("a"), *[CALL] * 20_000])
    assert len(turn["tool_calls"]) == 20_000


@pytest.mark.parametrize(
    ("field", "own"),
    [("response_format", "text.format"), ("max_tokens", "max_output_tokens"), ("messages", "input")],
)
def test_a_field_of_chats_is_answered_with_its_name_here(field: str, own: str) -> None:
    with pytest.raises(BodyError, match=f"unknown field {field}") as caught:
        respond(**{field: 1})
    assert caught.value.expected == f"did you mean {own}?"
