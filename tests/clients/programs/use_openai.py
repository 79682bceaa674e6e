"""OpenAI's own package: tools, streams, parsed answers, plain completions, responses. Run with the address of /v1."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field

SILENT = {"chat_template_kwargs": {"enable_thinking": False}}
LIMITS: dict[str, Any] = {"model": "tiny", "max_tokens": 80, "temperature": 0, "extra_body": SILENT}
FEW = 16  # tokens: enough where a text has no form
BRIEF = {**LIMITS, "max_tokens": FEW}


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
    last = client.chat.completions.create(messages=messages, tools=TOOLS, tool_choice="none", **BRIEF)
    messages += [last.choices[0].message.model_dump(), {"role": "user", "content": "Thanks."}]
    trip = client.chat.completions.parse(messages=messages, response_format=Trip, **LIMITS).choices[0].message
    assert isinstance(trip.parsed, Trip)
    messages += [trip.model_dump(), {"role": "user", "content": "Once more."}]
    again = client.chat.completions.create(messages=messages, n=2, seed=1, **{**BRIEF, "temperature": 1})
    assert len(again.choices) == 2


def streams(client: openai.OpenAI) -> None:
    """Stream with usage and log-probabilities, and parse a stream."""
    ask: list[Any] = [{"role": "user", "content": "hello"}]
    chunks = list(
        client.chat.completions.create(
            messages=ask, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2, **BRIEF
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


def responses(client: openai.OpenAI) -> None:
    """Three turns with functions, whole, parsed and streamed, whose items go back as they came; then forms."""
    given: dict[str, Any] = {"model": "tiny", "max_output_tokens": 200, "temperature": 0, "extra_body": SILENT}
    function: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")["function"]
    tools: list[Any] = [{"type": "function", **function}]
    one: Any = {"tools": tools, "tool_choice": {"type": "function", "name": "get_weather"}}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "How will the weather be?"}]}]
    first = client.responses.create(input=items, instructions="You help.", **one, **given)
    items += [*first.output, *_outputs(first)]
    parsed = client.responses.parse(input=items, **one, **given)
    items += [*(item.model_dump(exclude={"parsed_arguments"}) for item in parsed.output), *_outputs(parsed)]
    with client.responses.stream(input=items, **one, **given) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    items += [*streamed.output, *_outputs(streamed)]
    few = {**given, "max_output_tokens": FEW}
    last = client.responses.create(input=items, tools=tools, tool_choice="none", store=False, **few)
    items += [*last.output, {"role": "user", "content": "Plan a trip."}]
    trip = client.responses.parse(input=items, text_format=Trip, **given)
    assert isinstance(trip.output_parsed, Trip)
    with client.responses.stream(input="Plan a trip.", text_format=Trip, **given) as stream:
        assert "response.output_text.done" in {event.type for event in stream}
        assert isinstance(stream.get_final_response().output_parsed, Trip)
    include: Any = ["message.output_text.logprobs"]
    events = list(client.responses.create(input="hello", stream=True, include=include, top_logprobs=2, **few))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type in ("response.completed", "response.incomplete")
    said = ""
    try:
        client.responses.create(input="hello", previous_response_id=last.id, **given)
    except openai.BadRequestError as error:
        said = error.message
    assert "send the conversation so far" in said


def _outputs(response: Any) -> list[Any]:
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls, response
    for call in calls:
        GetWeather.model_validate_json(call.arguments)
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]


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
        for part in (tool_loop, streams, completions, responses, errors):
            part(client)


if __name__ == "__main__":
    main(sys.argv[1])
