"""The input of `/v1/responses`: its items, and the messages of a chat that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from raypp.errors import RequestError
from raypp.openai_api.chat_messages import (
    ContentPart,
    FunctionCall,
    ImagePart,
    ImageUrl,
    Message,
    TextPart,
    ToolCall,
)
from raypp.openai_api.request_fields import Entries, LenientModel
from raypp.openai_api.response_tools import full_name


class InputText(LenientModel):
    """A piece of text, a client's or the model's."""

    type: Literal["input_text", "output_text"]
    text: str


class InputRefusal(LenientModel):
    """What a model said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class InputImage(LenientModel):
    """An image between the texts."""

    type: Literal["input_image"]
    image_url: str | None = None
    """`data:image/...;base64,...` or an address."""
    file_id: str | None = None
    """Only null: no files are kept here."""
    detail: str | None = None
    """Taken and ignored: images keep their size."""


InputPart = Annotated[InputText | InputRefusal | InputImage, Field(discriminator="type")]


class InputMessage(LenientModel):
    """One message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Entries[InputPart]


class InputCall(LenientModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    """A JSON object as text."""


class InputCallOutput(LenientModel):
    """What the function said."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Entries[InputPart]


class InputThought(LenientModel):
    """One text of a thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class InputReasoning(LenientModel):
    """What the model thought. Summaries and encrypted thoughts are passed over: no model here has written them."""

    type: Literal["reasoning"]
    content: Entries[InputThought] | None = None


class InputReference(LenientModel):
    """The name of an item that was sent or answered before: refused, since none is kept."""

    type: Literal["item_reference"]
    id: str


def _with_type(item: Any) -> Any:
    """Let a message do without a type, as OpenAI does."""
    is_message = isinstance(item, dict) and item.get("type") is None and "role" in item
    return {**item, "type": "message"} if is_message else item


InputItem = Annotated[
    InputMessage | InputCall | InputCallOutput | InputReasoning | InputReference,
    Field(discriminator="type"),
    BeforeValidator(_with_type),
]


def chat_messages(instructions: str | None, given: str | Sequence[InputItem]) -> tuple[list[Message], list[str]]:
    """Return the messages of the conversation, and for each the field that it comes from.

    What the model wrote in one turn, thoughts, text and calls, is one message of a chat.

    Args:
        instructions: The system's message before all others.
        given: The field `input`.

    Raises:
        RequestError: there is no message, or an image that is not there.
    """
    messages, origins = [], []
    if instructions is not None:
        messages, origins = [Message(role="system", content=instructions)], ["instructions"]
    if isinstance(given, str):
        return [*messages, Message(role="user", content=given)], [*origins, "input"]
    is_open = False  # whether the last message is the model's, of the present turn
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if isinstance(item, InputReasoning) and not item.content:
            continue
        if is_open and _add_to_turn(messages[-1], item, where):
            continue
        messages.append(_message(item, where))
        origins.append(where)
        is_open = messages[-1].role == "assistant"
    if not messages:
        raise RequestError(
            "there is no input", got=[], expected="a text, or a list of at least one item", param="input"
        )
    return messages, origins


def _add_to_turn(last: Message, item: InputItem, where: str) -> bool:
    """Add what the model wrote next to its message; return whether it belongs there."""
    match item:
        case InputCall():
            if last.tool_calls is None:
                last.tool_calls = []
            last.tool_calls.append(_call(item))
        case InputMessage(role="assistant") if last.content is None and last.tool_calls is None:
            last.content = _content(item.content, f"{where}.content")
        case _:
            return False
    return True


def _message(item: InputItem, where: str) -> Message:
    match item:
        case InputMessage():
            return Message(role=item.role, content=_content(item.content, f"{where}.content"))
        case InputCall():
            return Message(role="assistant", tool_calls=[_call(item)])
        case InputCallOutput():
            return Message(role="tool", tool_call_id=item.call_id, content=_content(item.output, f"{where}.output"))
        case InputReference():
            raise RequestError(
                "items are not stored here",
                got=f"a reference to {item.id[:80]!r}",
                expected="the item itself",
                hint="clients send whole items when they are told store=false",
                param=where,
            )
        case InputReasoning():
            text = "\n".join(thought.text for thought in item.content or ())
            return Message(role="assistant", reasoning_content=text)


def _call(item: InputCall) -> ToolCall:
    name = full_name(item.namespace, item.name)
    return ToolCall(id=item.call_id, function=FunctionCall(name=name, arguments=item.arguments))


def _content(content: str | Sequence[InputPart], where: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: InputPart, where: str) -> TextPart | ImagePart:
    if isinstance(part, InputText):
        return TextPart(type="text", text=part.text)
    if isinstance(part, InputRefusal):
        return TextPart(type="text", text=part.refusal)
    if part.image_url is None:
        raise RequestError(
            "an image without image_url",
            got=None if part.file_id is None else f"file_id {part.file_id[:80]!r}",
            expected="image_url: data:image/...;base64,... or an address; no files are kept here",
            param=where,
        )
    return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url))
