"""The conversation of a body of `/v1/messages`: its blocks, and the messages of a chat that they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from raypp.openai_api.chat_messages import ContentPart, FunctionCall, ImagePart, ImageUrl, Message, TextPart, ToolCall
from raypp.openai_api.request_fields import Entries, LenientModel


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
