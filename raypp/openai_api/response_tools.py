"""The tools of `/v1/responses`: functions, alone and in namespaces, and tools that the model cannot call here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from raypp.errors import RequestError
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
