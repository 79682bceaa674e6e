"""Pydantic AI, by chats and by responses: tools, history, streams, typed results. Run with the address of /v1."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS: Any = {
    "temperature": 0,
    "max_tokens": 80,
    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
}


class Trip(BaseModel):
    """A trip."""

    title: Annotated[str, Field(max_length=12)]
    kind: Literal["walk", "ride"]


def typed(model: Model, output: Any) -> None:
    """Get an instance twice, the second time with the first run's messages in front."""
    agent: Agent[None, Trip] = Agent(model, output_type=output, instructions="You help.", model_settings=SETTINGS)
    first = agent.run_sync("Plan a trip.")
    assert isinstance(first.output, Trip)
    second = agent.run_sync("Another one.", message_history=first.all_messages())
    assert isinstance(second.output, Trip)


def tools(model: Model) -> None:
    """Have a function called, then the result; and a text at the end of a conversation with tools."""

    def settings(context: RunContext[None]) -> Any:
        return {**SETTINGS, "tool_choice": ["get_weather"] if context.run_step == 1 else ["final_result"]}

    agent: Agent[None, Trip] = Agent(model, output_type=Trip, model_settings=settings)
    cities: list[str] = []

    @agent.tool_plain
    def get_weather(city: Literal["Wien", "Bern"]) -> str:
        """Say what the weather is."""
        cities.append(city)
        return f"rain in {city}"

    result = agent.run_sync("How is the weather?")
    assert cities
    assert isinstance(result.output, Trip)
    plain: Agent[None, str] = Agent(model, model_settings=SETTINGS)
    assert isinstance(plain.run_sync("Thanks.", message_history=result.all_messages()).output, str)


async def streams(model: Model) -> None:
    """Stream a text and an instance."""
    async with Agent(model, model_settings=SETTINGS).run_stream("hello") as text:
        assert [part async for part in text.stream_text(delta=True)]
        assert text.usage
    typed_agent: Agent[None, Trip] = Agent(model, output_type=Trip, model_settings=SETTINGS)
    async with typed_agent.run_stream("Plan a trip.") as trip:
        assert isinstance([part async for part in trip.stream_output()][-1], Trip)


def main(base_url: str) -> None:
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    models: list[Model] = [OpenAIChatModel("tiny", provider=provider), OpenAIResponsesModel("tiny", provider=provider)]
    for model in models:
        for output in (Trip, ToolOutput(Trip), NativeOutput(Trip)):
            typed(model, output)
        tools(model)

    async def all_streams() -> None:
        for model in models:
            await streams(model)

    asyncio.run(all_streams())


if __name__ == "__main__":
    main(sys.argv[1])
