"""The body of `/v1/responses`, and the chat that it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from raypp.errors import RequestError
from raypp.openai_api.chat_request import ChatRequest, ResponseFormat
from raypp.openai_api.request_fields import Entries, Integer, LenientModel, RequestFields, RequestModel
from raypp.openai_api.response_input import InputItem, chat_messages
from raypp.openai_api.tools import FunctionDefinition, FunctionName, NamedToolChoice, Tool

Unsupported = Annotated[Any, WithJsonSchema({"type": "null"})]
"""A field that is known, and refused with a word on what to do instead."""

_LOGPROBS = "message.output_text.logprobs"

_KEEPS_NOTHING = "no responses are kept here"
_UNSUPPORTED = {
    "previous_response_id": (
        _KEEPS_NOTHING,
        "send the conversation so far as input: its items, the output of each response behind them",
    ),
    "conversation": (_KEEPS_NOTHING, "send the conversation so far as input"),
    "background": (_KEEPS_NOTHING, "leave background out, and read the answer, or its stream"),
    "prompt": ("no prompt templates are kept here", "send instructions and input"),
    "context_management": ("conversations are not compacted here", "leave older items out of input"),
}

_CHAT_PARAMS = {
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
}
"""A chat's fields, and what they are called in this body."""


class ResponseTool(LenientModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object; by default none."""
    strict: bool | None = None
    """Hold the arguments of every call to the schema."""

    def as_chat_tool(self) -> Tool:
        """Return the tool as a chat has it."""
        function = FunctionDefinition(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool(type="function", function=function)


class ResponseToolChoice(RequestModel):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


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
    """Taken and ignored: a schema is always followed."""


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
    """Taken and ignored: thoughts come whole, as the content of `reasoning` items."""


class ResponseStreamOptions(RequestModel):
    """What a stream holds besides its events."""

    include_obfuscation: bool | None = None
    """Taken and ignored: there is none."""


class ResponseRequest(RequestFields):
    """The body of `/v1/responses`."""

    input: str | Entries[InputItem]
    """The conversation so far: one text of the user's, or a list of items."""
    instructions: str | None = None
    """The system's message before all others."""
    max_output_tokens: Integer | None = Field(default=None, ge=1)
    """The most tokens to generate, thoughts among them. By default all that the context has room for."""
    text: TextFields | None = None
    """The form that the answer must have."""
    reasoning: ReasoningFields | None = None
    """How to think."""
    tools: Entries[ResponseTool] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    """`auto`, the default, `none`, `required`, or the function to call."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several times; by default it may."""
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)
    """Return log-probabilities of the generated tokens, and of this many alternatives at each position."""
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
    """`message.output_text.logprobs` asks for log-probabilities; there is nothing that the others could add."""
    truncation: Literal["auto", "disabled"] | None = None
    """Taken and ignored: a conversation longer than the context is refused."""
    max_tool_calls: Integer | None = Field(default=None, ge=0)
    """Taken and ignored: it counts calls of tools that run on a server, and there are none here."""
    stream_options: ResponseStreamOptions | None = None
    """Only with `stream`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further values that the model's chat template reads, e.g. `enable_thinking` (vLLM)."""
    prompt_cache_options: dict[str, Any] | None = None
    """Taken and ignored: prompts are cached by their tokens."""

    previous_response_id: Unsupported = None
    """Only null: the conversation so far is sent as `input`."""
    conversation: Unsupported = None
    """Only null: the conversation so far is sent as `input`."""
    prompt: Unsupported = None
    """Only null: templates of prompts are not kept."""
    context_management: Unsupported = None
    """Only null: conversations are not compacted."""
    background: Literal[False] | Unsupported = None
    """Only false: responses are not kept."""

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

    def chat(self) -> ResponseChat:
        """Return the chat that this asks for.

        Raises:
            RequestError: something that is not supported, or no input.
        """
        for name, (message, hint) in _UNSUPPORTED.items():
            if (value := getattr(self, name)) not in (None, False):
                got = f"{name}={repr(value)[:80]}"
                raise RequestError(message, got=got, expected=f"no {name}", hint=hint, param=name)
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
            tools=None if self.tools is None else [tool.as_chat_tool() for tool in self.tools],
            tool_choice=NamedToolChoice(type="function", function=FunctionName(name=self.tool_choice.name))
            if isinstance(self.tool_choice, ResponseToolChoice)
            else self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )
        return ResponseChat(request, origins)

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


class ResponseChat:
    """The chat that a body of `/v1/responses` asks for."""

    def __init__(self, request: ChatRequest, origins: list[str]) -> None:
        """Keep what is known.

        Args:
            request: The body of the chat.
            origins: The field that each of its messages comes from.
        """
        self.request = request
        self._origins = origins

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Let errors about the chat name the fields of the body that it was made of."""
        try:
            yield
        except RequestError as error:
            if error.param is not None:
                error.param = self._own_param(error.param)
            raise

    def _own_param(self, param: str) -> str:
        if message := re.match(r"messages\[(\d+)\]", param):
            return self._origins[int(message[1])]
        return _CHAT_PARAMS.get(param, param)
