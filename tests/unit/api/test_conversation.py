"""Replayed calls reach chat templates in whatever way these write arguments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from raypp.api.conversation import plain_conversation

WRITTEN = '{"city": "M\u00fcnchen","days":[1]}'  # as the model wrote it: not as Python would
OBJECT = {"city": "M\u00fcnchen", "days": [1]}
SPACED = '{"city": "M\u00fcnchen", "days": [1]}'


@pytest.mark.parametrize(
    ("written", "given", "expected"),
    [
        ("{{ arguments | tojson }}", WRITTEN, SPACED),  # Qwen, Llama, gpt-oss
        ("{{ 'f' + arguments + ';' }}", WRITTEN, f"f{WRITTEN};"),  # DeepSeek
        ("{{ 'f' + arguments + ';' }}", OBJECT, f"f{SPACED};"),
        ("{{ 'f' ~ arguments }}", WRITTEN, f"f{WRITTEN}"),
        ("{{ arguments if arguments is string else arguments | tojson }}", WRITTEN, SPACED),  # Mistral
        ("{% for name, value in arguments | items %}{{ name }}={{ value }};{% endfor %}", WRITTEN,
         "city=M\u00fcnchen;days=[1];"),  # Qwen3-Coder
        ("{{ 'f' + arguments }}", None, "f{}"),
        ("{{ 'f' + arguments }}", " ", "f{}"),
        ("{{ 'f' + arguments }}", "no JSON", "fno JSON"),
    ],
)  # fmt: skip
def test_arguments_of_replayed_calls(written: str, given: Any, expected: str) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": given}}]
    conversation = plain_conversation([{"role": "assistant", "content": None, "tool_calls": calls}])
    template = "{% set arguments = messages[0].tool_calls[0].function.arguments %}" + written
    for messages in (conversation, copy.deepcopy(conversation)):
        [text], _ = render_jinja_template(conversations=[messages], chat_template=template)
        assert text == expected
