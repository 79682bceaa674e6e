"""The body of `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from raypp.errors import RequestError
from raypp.openai_api.answer_form import AnswerForm, response_schema
from raypp.openai_api.conventions import ChatConventions, begins_in_thought
from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.request_fields import NO_DEFAULTS, OpenAIModel, RequestFields, make_sampling_params
from raypp.openai_api.tools import Tool, ToolChoice, ToolUse, tool_use
from raypp.types import SamplingParams

_PLAIN = ChatConventions()


class TextPart(OpenAIModel):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImageUrl(OpenAIModel):
    """Where an image is."""

    url: str
    """`data:image/...;base64,...` or an address."""
    detail: Literal["auto", "low", "high"] | None = None
    """Taken and ignored: images keep their size."""


class ImagePart(OpenAIModel):
    """An image between the texts."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(OpenAIModel):
    """A call that the model made."""

    name: str
    arguments: str


class ToolCall(OpenAIModel):
    """A call that the model made, and its id."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(OpenAIModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ResponseFormat(OpenAIModel):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(RequestFields):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    """The conversation so far."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The most tokens to generate; wins over `max_tokens`. By default all that the context has room for."""
    logprobs: bool | None = None
    """Return log-probabilities of the generated tokens."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """And of this many alternatives at each position; needs `logprobs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further values that the model's chat template reads, e.g. `enable_thinking` (vLLM)."""
    response_format: ResponseFormat | None = None
    """`json_object`, or `json_schema` with a schema that the answer follows."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """`auto`, the default, `none`, `required`, or the function to call."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several times; by default it may."""
    modalities: list[Literal["text", "audio"]] | None = None
    """Only text."""
    reasoning_effort: str | None = None
    """Taken and ignored."""
    verbosity: str | None = None
    """Taken and ignored."""

    def conversation(self, *, takes_images: bool) -> list[dict[str, Any]]:
        """Return the messages as a chat template reads them: texts joined, empty fields left out.

        Args:
            takes_images: Whether the engine's model does.

        Raises:
            RequestError: images for a model that takes none.
        """
        return [_plain_message(message, takes_images=takes_images) for message in self.messages]

    def sampling_params(
        self,
        max_model_len: int,
        conventions: ChatConventions = _PLAIN,
        prompt_end: str = "",
        defaults: Mapping[str, Any] = NO_DEFAULTS,
    ) -> SamplingParams:
        """Return how to sample; without a limit, here or among the defaults, up to the engine's `max_model_len`.

        Args:
            max_model_len: The most tokens of a request, prompt and output together.
            conventions: How the model writes thoughts and calls.
            prompt_end: The end of the rendered conversation.
            defaults: Fields of `SamplingParams` that hold where the body says nothing.

        Raises:
            RequestError: a value that makes no sense, or one that this engine cannot serve.
        """
        self._check_supported()
        given = self.given_params(defaults)
        if (constraint := self._form(conventions, prompt_end).constraint()) is not None:
            if given.get("structured_outputs"):
                raise RequestError(
                    "structured_outputs beside response_format or tools that hold the answer to a form",
                    expected="one of them",
                )
            given["structured_outputs"] = constraint
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise RequestError(
                "top_logprobs without logprobs", got=self.top_logprobs, expected="logprobs=true beside it"
            )
        given.setdefault("max_tokens", max_model_len)
        return make_sampling_params(given, max_model_len)

    def template_kwargs(self) -> Mapping[str, Any]:
        """Return what the chat template gets besides the messages."""
        given = self.chat_template_kwargs or {}
        if self._tool_use() is None:
            return given
        return {**given, "tools": [tool.model_dump(exclude_none=True) for tool in self.tools or ()]}

    def parser(self, conventions: ChatConventions, prompt_end: str = "") -> MessageParser:
        """Return a parser for one of the answers.

        Args:
            conventions: How the model writes thoughts and calls.
            prompt_end: The end of the rendered conversation.
        """
        return MessageParser(
            has_thoughts=conventions.has_thoughts,
            calls=None if self._tool_use() is None else conventions.calls,
            begins_in_thought=conventions.has_thoughts and begins_in_thought(prompt_end),
        )

    def _tool_use(self) -> ToolUse | None:
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def _form(self, conventions: ChatConventions, prompt_end: str) -> AnswerForm:
        use = self._tool_use()
        if use is not None and conventions.calls is None:
            raise RequestError(
                "this model's way of calling tools is not known",
                got=f"{len(use.tools)} tools",
                expected="a model that writes calls as Qwen3 or Llama 3 does, and has their tokens for it",
                hint='leave tools out, or say tool_choice="none"',
            )
        wanted = self.response_format
        thinks = conventions.has_thoughts and (self.chat_template_kwargs or {}).get("enable_thinking") is not False
        return AnswerForm(
            schema=None if wanted is None else response_schema(wanted.type, wanted.json_schema),
            tool_use=use,
            calls=conventions.calls,
            may_think=thinks,
            is_thinking=thinks and begins_in_thought(prompt_end),
        )

    def _check_supported(self) -> None:
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None:
            raise RequestError("response_format has no json_schema", expected='{"name": ..., "schema": {...}}')
        if self.modalities is not None and self.modalities != ["text"]:
            raise RequestError("modalities other than text", got=self.modalities, expected='["text"]')


def _plain_message(message: Message, *, takes_images: bool) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, exclude={"content"})
    if message.role == "developer":  # OpenAI's newer word; templates know the older one
        plain["role"] = "system"
    plain["content"] = _plain_content(message.content, takes_images=takes_images)
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = _plain_arguments(call["function"]["arguments"])
    return plain


def _plain_arguments(arguments: str) -> Any:
    """Return a call's arguments as an object: templates write it as JSON, and some would write a text as a string."""
    try:
        plain = json.loads(arguments)
    except ValueError:
        return arguments
    return plain if isinstance(plain, dict) else arguments


def _plain_content(content: str | list[ContentPart] | None, *, takes_images: bool) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        return "\n".join(texts)
    if not takes_images:
        raise RequestError("this model takes no images", got="a part of type image_url", expected="text only")
    return [part.model_dump(exclude_none=True) for part in content]
