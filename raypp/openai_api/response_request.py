"""The body of `/v1/responses`, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from raypp.errors import RequestError
from raypp.openai_api.chat_request import ChatRequest, DerivedChat, ResponseFormat
from raypp.openai_api.foreign_fields import OF_RESPONSES, ForeignField
from raypp.openai_api.request_fields import Entries, Integer, LenientModel, RequestFields, RequestModel
from raypp.openai_api.response_input import (
    InputItem,
    ResponseTool,
    ResponseToolChoice,
    chat_choice,
    chat_messages,
    chat_tools,
    types_left_out,
)

_LOGPROBS = "message.output_text.logprobs"
IGNORED_BY_RESPONSES = (
    "client_metadata",
    "max_tool_calls",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
)
"""Fields that have no effect, whatever they say."""


class TextFormat(LenientModel):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    """Taken and ignored."""
    description: str | None = None
    """Taken and ignored."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """What the answer follows, with `json_schema`."""
    strict: bool | None = None
    """Changes nothing: a schema is always followed."""


class TextFields(RequestModel):
    """What the text has to be like."""

    format: TextFormat | None = None
    """`text`, the default, `json_object`, or `json_schema`."""
    verbosity: str | None = None
    """Taken and ignored."""


class ReasoningFields(LenientModel):
    """How to think."""

    effort: str | None = None
    """`none` asks for no thoughts, and is refused where the model's chat template cannot do without; whatever is said
    here reaches templates that read it, and changes nothing else."""
    summary: str | None = None
    """Ignored: thoughts come whole, as the content of `reasoning` items."""


class ResponseStreamOptions(RequestModel):
    """What a stream holds besides its events."""

    include_obfuscation: bool | None = None
    """Changes nothing: there is none."""


class ResponseRequest(RequestFields):
    """The body of `/v1/responses`."""

    foreign: ClassVar[Mapping[str, ForeignField]] = OF_RESPONSES
    chat_params: ClassVar[Mapping[str, str]] = {
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
    }

    input: str | Entries[InputItem]
    """The conversation so far: one text of the user's, or a list of items."""
    instructions: str | None = None
    """The system's message before all others."""
    max_output_tokens: Integer | None = Field(default=None, ge=1)
    """The most tokens to generate, thoughts among them. By default all that the context has room for."""
    text: TextFields | None = None
    """`format` is `text`, the default, `json_object`, or `json_schema` with a `schema` that the answer follows, with
    `strict` and without. `verbosity` is ignored, with a warning."""
    reasoning: ReasoningFields | None = None
    """`effort` is chat's `reasoning_effort`. `summary` is ignored, with a warning: thoughts come whole."""
    tools: Entries[ResponseTool] | None = None
    """Functions that the model may call, also in namespaces. Other tools, `web_search` for one, are left out, with a
    warning; the `tools` of the answer are those that the model could call."""
    tool_choice: ResponseToolChoice | None = None
    """`auto`, the default, `none`, `required`, or the function to call; other tools are refused here."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several times; by default it may."""
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)
    """Return log-probabilities of what the model wrote, and of this many alternatives at each position."""
    include: (
        Entries[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = None
    """`message.output_text.logprobs` asks for log-probabilities; the others are ignored, with a warning."""
    stream_options: ResponseStreamOptions | None = None
    """`include_obfuscation` changes nothing: there is none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further values that the model's chat template reads, e.g. `enable_thinking` (vLLM)."""
    metadata: dict[str, str] | None = None
    """Comes back in the answer."""
    user: str | None = None
    """Comes back in the answer."""
    safety_identifier: str | None = None
    """Comes back in the answer."""
    prompt_cache_key: str | None = None
    """Comes back in the answer; prompts are cached by their tokens and `cache_salt`."""
    store: bool | None = None
    """Nothing is kept, and the answer says `false`. `true` is ignored, with a warning."""
    truncation: Literal["auto", "disabled"] | None = None
    """The answer says `disabled`: what is longer than the context is refused. `auto` is ignored, with a warning."""
    max_tool_calls: Integer | None = Field(default=None, ge=0)
    """Calls of tools that OpenAI's servers run, of which there are none."""
    client_metadata: dict[str, Any] | None = None
    """Notes of a client about itself (Codex)."""
    prompt_cache_options: dict[str, Any] | None = None
    """How long OpenAI caches a prompt; here as long as there is room."""

    def ignored(self) -> list[str]:
        """Return the fields that the body gives and that have no effect; of fields in others, their path."""
        names = set(self._passed_over)
        names |= {name for name in IGNORED_BY_RESPONSES if getattr(self, name) is not None}
        names |= {f"include={value}" for value in self.include or () if value != _LOGPROBS}
        names |= {f"tools={kind}" for kind in types_left_out(self.tools)}
        if self.store:
            names.add("store")
        if self.truncation == "auto":
            names.add("truncation")
        if self.text is not None and self.text.verbosity is not None:
            names.add("text.verbosity")
        if self.reasoning is not None and self.reasoning.summary is not None:
            names.add("reasoning.summary")
        return sorted(names)

    @property
    def form_param(self) -> str:
        """The field that holds the answer to a form, where one does."""
        if self.constraint():
            return super().form_param
        return "text.format" if self.text_format.type != "text" else "tools"

    @property
    def text_format(self) -> TextFormat:
        """The form that the answer must have; text by default."""
        wanted = None if self.text is None else self.text.format
        return wanted or TextFormat(type="text")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def chat(self) -> DerivedChat:
        """Return the chat that this asks for.

        Raises:
            RequestError: something that is not supported, or no input.
        """
        messages, origins = chat_messages(self.instructions, self.input)
        shared = {name: value for name in RequestFields.model_fields if (value := getattr(self, name)) is not None}
        request = ChatRequest(
            **shared,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            chat_template_kwargs=self.chat_template_kwargs,
            response_format=self._response_format(),
            tools=None if self.tools is None else chat_tools(self.tools),
            tool_choice=chat_choice(self.tool_choice, self.tools),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )
        return DerivedChat(request, origins, self.chat_params)

    def _response_format(self) -> ResponseFormat | None:
        wanted = self.text_format
        if wanted.type != "json_schema":
            return ResponseFormat(type=wanted.type)
        if wanted.schema_ is None:
            raise RequestError(
                "text.format has no schema",
                expected='{"type": "json_schema", "name": ..., "schema": {...}}',
                param="text.format",
            )
        return ResponseFormat(type="json_schema", json_schema={"schema": wanted.schema_})
