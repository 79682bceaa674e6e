"""LiteLLM: a loop of tools, streams, structured answers, plain completions, responses. Run with the address of /v1."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices when it is imported

import litellm
from pydantic import BaseModel, Field


class Trip(BaseModel):
    """A trip."""

    title: Annotated[str, Field(max_length=12)]
    kind: Literal["walk", "ride"]


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Wien", "Bern"]}, "days": {"type": "integer", "maximum": 7}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def tool_loop(given: dict[str, Any]) -> None:
    """Send each answer back as it came, or dumped."""
    messages: list[Any] = [{"role": "user", "content": "How will the weather be?"}]
    answer = litellm.completion(messages=messages, tools=TOOLS, tool_choice="required", **given).choices[0].message
    messages += [answer, *_results(answer)]
    answer = litellm.completion(messages=messages, tools=TOOLS, tool_choice=NAMED, **given).choices[0].message
    messages += [answer.model_dump(), *_results(answer)]
    chunks = list(litellm.completion(messages=messages, tools=TOOLS, tool_choice=NAMED, stream=True, **given))
    answer = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    messages += [answer.model_dump(), *_results(answer)]
    last = litellm.completion(messages=messages, tools=TOOLS, tool_choice="none", **given).choices[0].message
    messages += [last, {"role": "user", "content": "Thanks."}]
    assert litellm.completion(messages=messages, **given).usage.total_tokens > 0


def structured(given: dict[str, Any]) -> None:
    """Get JSON of a model's form."""
    ask = [{"role": "user", "content": "Plan a trip."}]
    answer = litellm.completion(messages=ask, response_format=Trip, **given)
    Trip.model_validate_json(answer.choices[0].message.content)
    streamed = litellm.completion(messages=ask, response_format=Trip, stream=True, **given)
    Trip.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in streamed))


def others(given: dict[str, Any]) -> None:
    """Count a stream's tokens, continue a prompt, and run into the context's end."""
    ask = [{"role": "user", "content": "hello"}]
    chunks = list(litellm.completion(messages=ask, stream=True, stream_options={"include_usage": True}, **given))
    assert any(getattr(chunk, "usage", None) for chunk in chunks)
    model = given["model"].replace("openai/", "text-completion-openai/")
    plain = {**given, "model": model, "extra_body": {}}
    assert litellm.text_completion(**plain, prompt="def").choices[0].text
    try:
        litellm.completion(messages=[{"role": "user", "content": "7" * 4200}], **given)
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("a prompt over the context was taken")


def responses(given: dict[str, Any]) -> None:
    """Have a function called in a response, whole and streamed, and go on with what it said."""
    given = {**given, "max_output_tokens": given["max_tokens"]}
    del given["max_tokens"], given["num_retries"]
    tools = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS}]
    items: list[Any] = [{"role": "user", "content": "How will the weather be?"}]
    answer = litellm.responses(input=items, tools=tools, tool_choice="required", **given)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls, answer
    items += [item.model_dump() for item in answer.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    events = list(litellm.responses(input=items, stream=True, **given))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.usage.total_tokens > 0


def _results(answer: Any) -> list[Any]:
    assert answer.tool_calls, answer
    return [
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "rain"}
        for call in answer.tool_calls
    ]


def main(base_url: str) -> None:
    given = {
        "model": "openai/tiny",
        "api_base": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 80,
        "num_retries": 0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    for part in (tool_loop, structured, others, responses):
        part(given)


if __name__ == "__main__":
    main(sys.argv[1])
