"""The input and the tools of `/v1/responses`: the messages and the tools of a chat that they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

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
from raypp.openai_api.request_fields import Entries, LenientModel, RequestModel
from raypp.openai_api.tools import FunctionDefinition, FunctionName, NamedToolChoice, Tool, ToolChoice, ToolName


class ResponseFunction(LenientModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object; by default none."""
    strict: bool | None = None
    """Hold the arguments of every call to the schema."""


class OtherTool(LenientModel):
    """A tool that OpenAI's servers run, or whose calls are not JSON."""

    type: Literal[
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]


class Namespace(LenientModel):
    """Functions under a common name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    """The model reads it before the description of the first function."""
    tools: Entries[Annotated[ResponseFunction | OtherTool, Field(discriminator="type")]]


ResponseTool: TypeAlias = Annotated[ResponseFunction | Namespace | OtherTool, Field(discriminator="type")]


class FunctionChoice(RequestModel):
    """The function that has to be called. A function in a namespace is named `NAMESPACE.FUNCTION`."""

    type: Literal["function"]
    name: str


ResponseToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | Annotated[FunctionChoice | OtherTool, Field(discriminator="type")]
)


def full_name(namespace: str | None, name: str) -> str:
    """Return what a chat calls a function."""
    return name if namespace is None else f"{namespace}.{name}"


def callable_tools(tools: Sequence[ResponseTool] | None) -> list[ResponseFunction | Namespace]:
    """Return the tools without those that the model cannot call."""
    functions = list[ResponseFunction | Namespace]()
    for tool in tools or ():
        if isinstance(tool, Namespace):
            functions.append(tool.model_copy(update={"tools": callable_tools(tool.tools)}))
        elif isinstance(tool, ResponseFunction):
            functions.append(tool)
    return functions


def types_left_out(tools: Sequence[ResponseTool] | None) -> set[str]:
    """Return the types of the tools that the model cannot call."""
    return {tool.type for _, tool in _with_namespaces(tools) if isinstance(tool, OtherTool)}


def own_names(tools: Sequence[ResponseTool] | None) -> dict[str, dict[str, str]]:
    """Return `namespace` and `name` of the functions in namespaces, by what a chat calls them."""
    return {
        full_name(space.name, tool.name): {"namespace": space.name, "name": tool.name}
        for space, tool in _with_namespaces(tools)
        if space is not None and isinstance(tool, ResponseFunction)
    }


def chat_tools(tools: Sequence[ResponseTool] | None) -> list[Tool]:
    """Return the tools that the model can call, as a chat has them."""
    chat, described = list[Tool](), None
    for space, tool in _with_namespaces(tools):
        if isinstance(tool, OtherTool):
            continue
        about_all = None if space is None or space is described else space.description
        described = space
        function = FunctionDefinition(
            name=full_name(None if space is None else space.name, tool.name),
            description="\n".join(filter(None, (about_all, tool.description))) or None,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        chat.append(Tool(type="function", function=function))
    return chat


def chat_choice(choice: ResponseToolChoice | None, tools: Sequence[ResponseTool] | None) -> ToolChoice | None:
    """Return which tools have to be called, as a chat has it.

    Raises:
        RequestError: a tool that the model cannot call has to be.
    """
    left_out = types_left_out(tools)
    if isinstance(choice, OtherTool) or (choice == "required" and left_out and not chat_tools(tools)):
        raise RequestError(
            "tool_choice asks for a call of a tool that this server does not have",
            got=choice.type if isinstance(choice, OtherTool) else f"required, with tools of type {', '.join(left_out)}",
            expected="auto or none, or functions among the tools",
            hint="describe the tool as a function that the client runs",
            param="tool_choice",
        )
    if isinstance(choice, FunctionChoice):
        return NamedToolChoice(type="function", function=FunctionName(name=choice.name))
    return choice


def _with_namespaces(
    tools: Sequence[ResponseTool] | None,
) -> Iterator[tuple[Namespace | None, ResponseFunction | OtherTool]]:
    for tool in tools or ():
        if isinstance(tool, Namespace):
            yield from ((tool, inner) for inner in tool.tools)
        else:
            yield None, tool


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
