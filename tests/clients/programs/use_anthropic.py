"""Anthropic's own package: tools, thoughts, streams, parsed answers, counts. Run with the address of /v1."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import anthropic
from pydantic import BaseModel, Field

LIMITS: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "extra_body": {"temperature": 0}}
SILENT: dict[str, Any] = {"thinking": {"type": "disabled"}}
ASK: list[Any] = [{"role": "user", "content": "hello"}]


class GetWeather(BaseModel):
    """Say what the weather will be."""

    city: Literal["Wien", "Bern"]
    days: Annotated[int, Field(ge=1, le=7)]


class Trip(BaseModel):
    """A trip."""

    kind: Literal["walk", "ride"]
    stops: Annotated[list[Literal["Wien", "Bern"]], Field(max_length=2)]


TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Say what the weather will be.",
        "input_schema": GetWeather.model_json_schema(),
        "cache_control": {"type": "ephemeral"},
    }
]
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}
NAMED: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
SYSTEM: list[Any] = [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}]


def tool_loop(client: anthropic.Anthropic) -> None:
    """Three turns with tools, whole and streamed, whose content goes back as it came."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "How will the weather be?"}]}]
    given: dict[str, Any] = {"system": SYSTEM, "tools": TOOLS, **SILENT, **LIMITS}
    first = client.messages.create(messages=messages, tool_choice=ANY, **given)
    messages += [{"role": "assistant", "content": first.content}, _results(first)]
    with client.messages.stream(messages=messages, tool_choice=NAMED, **given) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_message()
    assert {"content_block_start", "input_json", "content_block_stop", "message_stop"} <= kinds
    messages += [{"role": "assistant", "content": [b.model_dump() for b in streamed.content]}, _results(streamed)]
    counted = client.messages.count_tokens(model="tiny", messages=messages, system=SYSTEM, tools=TOOLS, **SILENT)
    free = client.messages.create(messages=messages, tool_choice={"type": "auto"}, **given)
    usage = free.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    last = client.messages.create(messages=messages, tool_choice={"type": "none"}, **given)
    assert {block.type for block in last.content} <= {"text", "thinking"}


def streams(client: anthropic.Anthropic) -> None:
    """Stream texts, with the package's helper and by hand; go on with a beginning; stop at a word."""
    with client.messages.stream(messages=ASK, stop_sequences=["zzz"], **LIMITS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content if block.type == "text")
    drawn = {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 1}
    events = client.messages.create(messages=ASK, stream=True, **{**LIMITS, "extra_body": drawn})
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    begun: list[Any] = [*ASK, {"role": "assistant", "content": "Well"}]
    assert client.messages.create(messages=begun, **LIMITS).stop_reason in ("end_turn", "max_tokens")
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    thought = client.messages.create(messages=ASK, thinking=thinking, metadata={"user_id": "u"}, **LIMITS)
    again: list[Any] = [*ASK, {"role": "assistant", "content": thought.content or "-"}, *ASK]
    client.messages.create(messages=again, thinking={"type": "adaptive"}, **LIMITS)


def forms(client: anthropic.Anthropic) -> None:
    """Parse an answer."""
    parsed = client.messages.parse(messages=ASK, output_format=Trip, **SILENT, **LIMITS)
    assert isinstance(parsed.parsed_output, Trip)


def errors(client: anthropic.Anthropic) -> None:
    """Get the package's own exceptions."""
    for wrong, kind, word in (
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"extra_body": {"top_p": 7}}, anthropic.BadRequestError, "invalid_request_error"),
    ):
        got: Any = None
        try:
            client.messages.create(messages=ASK, **{**LIMITS, **wrong})
        except kind as error:
            got = error.body
        assert got["error"]["type"] == word, wrong


def _results(message: Any) -> dict[str, Any]:
    assert message.stop_reason == "tool_use", message
    calls = [block for block in message.content if block.type == "tool_use"]
    for call in calls:
        GetWeather.model_validate(call.input)
    rain = [{"type": "text", "text": "rain"}]
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call.id, "content": rain} for call in calls],
    }


def main(base_url: str) -> None:
    address = base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=120) as client:
        for part in (tool_loop, streams, forms, errors):
            part(client)


if __name__ == "__main__":
    main(sys.argv[1])
