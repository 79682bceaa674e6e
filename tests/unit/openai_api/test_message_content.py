"""A message of a chat has content, or what stands for it."""

from __future__ import annotations

from typing import Any

import pytest

from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.error_bodies import BodyError, parse_body

CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}


def read(**message: Any) -> None:
    parse_body(ChatRequest, {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}, message]})


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
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "function_call": CALL["function"]},
        {"role": "assistant", "reasoning_content": "Hm."},
        {"role": "assistant", "refusal": "No."},
    ],
)
def test_what_clients_leave_out_is_not(message: dict[str, Any]) -> None:
    read(**message)
