"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from raypp.api.conversation import plain_conversation
from raypp.errors import RequestError
from raypp.openai_api.answer_form import AnswerForm, response_schema
from raypp.openai_api.conventions import ChatConventions, begins_in_thought
from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.request_fields import (
    NO_DEFAULTS,
    Entries,
    Integer,
    LenientModel,
    RequestFields,
    RequestModel,
    make_sampling_params,
    naming_form,
)
from raypp.openai_api.tools import Tool, ToolChoice, ToolUse, tool_use
from raypp.types import SamplingParams

_PLAIN = ChatConventions()

_NOT_FOR_TEMPLATES = frozenset(
    {
        "chat_template",
        "conversation",
        "conversations",
        "messages",
        "self",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    }
)
"""Arguments of the rendering itself. Whoever sends a request must not bring the template: it is a program."""


class TextPart(LenientModel):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImageUrl(LenientModel):
    """Where an image is."""

    url: str
    """`data:image/...;base64,...` or an address."""
    detail: Literal["auto", "low", "high"] | None = None
    """Taken and ignored: images keep their size."""


class ImagePart(LenientModel):
    """An image between the texts."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(LenientModel):
    """A call that the model made."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """A JSON object as text, as OpenAI has it; or the object itself."""


class ToolCall(LenientModel):
    """A call that the model made, and its id."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(LenientModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Entries[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """Another name of `reasoning_content`, if it is text."""
    tool_calls: Entries[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    """Only null: calls are in `tool_calls`."""
    audio: Any = None
    """Only null."""


class ResponseFormat(RequestModel):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(RequestFields):
    """The body of `/v1/chat/completions`."""

    messages: Entries[Message] = Field(min_length=1)
    """The conversation so far."""
    max_completion_tokens: Integer | None = Field(default=None, ge=1)
    """The most tokens to generate; wins over `max_tokens`. By default all that the context has room for."""
    logprobs: bool | None = None
    """Return log-probabilities of the generated tokens."""
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)
    """And of this many alternatives at each position; needs `logprobs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further values that the model's chat template reads, e.g. `enable_thinking` (vLLM)."""
    response_format: ResponseFormat | None = None
    """`json_object`, or `json_schema` with a schema that the answer follows."""
    tools: Entries[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """`auto`, the default, `none`, `required`, or the function to call."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several times; by default it may."""
    modalities: Entries[Literal["text", "audio"]] | None = None
    """Only text."""
    reasoning_effort: str | None = None
    """`none` asks for no thoughts, and is refused where the model's chat template cannot do without; whatever is said
    here reaches templates that read it, and changes nothing else."""
    verbosity: str | None = None
    """Taken and ignored."""

    @property
    def form_param(self) -> str:
        """The field that holds the answer to a form, where one does."""
        if self.structured_outputs is not None and self.structured_outputs.given():
            return "structured_outputs"
        wanted = self.response_format
        return "response_format" if wanted is not None and wanted.type != "text" else "tools"

    def conversation(self, *, takes_images: bool) -> list[dict[str, Any]]:
        """Return the messages as a chat template reads them: texts joined, empty fields left out.

        Args:
            takes_images: Whether the engine's model does.

        Raises:
            RequestError: images for a model that takes none, or something else that the template would not be shown.
        """
        for index, message in enumerate(self.messages):
            _check_message(message, f"messages[{index}]", takes_images=takes_images)
        return plain_conversation([_fields_of(message) for message in self.messages])

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
                    param="structured_outputs",
                )
            given["structured_outputs"] = constraint
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise RequestError(
                "top_logprobs without logprobs",
                got=self.top_logprobs,
                expected="logprobs=true beside it",
                param="top_logprobs",
            )
        given.setdefault("max_tokens", max_model_len)
        with naming_form(self.form_param):
            return make_sampling_params(given, max_model_len)

    def template_kwargs(self, conventions: ChatConventions = _PLAIN) -> dict[str, Any]:
        """Return what the chat template gets besides the messages.

        Args:
            conventions: How the model writes thoughts, and what its template reads.

        Raises:
            RequestError: an argument of the rendering itself, or no thoughts from a model that cannot do without.
        """
        given = self.chat_template_kwargs or {}
        for name in sorted(_NOT_FOR_TEMPLATES & given.keys()):
            raise RequestError(
                f"chat_template_kwargs must not have {name}",
                got=repr(given[name])[:80],
                expected="values that the model's chat template reads",
                param="chat_template_kwargs",
            )
        kwargs = {**self._effort_kwargs(conventions, given), **given}
        if self._tool_use() is not None:
            kwargs["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return kwargs

    def parser(self, conventions: ChatConventions, prompt_end: str = "") -> MessageParser:
        """Return a parser for one of the answers.

        Args:
            conventions: How the model writes thoughts and calls.
            prompt_end: The end of the rendered conversation.
        """
        use = self._tool_use()
        return MessageParser(
            has_thoughts=conventions.has_thoughts,
            calls=None if use is None else conventions.calls,
            begins_in_thought=conventions.has_thoughts and begins_in_thought(prompt_end),
            must_call=use is not None and use.must_call,
        )

    def _effort_kwargs(self, conventions: ChatConventions, given: dict[str, Any]) -> dict[str, Any]:
        """Return what `reasoning_effort` says to the chat template."""
        effort = self.reasoning_effort
        if effort is None:
            return {}
        kwargs: dict[str, Any] = {"reasoning_effort": effort} if conventions.reads("reasoning_effort") else {}
        if effort == "none" and conventions.reads("enable_thinking"):
            kwargs["enable_thinking"] = False
        if effort == "none" and conventions.has_thoughts and not kwargs and "enable_thinking" not in given:
            raise RequestError(
                "this model's chat template cannot turn thoughts off",
                got="reasoning_effort='none'",
                expected="another value, or none",
                hint="leave reasoning_effort out; thoughts come apart from the answer, as reasoning_content",
                param="reasoning_effort",
            )
        return kwargs

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
                param="tools",
            )
        wanted = self.response_format
        is_thinking = conventions.has_thoughts and begins_in_thought(prompt_end)
        may_think = conventions.has_thoughts and self.template_kwargs(conventions).get("enable_thinking") is not False
        return AnswerForm(
            schema=None if wanted is None else response_schema(wanted.type, wanted.json_schema),
            tool_use=use,
            calls=conventions.calls,
            may_think=may_think or is_thinking,
            is_thinking=is_thinking,
        )

    def _check_supported(self) -> None:
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None:
            raise RequestError(
                "response_format has no json_schema",
                expected='{"name": ..., "schema": {...}}',
                param="response_format",
            )
        if self.modalities is not None and self.modalities != ["text"]:
            raise RequestError(
                "modalities other than text", got=self.modalities, expected='["text"]', param="modalities"
            )


def _check_message(message: Message, where: str, *, takes_images: bool) -> None:
    for name, hint in (("function_call", "send calls as tool_calls"), ("audio", "send its transcript as content")):
        if (value := getattr(message, name)) is not None:
            raise RequestError(
                f"a message with {name}", got=repr(value)[:80], expected="null", hint=hint, param=f"{where}.{name}"
            )
    if not takes_images and any(isinstance(part, ImagePart) for part in message.content or ()):
        raise RequestError(
            "this model takes no images",
            got="a part of type image_url",
            expected="text only",
            param=f"{where}.content",
        )


def _fields_of(message: Message) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    reasoning = fields.pop("reasoning", None)
    if isinstance(reasoning, str):
        fields.setdefault("reasoning_content", reasoning)
    if not fields.get("tool_calls", True):
        del fields["tool_calls"]
    return fields
