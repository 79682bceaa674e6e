"""The shapes of what `/v1/responses` answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from raypp.openai_api.request_fields import OpenAIModel
from raypp.openai_api.responses import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
FaultCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class OutputText(OpenAIModel):
    """A text of the model's."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]]
    """Always empty."""
    logprobs: list[TokenLogprob]
    """Of the tokens that the model wrote; empty unless they were asked for."""


class OutputMessage(OpenAIModel):
    """What the model says."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputCall(OpenAIModel):
    """A function that the model calls."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    """What the function's output is sent back with."""
    namespace: str | None = Field(default=None, exclude_if=lambda namespace: namespace is None)
    """Where the function is in one."""
    name: str
    arguments: str
    """A JSON object as text."""
    status: ItemStatus


class OutputThought(OpenAIModel):
    """A text that the model thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(OpenAIModel):
    """What the model thought before it answered."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[dict[str, Any]]
    """Always empty: thoughts come whole."""
    content: list[OutputThought]
    status: ItemStatus


OutputItem = Annotated[OutputMessage | OutputCall | OutputReasoning, Field(discriminator="type")]


class InputTokensDetails(OpenAIModel):
    """Where the input's tokens came from."""

    cached_tokens: int
    cache_write_tokens: int = 0
    """Always 0: what is written to the cache costs nothing."""


class OutputTokensDetails(OpenAIModel):
    """What the output's tokens are."""

    reasoning_tokens: int
    """Of thoughts."""


class ResponseUsage(OpenAIModel):
    """How many tokens a request had."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(OpenAIModel):
    """Why there is no answer."""

    code: FaultCode
    message: str


class IncompleteDetails(OpenAIModel):
    """Why the answer ended before its end."""

    reason: Literal["max_output_tokens"]


class ResponseObject(OpenAIModel):
    """The model's answer, and what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since the epoch."""
    completed_at: int | None = None
    status: ResponseStatus
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    model: str
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: Literal["default"] = "default"
    background: Literal[False] = False
    store: Literal[False] = False
    """Responses are not kept, whatever was asked for."""
    previous_response_id: None = None
