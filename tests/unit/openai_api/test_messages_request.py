"""Bodies of `/v1/messages` become the chats that they ask for, or are refused by the names of their own fields."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raypp.api.tokenizer import Tokenizer
from raypp.errors import RequestError
from raypp.models.registry import resolve_model_path
from raypp.openai_api.anthropic_request import MessagesFields, MessagesRequest
from raypp.openai_api.body_preparer import BodyPreparer
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.error_bodies import BodyError, parse_body

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOL = {"name": "f", "description": "Do it.", "input_schema": SCHEMA, "strict": True}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Do it.", "parameters": SCHEMA, "strict": True},
}
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "fine"}
CHAT_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "fine"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def ask(**fields: Any) -> MessagesRequest:
    return parse_body(MessagesRequest, {"max_tokens": 9, "messages": [user("hello")], **fields})


def chat_of(**fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, {"messages": [user("hello")], **fields})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def model(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}, "citations": None}


CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([user("a")], [user("a")]),
    ([user([text("a"), text("b")])], [user("a\nb")]),
    ([{"role": "system", "content": "be kind"}, user("a")], [{"role": "system", "content": "be kind"}, user("a")]),
    (
        [
            user("a"),
            model({"type": "thinking", "thinking": "hm", "signature": ""}, text("b"), USE, {**USE, "id": "c2"}),
            user([RESULT, {**RESULT, "tool_use_id": "c2", "content": [text("fine")], "is_error": True}, text("and?")]),
        ],
        [
            user("a"),
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "content": "b",
                "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
            },
            CHAT_RESULT,
            {**CHAT_RESULT, "tool_call_id": "c2"},
            user("and?"),
        ],
    ),
    (
        [user([text("a"), RESULT, {"type": "tool_result", "tool_use_id": "c2"}])],
        [user("a"), CHAT_RESULT, {**CHAT_RESULT, "tool_call_id": "c2", "content": ""}],
    ),
    (
        [user("a"), model({"type": "redacted_thinking", "data": "x"}), user("b")],
        [user("a"), {"role": "assistant", "content": None}, user("b")],
    ),
    (
        [user([IMAGE, text("what?")]), model(USE), user([{**RESULT, "content": [IMAGE]}])],
        [
            user([CHAT_IMAGE, {"type": "text", "text": "what?"}]),
            {"role": "assistant", "tool_calls": [CHAT_CALL]},
            {**CHAT_RESULT, "content": [CHAT_IMAGE]},
        ],
    ),
    (
        [user([{"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}])],
        [user([{"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}])],
    ),
]


@pytest.mark.parametrize(("given", "messages"), CONVERSATIONS)
def test_blocks_are_the_messages_of_a_chat(given: Any, messages: list[dict[str, Any]]) -> None:
    chat = ask(messages=given).chat().request
    assert chat.conversation(takes_images=True) == chat_of(messages=messages).conversation(takes_images=True)
    assert not chat.continue_final_message


@pytest.mark.parametrize("system", ["be brief", [text("be brief")]])
def test_the_system_comes_first(system: Any) -> None:
    chat = ask(system=system).chat().request
    expected = chat_of(messages=[{"role": "system", "content": "be brief"}, user("hello")])
    assert chat.conversation(takes_images=False) == expected.conversation(takes_images=False)


@pytest.mark.parametrize("content", ["I say", [text("I say")]])
def test_a_last_message_of_the_models_own_is_continued(content: Any) -> None:
    chat = ask(messages=[user("hello"), {"role": "assistant", "content": content}]).chat().request
    assert (chat.continue_final_message, chat.add_generation_prompt, chat.continued_text) == (True, False, "I say")


def test_fields_are_those_of_the_chat() -> None:
    given = ask(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        seed=3,
        stop_sequences=["a", "b"],
        cache_salt="s",
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        metadata={"user_id": "u"},
    )
    expected = chat_of(
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        seed=3,
        stop=["a", "b"],
        cache_salt="s",
        reasoning_effort="low",
        response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        chat_template_kwargs={"enable_thinking": True},
    )
    told = given.chat().request.model_dump(exclude_none=True)
    beside = {"add_generation_prompt": True, "continue_final_message": False, "parallel_tool_calls": True}
    assert told == {**expected.model_dump(exclude_none=True), **beside}
    assert given.form_param == "output_config.format"


@pytest.mark.parametrize(
    ("thinking", "effort", "kwargs"),
    [
        ({"type": "disabled"}, "none", {}),
        ({"type": "enabled", "budget_tokens": 1}, None, {"enable_thinking": True}),
        ({"type": "adaptive"}, None, {}),
        (None, None, {}),
    ],
)
def test_thinking_is_what_the_template_knows(thinking: Any, effort: str | None, kwargs: dict[str, Any]) -> None:
    chat = ask(thinking=thinking).chat().request
    assert (chat.reasoning_effort, chat.chat_template_kwargs) == (effort, kwargs)


@pytest.mark.parametrize(
    ("choice", "chat_choice", "is_parallel"),
    [
        (None, None, True),
        ({"type": "auto"}, "auto", True),
        ({"type": "none"}, "none", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
    ],
)
def test_tools_are_those_of_the_chat(choice: Any, chat_choice: Any, is_parallel: bool) -> None:
    given = ask(tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}], tool_choice=choice).chat().request
    expected = chat_of(tools=[CHAT_TOOL], tool_choice=chat_choice)
    assert (given.tools, given.tool_choice) == (expected.tools, expected.tool_choice)
    assert given.parallel_tool_calls == is_parallel


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [user([])]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ({"messages": [user([{"type": "document", "source": {}}])]}, "messages[0].content[0]"),
        ({"messages": [user([USE])]}, "messages[0].content[0]"),
        (
            {"messages": [user([{**IMAGE, "source": {"type": "file", "file_id": "f"}}])]},
            "messages[0].content[0].source",
        ),
        ({"messages": [user("a"), model({**USE, "input": "{}"})]}, "messages[1].content[0].input"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"stop": ["a"]}, "stop"),
        ({"mcp_servers": [{"type": "url", "url": "https://x"}]}, "mcp_servers"),
    ],
)
def test_what_is_not_taken_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        ask(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [user("a"), user([IMAGE])], "system": "b"}, "messages[1]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"messages": [user("a " * 4000)]}, "messages"),
    ],
)
def test_what_a_chat_is_refused_for_is_named_as_here(fields: dict[str, Any], param: str) -> None:
    preparer = BodyPreparer(Tokenizer(resolve_model_path("tiny")), None, max_model_len=256)
    with pytest.raises(RequestError) as caught:
        asyncio.run(preparer.message(ask(**fields)))
    assert caught.value.param == param


def test_fields_that_have_no_effect() -> None:
    given = ask(
        metadata={"user_id": None},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        context_management={"edits": []},
        thinking={"type": "enabled", "budget_tokens": 5},
    )
    assert given.ignored() == [
        "metadata",
        "service_tier",
        "cache_control",
        "context_management",
        "thinking.budget_tokens",
    ]


def test_counting_takes_what_is_read_and_nothing_else() -> None:
    counted = parse_body(MessagesFields, {"messages": [user("a")], "tools": [TOOL], "system": "b"}).chat().request
    asked = ask(messages=[user("a")], tools=[TOOL], system="b").chat().request
    assert counted.rendering() == asked.rendering()
    assert counted.messages == asked.messages
    with pytest.raises(BodyError, match="unknown field max_tokens"):
        parse_body(MessagesFields, {"messages": [user("a")], "max_tokens": 3})


def test_a_field_that_only_a_chat_has_is_answered_with_this_ones() -> None:
    with pytest.raises(BodyError, match="unknown field stop") as caught:
        ask(stop=["a"])
    assert caught.value.expected == "did you mean stop_sequences?"
    with pytest.raises(BodyError, match="unknown field stop") as caught:
        parse_body(MessagesFields, {"messages": [user("a")], "stop": ["a"]})
    assert caught.value.expected is None, "counting has no stop_sequences"
