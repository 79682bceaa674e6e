"""A message of a chat has content, or what stands for it."""

from __future__ import annotations

from typing import Any

import pytest

from raypp.errors import RequestError
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.error_bodies import BodyError, parse_body
from raypp.openai_api.response_request import ResponseRequest

CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}


def read(**message: Any) -> None:
    body = parse_body(ChatRequest, {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}, message]})
    body.conversation(takes_images=False)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("misspelt", [{}, {"contents": "Hello"}, {"text": "Hello"}])
def test_a_message_without_content_is_refused(role: str, misspelt: dict[str, str]) -> None:
    with pytest.raises(BodyError, match="a message with content") as raised:
        read(role=role, **misspelt)
    assert raised.value.param == "messages[1]"
    assert ", ".join(["role", *misspelt]) in str(raised.value), "what was given instead"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "tool", "content": None, "tool_call_id": "1"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": []},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "function_call": CALL["function"]},
        {"role": "assistant", "reasoning_content": "Hm."},
        {"role": "assistant", "refusal": "No."},
    ],
)
def test_what_clients_leave_out_is_not(message: dict[str, Any]) -> None:
    read(**message)


@pytest.mark.parametrize(("nothing", "said"), [(None, "null"), ([], r"\[\]")])
def test_a_message_of_a_user_says_something(nothing: Any, said: str) -> None:
    with pytest.raises(
        RequestError, match=f"a message of a user without content; got: {said}; expected: text"
    ) as raised:
        read(role="user", content=nothing)
    assert raised.value.param == "messages[1].content"


def test_of_responses_too() -> None:
    body = parse_body(ResponseRequest, {"input": [{"role": "user", "content": []}]})
    with pytest.raises(RequestError, match="a message of a user without content"):
        body.chat().request.conversation(takes_images=False)
