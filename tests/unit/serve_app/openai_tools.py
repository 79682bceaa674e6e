"""What the `openai` client's helpers for forms and tools do against an app. Also run against Ray Serve."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}


class Event(BaseModel):
    """Something that happens."""

    name: Annotated[str, Field(max_length=12)]
    kind: Literal["talk", "party"]
    guests: Annotated[list[Annotated[str, Field(max_length=5)]], Field(max_length=2)]
    is_open: bool


class GetWeather(BaseModel):
    """Say what the weather will be."""

    city: Literal["Wien", "Bern"]
    days: Annotated[int, Field(ge=1, le=7)]


class Ping(BaseModel):
    """Answer."""

    text: Annotated[str, Field(max_length=8)]


TOOLS = [openai.pydantic_function_tool(GetWeather), openai.pydantic_function_tool(Ping)]
MODELS = {"GetWeather": GetWeather, "Ping": Ping}


def check_parse(client: openai.OpenAI) -> None:
    """Parse a form, at once and from a stream."""
    for seed in range(2):
        given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 150, "seed": seed}
        parsed = client.chat.completions.parse(response_format=Event, extra_body=SILENT, **given)
        [choice] = parsed.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Event)
        with client.chat.completions.stream(response_format=Event, extra_body=SILENT, **given) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == choice.message.parsed
        assert {"content.delta", "content.done"} <= kinds


def check_tools(client: openai.OpenAI) -> None:
    """Have tools called, at once and from a stream, and go on with what they said."""
    for seed in range(1):
        given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "seed": seed, "tools": TOOLS}
        given["parallel_tool_calls"] = False
        parsed = client.chat.completions.parse(tool_choice="required", extra_body=SILENT, **given)
        [choice] = parsed.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])
        with client.chat.completions.stream(tool_choice="required", extra_body=SILENT, **given) as stream:
            kinds = {event.type for event in stream}
            [streamed] = stream.get_final_completion().choices
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.tool_calls is not None
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        assert "tool_calls.function.arguments.done" in kinds
        asked = call.model_dump(exclude={"function": {"parsed_arguments"}})
        answered = client.chat.completions.create(
            model="tiny",
            messages=[
                *HELLO,
                {"role": "assistant", "content": None, "tool_calls": [asked]},
                {"role": "tool", "tool_call_id": call.id, "content": "fine"},
            ],
            max_tokens=5,
            tools=TOOLS,
        )
        assert answered.choices[0].finish_reason in ("stop", "length", "tool_calls")


def check_named_tool_and_none(client: openai.OpenAI) -> None:
    """Name the tool, and forbid all."""
    named = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=200,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "Ping"}},
        temperature=0,
        extra_body=SILENT,
    )
    calls = named.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.name for call in calls] == ["Ping"]
    Ping.model_validate(json.loads(calls[0].function.arguments))
    none = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=5, tools=TOOLS, tool_choice="none", temperature=0
    )
    assert none.choices[0].message.tool_calls is None
