"""The body of `/v1/messages`, Anthropic's Messages API, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from raypp.openai_api.chat_messages import ContentPart, FunctionCall, ImagePart, ImageUrl, Message, TextPart, ToolCall
from raypp.openai_api.chat_request import ChatRequest, DerivedChat, ResponseFormat
from raypp.openai_api.foreign_fields import OF_MESSAGES, ForeignField
from raypp.openai_api.request_fields import (
    IGNORED,
    BodyModel,
    Entries,
    Integer,
    LenientModel,
    RequestFields,
    RequestModel,
)
from raypp.openai_api.tools import FunctionDefinition, FunctionName, NamedToolChoice, Tool, ToolChoice, ToolName


class Base64Source(LenientModel):
    """An image in the body."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]+$")]
    data: str


class UrlSource(LenientModel):
    """An image elsewhere."""

    type: Literal["url"]
    url: str


class ImageBlock(LenientModel):
    """An image between the texts."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ThinkingBlock(LenientModel):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(LenientModel):
    """An encrypted thought: passed over, no model here has written it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(LenientModel):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(LenientModel):
    """What the tool said."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Entries[Annotated[TextPart | ImageBlock, Field(discriminator="type")]] | None = None


UserBlock = Annotated[TextPart | ImageBlock | ToolResultBlock, Field(discriminator="type")]


class SystemMessage(LenientModel):
    """What the system says."""

    role: Literal["system"]
    content: str | Annotated[Entries[TextPart], Field(min_length=1)]


class UserMessage(LenientModel):
    """What the user says, and what tools said."""

    role: Literal["user"]
    content: str | Annotated[Entries[UserBlock], Field(min_length=1)]


class AssistantMessage(LenientModel):
    """What the model said in one turn."""

    role: Literal["assistant"]
    content: (
        str
        | Entries[
            Annotated[TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")]
        ]
    )


InputMessage = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


def chat_messages(
    system: str | Sequence[TextPart] | None, given: Sequence[InputMessage]
) -> tuple[list[Message], list[str]]:
    """Return the messages of the conversation, and for each the field that it comes from.

    Args:
        system: The system's message before all others.
        given: The field `messages`.
    """
    messages, origins = list[Message](), list[str]()
    if system:
        messages, origins = [Message(role="system", content=_content(system))], ["system"]
    for index, message in enumerate(given):
        found = [_of_model(message)] if isinstance(message, AssistantMessage) else [*_of_others(message)]
        messages += found
        origins += [f"messages[{index}]"] * len(found)
    return messages, origins


def _of_model(message: AssistantMessage) -> Message:
    if isinstance(message.content, str):
        return Message(role="assistant", content=message.content)
    calls = [
        ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=block.input))
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    return Message(
        role="assistant",
        content=[block for block in message.content if isinstance(block, TextPart)] or None,
        reasoning_content="\n".join(b.thinking for b in message.content if isinstance(b, ThinkingBlock)) or None,
        tool_calls=calls or None,
    )


def _of_others(message: SystemMessage | UserMessage) -> Iterator[Message]:
    """Yield what the user says, and each tool's result as a message of its own, in the order of the blocks."""
    if isinstance(message.content, str):
        yield Message(role=message.role, content=message.content)
        return
    for _, group in groupby(message.content, lambda block: isinstance(block, ToolResultBlock)):
        for block in (blocks := [*group]):
            if isinstance(block, ToolResultBlock):
                yield Message(role="tool", tool_call_id=block.tool_use_id, content=_content(block.content or ""))
        if parts := [block for block in blocks if not isinstance(block, ToolResultBlock)]:
            yield Message(role=message.role, content=_content(parts))


def _content(content: str | Sequence[TextPart | ImageBlock]) -> str | list[ContentPart]:
    return content if isinstance(content, str) else [_part(block) for block in content]


def _part(block: TextPart | ImageBlock) -> TextPart | ImagePart:
    if isinstance(block, TextPart):
        return block
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return ImagePart(type="image_url", image_url=ImageUrl(url=url))


IGNORED_BY_MESSAGES = ("cache_control", "context_management")
"""Fields that have no effect, beside those that have none in any body."""


class MessagesTool(LenientModel):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    """JSON schema of its input, an object."""
    strict: bool | None = None
    """Hold the input of every call to the schema."""


class AnyToolChoice(LenientModel):
    """Whether to call."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None

    def as_chat_choice(self) -> ToolChoice:
        """Return the choice as a chat has it."""
        return "required" if self.type == "any" else self.type


class OneToolChoice(LenientModel):
    """The tool that has to be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None

    def as_chat_choice(self) -> ToolChoice:
        """Return the choice as a chat has it."""
        return NamedToolChoice(type="function", function=FunctionName(name=self.name))


class Thinking(LenientModel):
    """Whether to think."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Integer | None = None
    """Ignored: thoughts count towards `max_tokens`."""


class OutputFormat(LenientModel):
    """The form that the answer must have."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """What the answer has to be like."""

    effort: str | None = None
    """Chat's `reasoning_effort`."""
    format: OutputFormat | None = None
    """A schema that the answer follows."""


class MessagesFields(BodyModel):
    """The conversation of a body: what `/v1/messages/count_tokens` takes."""

    foreign: ClassVar[Mapping[str, ForeignField]] = OF_MESSAGES
    chat_params: ClassVar[Mapping[str, str]] = {
        "response_format": "output_config.format",
        "reasoning_effort": "thinking",
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
    }

    model: str | None = Field(default=None, min_length=1)
    """The name of the served model; by default the one there is."""
    messages: Entries[InputMessage] = Field(min_length=1)
    """The conversation so far, the `content` of every answer as it came. The model goes on with a last message of its
    own."""
    system: str | Entries[TextPart] | None = None
    """The system's message before all others, as text or as blocks of text."""
    tools: Entries[MessagesTool] | None = None
    """Tools that the model may call. Those that Anthropic defines or runs are refused."""
    tool_choice: Annotated[AnyToolChoice | OneToolChoice, Field(discriminator="type")] | None = None
    """`auto`, the default, `any`, `tool` with a `name`, or `none`; `disable_parallel_tool_use`."""
    thinking: Thinking | None = None
    """`enabled` and `disabled` are `enable_thinking` of the chat template; `disabled` is refused where the template
    cannot do without thoughts. `adaptive` leaves it to the model. `budget_tokens` is ignored, with a warning."""
    output_config: OutputConfig | None = None
    """`effort` is chat's `reasoning_effort`. `format` is `json_schema` with a `schema` that the answer follows."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further values that the model's chat template reads (vLLM)."""
    cache_control: dict[str, Any] | None = None
    """What Anthropic caches; here prompts are cached by their tokens and `cache_salt`."""
    context_management: dict[str, Any] | None = None
    """What Anthropic leaves out of long conversations; here nothing is."""

    def chat(self) -> DerivedChat:
        """Return the chat that this asks for.

        Raises:
            RequestError: what the chat's own fields cannot be together.
        """
        messages, origins = chat_messages(self.system, self.messages)
        last, choice, thinking = messages[-1], self.tool_choice, self.thinking
        is_continued = last.role == "assistant" and bool(last.content) and not last.tool_calls
        kwargs = {"enable_thinking": True} if thinking is not None and thinking.type == "enabled" else {}
        config = self.output_config or OutputConfig()
        effort = "none" if thinking is not None and thinking.type == "disabled" else config.effort
        request = ChatRequest(
            **self._sampling_fields(),
            messages=messages,
            add_generation_prompt=not is_continued,
            continue_final_message=is_continued,
            chat_template_kwargs={**kwargs, **(self.chat_template_kwargs or {})},
            reasoning_effort=effort,
            response_format=None
            if config.format is None
            else ResponseFormat(type="json_schema", json_schema={"schema": config.format.schema_}),
            tools=None if self.tools is None else [_chat_tool(tool) for tool in self.tools],
            tool_choice=None if choice is None else choice.as_chat_choice(),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        )
        return DerivedChat(request, origins, self.chat_params)

    def _sampling_fields(self) -> dict[str, Any]:
        """Return a chat's fields that say how to sample."""
        return {}


class MessagesRequest(MessagesFields, RequestFields):
    """The body of `/v1/messages`."""

    max_tokens: Integer = Field(ge=1)
    """The most tokens to generate, thoughts among them; has to be given."""
    stop: Entries[Annotated[str, Field(min_length=1)]] | None = Field(default=None, alias="stop_sequences")
    """The text ends before the first of these."""
    metadata: dict[str, Any] | None = None
    """`user_id`: Anthropic's name of an end user."""

    def ignored(self) -> list[str]:
        """Return the fields that the body gives and that have no effect; of fields in others, their path."""
        names = [*super().ignored(), *(name for name in IGNORED_BY_MESSAGES if getattr(self, name) is not None)]
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            names.append("thinking.budget_tokens")
        return names

    @property
    def form_param(self) -> str:
        """The field that holds the answer to a form, where one does."""
        if self.constraint():
            return super().form_param
        return "output_config.format" if self.output_config and self.output_config.format else "tools"

    def _sampling_fields(self) -> dict[str, Any]:
        shared = RequestFields.model_fields.keys() - IGNORED - {"model"}
        given = {name: value for name in shared if (value := getattr(self, name)) is not None}
        return {**given, "max_completion_tokens": self.max_tokens}


def _chat_tool(tool: MessagesTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)
