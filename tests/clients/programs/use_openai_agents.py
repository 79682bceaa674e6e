"""OpenAI's Agents SDK: agents with functions, a typed result, streams, a conversation. Run with the address of /v1."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

SETTINGS: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 80,
    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
}


class Trip(BaseModel):
    """A trip."""

    title: Annotated[str, Field(max_length=12)]
    kind: Literal["walk", "ride"]


asked: list[str] = []


@function_tool
def get_weather(city: Literal["Wien", "Bern"]) -> str:
    """Say what the weather is."""
    asked.append(city)
    return f"rain in {city}"


async def use(model: OpenAIResponsesModel) -> None:
    """Have the function called, go on with the conversation, stream, and get an instance."""
    must_call = ModelSettings(tool_choice="required", parallel_tool_calls=False, **SETTINGS)
    agent = Agent(
        name="guide", instructions="You help.", model=model, tools=[get_weather], model_settings=must_call
    )  # after a call the package asks without tool_choice
    first = await Runner.run(agent, "How is the weather?", max_turns=8)
    assert asked
    assert isinstance(first.final_output, str)
    again: Any = [*first.to_input_list(), {"role": "user", "content": "And tomorrow?"}]
    streamed = Runner.run_streamed(agent, again, max_turns=8)
    kinds = {event.type async for event in streamed.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    planner = Agent(name="planner", model=model, output_type=Trip, model_settings=ModelSettings(**SETTINGS))
    planned = await Runner.run(planner, [*streamed.to_input_list(), {"role": "user", "content": "Plan a trip."}])
    assert isinstance(planned.final_output, Trip)


async def main(base_url: str) -> None:
    set_tracing_disabled(disabled=True)
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        await use(OpenAIResponsesModel(model="tiny", openai_client=client))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
