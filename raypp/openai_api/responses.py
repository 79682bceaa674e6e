"""The shapes of OpenAI's responses, whole and in chunks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from raypp.openai_api.request_fields import OpenAIModel

FinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort", "error"]
"""OpenAI has all but the last two; a request that was aborted says so."""


class PromptTokensDetails(OpenAIModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(OpenAIModel):
    """What the generated tokens were."""

    reasoning_tokens: int
    """Tokens of thoughts, their tags included."""


class Usage(OpenAIModel):
    """How many tokens a request had."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    """Of a chat."""


class TopLogprob(OpenAIModel):
    """A token that could have been there."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """A generated token, and the likeliest ones at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(OpenAIModel):
    """The log-probabilities of a message."""

    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class CompletionLogprobs(OpenAIModel):
    """The log-probabilities of a text, in columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(OpenAIModel):
    """What the model said of a token at one position of the prompt (vLLM)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By position, then by token id; None for the first position."""


def _is_none(value: object) -> bool:
    return value is None


class AssistantMessage(OpenAIModel):
    """The model's answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    annotations: list[dict[str, Any]] = Field(default=[])
    """Always empty."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """`reasoning_content` by vLLM's newer name."""
    tool_calls: list[dict[str, Any]] | None = Field(default=None, exclude_if=_is_none)
    """Left out where there are none, like the next one: OpenAI's schema has no null for them."""
    function_call: dict[str, Any] | None = Field(default=None, exclude_if=_is_none)
    """The older form, for requests with `functions`."""


class ChatChoice(OpenAIModel):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    """The stop string or token that ended it (vLLM)."""
    token_ids: list[int] | None = None
    """With `return_token_ids` (vLLM)."""


class ChatCompletion(OpenAIModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Seconds since the epoch."""
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids` (vLLM)."""


class CompletionChoice(OpenAIModel):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    """The stop string or token that ended it (vLLM)."""
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    """With `return_token_ids` (vLLM)."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids` (vLLM)."""


class Completion(OpenAIModel):
    """The continuations of prompts. In a stream, one of its chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since the epoch."""
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
