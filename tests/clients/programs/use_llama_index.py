"""LlamaIndex: tools and their results, streams, structured answers, plain completions. Run with the address of /v1."""

import asyncio
import sys
from typing import Annotated, Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Trip(BaseModel):
    """A trip."""

    title: Annotated[str, Field(max_length=12)]
    kind: Literal["walk", "ride"]


def get_weather(city: Literal["Wien", "Bern"]) -> str:
    """Say what the weather is."""
    return f"rain in {city}"


def tool_loop(llm: OpenAILike) -> None:
    """Append each answer as it came, streamed or not, and what the tool said."""
    tool = FunctionTool.from_defaults(get_weather)
    history = [ChatMessage(role="system", content="You help."), ChatMessage(role="user", content="How is the weather?")]
    answer: Any = llm.chat_with_tools([tool], chat_history=history, tool_required=True)
    history += [answer.message, *_results(llm, tool, answer)]
    answer = llm.chat_with_tools([tool], chat_history=history, tool_choice="get_weather")
    history += [answer.message, *_results(llm, tool, answer)]
    *_, answer = llm.stream_chat_with_tools([tool], chat_history=history, tool_required=True)
    history += [answer.message, *_results(llm, tool, answer)]
    answer = llm.chat_with_tools([tool], chat_history=history, tool_choice="none")
    history += [answer.message, ChatMessage(role="user", content="Thanks.")]
    assert llm.chat(history).message.role == "assistant"


def structured(llm: OpenAILike) -> None:
    """Get an instance, whole and in parts."""
    prompt = PromptTemplate("Plan a trip to {place}.")
    assert isinstance(llm.structured_predict(Trip, prompt, place="Wien"), Trip)
    if llm.should_use_structured_outputs:  # else a stream may call the tool that has the form, but need not
        *_, last = llm.stream_structured_predict(Trip, prompt, place="Wien")
        assert isinstance(last, Trip)
    formed: Any = llm.as_structured_llm(Trip).chat([ChatMessage(role="user", content="Plan a trip.")])
    assert isinstance(formed.raw, Trip)


async def texts(llm: OpenAILike, plain: OpenAILike) -> None:
    """Stream conversations and completions, at once and one by one."""
    assert "".join(part.delta or "" for part in llm.stream_chat([ChatMessage(role="user", content="hello")]))
    parts = await llm.astream_chat([ChatMessage(role="user", content="hello")])
    assert "".join([part.delta or "" async for part in parts])
    assert plain.complete("def").text
    assert "".join(part.delta or "" for part in plain.stream_complete("def"))


def _results(llm: OpenAILike, tool: FunctionTool, answer: Any) -> list[ChatMessage]:
    calls = llm.get_tool_calls_from_response(answer)
    assert calls
    return [
        ChatMessage(
            role="tool", content=str(tool(**call.tool_kwargs)), additional_kwargs={"tool_call_id": call.tool_id}
        )
        for call in calls
    ]


def main(base_url: str) -> None:
    given: dict[str, Any] = {
        "model": "tiny",
        "api_base": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 80,
        "max_retries": 0,
        "context_window": 4096,
    }
    silent = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    llm = OpenAILike(
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        additional_kwargs=silent,
        **given,
    )
    tool_loop(llm)
    for by_schema in (True, False):
        structured(llm.model_copy(update={"should_use_structured_outputs": by_schema}))
    asyncio.run(texts(llm, OpenAILike(is_chat_model=False, **given)))


if __name__ == "__main__":
    main(sys.argv[1])
