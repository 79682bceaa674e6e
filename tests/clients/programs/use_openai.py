"""OpenAI's own package: a loop of tools, streams, parsed answers, plain completions. Run with the address of /v1."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field

SILENT = {"chat_template_kwargs": {"enable_thinking": False}}
LIMITS: dict[str, Any] = {"model": "tiny", "max_tokens": 80, "temperature": 0, "extra_body": SILENT}


class GetWeather(BaseModel):
    """Say what the weather will be."""

    city: Literal["Wien", "Bern"]
    days: Annotated[int, Field(ge=1, le=7)]


class Trip(BaseModel):
    """A trip."""

    title: Annotated[str, Field(max_length=12)]
    kind: Literal["walk", "ride"]
    stops: Annotated[list[Annotated[str, Field(max_length=5)]], Field(max_length=2)]


TOOLS: list[Any] = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def tool_loop(client: openai.OpenAI) -> None:
    """Send each answer back in one of the ways that people write, with what the tool said."""
    messages: list[Any] = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": [{"type": "text", "text": "How will the weather be?"}]},
    ]
    answer = client.chat.completions.create(messages=messages, tools=TOOLS, tool_choice="required", **LIMITS)
    messages += [answer.choices[0].message.model_dump(), *_results(answer.choices[0].message)]
    answer = client.chat.completions.create(messages=messages, tools=TOOLS, tool_choice=NAMED, **LIMITS)
    messages += [answer.choices[0].message, *_results(answer.choices[0].message)]
    parsed = client.chat.completions.parse(messages=messages, tools=TOOLS, tool_choice="required", **LIMITS)
    [call] = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    messages += [parsed.choices[0].message.model_dump(), *_results(parsed.choices[0].message)]
    with client.chat.completions.stream(messages=messages, tools=TOOLS, tool_choice=NAMED, **LIMITS) as stream:
        assert "tool_calls.function.arguments.done" in {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message
    messages += [streamed.to_dict(), *_results(streamed)]
    messages += [_streamed_by_hand(client, messages)]
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in messages[-1]["tool_calls"]]
    last = client.chat.completions.create(messages=messages, tools=TOOLS, tool_choice="none", **LIMITS)
    messages += [last.choices[0].message.model_dump(), {"role": "user", "content": "Thanks."}]
    trip = client.chat.completions.parse(messages=messages, response_format=Trip, **LIMITS).choices[0].message
    assert isinstance(trip.parsed, Trip)
    messages += [trip.model_dump(), {"role": "user", "content": "Once more."}]
    again = client.chat.completions.create(messages=messages, n=2, seed=1, **{**LIMITS, "temperature": 1})
    assert len(again.choices) == 2


def streams(client: openai.OpenAI) -> None:
    """Stream with usage and log-probabilities, and parse a stream."""
    ask: list[Any] = [{"role": "user", "content": "hello"}]
    chunks = list(
        client.chat.completions.create(
            messages=ask, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2, **LIMITS
        )
    )
    assert chunks[-1].usage is not None
    assert any(chunk.choices and chunk.choices[0].finish_reason for chunk in chunks)
    with client.chat.completions.stream(messages=ask, response_format=Trip, **LIMITS) as stream:
        assert {"content.delta", "content.done"} <= {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Trip)


def completions(client: openai.OpenAI) -> None:
    """Continue prompts, whole and streamed, and list the models."""
    assert "tiny" in [model.id for model in client.models.list()]
    texts = client.completions.create(model="tiny", prompt=["def", "class"], max_tokens=6, echo=True, logprobs=1)
    assert [choice.text[:3] for choice in texts.choices] == ["def", "cla"]
    parts = list(client.completions.create(model="tiny", prompt="def", max_tokens=6, stream=True))
    assert parts[-1].choices[0].finish_reason is not None


def errors(client: openai.OpenAI) -> None:
    """Get the package's own exceptions."""
    ask: list[Any] = [{"role": "user", "content": "hello"}]
    for wrong, kind in (({"model": "other"}, openai.NotFoundError), ({"top_p": 7}, openai.BadRequestError)):
        got = None
        try:
            client.chat.completions.create(messages=ask, **{**LIMITS, **wrong})
        except kind as error:
            got = error.body
        assert got is not None, wrong


def _results(message: Any) -> list[Any]:
    assert message.tool_calls, message
    for call in message.tool_calls:
        GetWeather.model_validate_json(call.function.arguments)
    return [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]


def _streamed_by_hand(client: openai.OpenAI, messages: list[Any]) -> dict[str, Any]:
    calls: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(
        messages=messages, tools=TOOLS, tool_choice=NAMED, stream=True, **LIMITS
    ):
        for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            if delta.index not in calls:
                calls[delta.index] = delta.model_dump()
            else:
                calls[delta.index]["function"]["arguments"] += delta.function.arguments
    assert calls
    for call in calls.values():
        GetWeather.model_validate(json.loads(call["function"]["arguments"]))
    return {"role": "assistant", "content": "", "tool_calls": list(calls.values())}


def main(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        for part in (tool_loop, streams, completions, errors):
            part(client)


if __name__ == "__main__":
    main(sys.argv[1])
