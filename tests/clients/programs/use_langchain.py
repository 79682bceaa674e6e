"""LangChain, by chats and by responses: a loop of tools, streams, structured output. Run with the address of /v1."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, Literal

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Trip(BaseModel):
    """A trip."""

    title: Annotated[str, Field(max_length=12)]
    kind: Literal["walk", "ride"]


@tool
def get_weather(city: Literal["Wien", "Bern"], days: Annotated[int, Field(ge=1, le=7)]) -> str:
    """Say what the weather will be."""
    return f"rain in {city} for {days} days"


def tool_loop(llm: ChatOpenAI) -> None:
    """Append each answer as it came, streamed or not, and what the tool said."""
    messages: list[Any] = [SystemMessage("You help."), HumanMessage("How will the weather be?")]
    for choice in ("any", "get_weather"):
        answer = llm.bind_tools([get_weather], tool_choice=choice).invoke(messages)
        messages += [answer, *_results(answer)]
    whole: Any = None
    for chunk in llm.bind_tools([get_weather], tool_choice="any", strict=True).stream(messages):
        whole = chunk if whole is None else whole + chunk
    assert isinstance(whole, AIMessageChunk)
    messages += [whole, *_results(whole)]
    last = llm.bind_tools([get_weather], tool_choice="none").invoke(messages)
    assert not last.tool_calls
    messages += [last, HumanMessage([{"type": "text", "text": "Thanks."}])]
    assert isinstance(llm.invoke(messages), AIMessage)


def structured(llm: ChatOpenAI) -> None:
    """Get a model's instance in each of the ways."""
    for method in ("json_schema", "function_calling"):
        for ask in (llm.with_structured_output(Trip, method=method).invoke, _streamed(llm, method)):
            assert isinstance(ask("Plan a trip."), Trip)
    raw: Any = llm.with_structured_output(Trip, include_raw=True).invoke("Plan a trip.")
    assert isinstance(raw["parsed"], Trip)
    assert isinstance(raw["raw"], AIMessage)
    # The answer of a structured call in a later turn, with what the package keeps in it.
    assert llm.invoke([HumanMessage("Plan a trip."), raw["raw"], HumanMessage("Thanks.")]).usage_metadata


async def concurrently(llm: ChatOpenAI) -> None:
    """Stream and batch asynchronously."""
    chunks = [chunk async for chunk in llm.astream("hello")]
    assert "".join(str(chunk.content) for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)
    assert len(await llm.abatch(["hello", "good bye"])) == 2


def _streamed(llm: ChatOpenAI, method: Any) -> Any:
    return lambda text: list(llm.with_structured_output(Trip, method=method).stream(text))[-1]


def _results(answer: AIMessage) -> list[ToolMessage]:
    assert answer.tool_calls, answer
    return [get_weather.invoke(call) for call in answer.tool_calls]


def main(base_url: str) -> None:
    models = [_model(base_url, use_responses_api=api) for api in (False, True)]
    for llm in models:
        tool_loop(llm)
        structured(llm)

    async def all_concurrently() -> None:  # in one event loop: the package's connections are of the first one
        for llm in models:
            await concurrently(llm)

    asyncio.run(all_concurrently())


def _model(base_url: str, *, use_responses_api: bool) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=base_url,
        api_key="none",
        model="tiny",
        temperature=0,
        max_tokens=80,
        max_retries=0,
        stream_usage=True,
        use_responses_api=use_responses_api,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )


if __name__ == "__main__":
    main(sys.argv[1])
