"""The messages of a chat request, as clients send them, and what chat templates are shown of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from raypp.api.conversation import plain_conversation
from raypp.errors import RequestError
from raypp.openai_api.request_fields import Entries, LenientModel
from raypp.openai_api.syntax import MessageSyntax


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
    image_url: Annotated[ImageUrl, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)]
    """Or the address alone."""


_CONTENTS = {
    "assistant": {"content", "audio", "tool_calls", "function_call", "refusal", "reasoning", "reasoning_content"}
}
"""The fields of which a message has at least one, by its role; others have content."""

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

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """`function` is the older word for `tool`."""
    content: str | Entries[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """Another name of `reasoning_content`, if it is text."""
    tool_calls: Entries[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    """The older form of `tool_calls`, with one call."""
    audio: Any = None
    """Only null."""

    @model_validator(mode="before")
    @classmethod
    def _has_content(cls, given: Any) -> Any:
        """Refuse a message that does not name its content: null is given, too."""
        if isinstance(given, dict) and not given.keys() & _CONTENTS.get(str(given.get("role")), {"content"}):
            names = ", ".join(map(str, given))
            raise PydanticCustomError("no_content", "a message with content", {"got": f"the fields {names[:200]}"})
        return given


def conversation_of(messages: Sequence[Message], *, takes_images: bool) -> list[dict[str, Any]]:
    """Return messages as a chat template reads them: texts joined, empty fields left out.

    Args:
        messages: The conversation.
        takes_images: Whether the engine's model does.

    Raises:
        RequestError: images for a model that takes none, something else that the template would not be shown, or a
            message of a user without content.
    """
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]", takes_images=takes_images)
    return plain_conversation([_fields_of(message) for message in messages])


def _check_message(message: Message, where: str, *, takes_images: bool) -> None:
    if message.audio is not None:
        raise RequestError(
            "a message with audio",
            got=repr(message.audio)[:80],
            expected="null",
            hint="send its transcript as content",
            param=f"{where}.audio",
        )
    if message.function_call is not None and message.tool_calls:
        raise RequestError(
            "a message with function_call beside tool_calls",
            got=f"{message.function_call.name} and {len(message.tool_calls)} tool calls",
            expected="one of them",
            hint="function_call is the older form: send all calls as tool_calls",
            param=f"{where}.function_call",
        )
    if message.role == "user" and message.content in (None, []):
        raise RequestError(
            "a message of a user without content",
            got="null" if message.content is None else "[]",
            expected='text, or a list of parts like {"type": "text", "text": "..."}',
            hint="leave the message out if it says nothing",
            param=f"{where}.content",
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
    if (call := fields.pop("function_call", None)) is not None:
        fields["tool_calls"] = [{"type": "function", "function": call}]
    if fields["role"] == "function":
        fields["role"] = "tool"
    return fields


def shown_messages(messages: Sequence[dict[str, Any]], syntax: MessageSyntax) -> list[dict[str, Any]]:
    """Return messages as the chat template takes them: thoughts where it looks for them, maybe one call in each.

    Args:
        messages: As `conversation_of` returns them.
        syntax: The model's.
    """
    name = syntax.thoughts.template_field if syntax.thoughts is not None else ""
    shown = [_with_thought(message, name) if name else message for message in messages]
    return _with_one_call(shown) if syntax.calls is not None and syntax.calls.separator is None else shown


def _with_thought(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a message whose thought has this name, alone beside tool calls."""
    thought, content = message.get("reasoning_content"), message.get("content")
    if not thought:
        return message
    if message.get("tool_calls") and isinstance(content, str) and content:
        return {**message, name: f"{thought}\n\n{content}", "content": ""}
    return {**message, name: thought}


def _with_one_call(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with one call each. The result that names a call stands behind it."""
    groups, of_call = list[list[dict[str, Any]]](), dict[str, list[dict[str, Any]]]()
    for message in messages:
        if (group := of_call.get(message.get("tool_call_id") or "")) is not None:
            group.append(message)
            continue
        calls = message.get("tool_calls") or []
        parts = [{"role": message["role"], "content": "", "tool_calls": [call]} for call in calls[1:]]
        for part in [{**message, "tool_calls": calls[:1]} if parts else message, *parts]:
            groups.append([part])
            if calls and (call_id := part["tool_calls"][0].get("id")):
                of_call[call_id] = groups[-1]
    return [message for group in groups for message in group]
