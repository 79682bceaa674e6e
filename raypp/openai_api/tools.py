"""The tools of a chat request: functions that the model may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from raypp.errors import RequestError
from raypp.grammar.lark import check_schema
from raypp.grammar.schema_check import cannot_be_enforced
from raypp.grammar.structural_tag import arguments_of
from raypp.openai_api.parameter_types import tells_texts
from raypp.openai_api.request_fields import LenientModel, RequestModel

_OF_FURTHER_NAMES = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
_FullName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,129}$")]
"""With a namespace before it."""


class FunctionDefinition(LenientModel):
    """A function."""

    name: _FullName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object; by default none."""
    strict: bool | None = None
    """Hold the arguments of every call to the schema."""


class Tool(LenientModel):
    """Something that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestModel):
    """Which function."""

    name: str


class NamedToolChoice(RequestModel):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


@dataclass(frozen=True)
class ToolUse:
    """The tools that a request may use, and whether it must."""

    tools: tuple[Tool, ...]
    must_call: bool
    may_call_several: bool

    @property
    def holds_arguments(self) -> bool:
        """Whether calls are held to a form, not only looked for."""
        return self.must_call or any(tool.function.strict for tool in self.tools)

    def argument_schema(self, tool: Tool, *, is_json: bool) -> dict[str, Any]:
        """Return what a tool's arguments are held to.

        Args:
            tool: One of these.
            is_json: Whether the model writes them as JSON.

        Raises:
            RequestError: a strict function whose schema cannot be enforced.
        """
        schema = tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
        types = schema.get("type", "object")
        try:
            if types != "object" and not (isinstance(types, list) and "object" in types):
                raise cannot_be_enforced("#", f"the type {str(types)[:40]!r}", expected="object: arguments have names")
            schema = {**schema, "type": "object"}
            check_schema(schema)
            if not is_json:
                _check_bare_parameters(schema)
        except RequestError as error:
            if tool.function.strict:
                raise RequestError(
                    f"the parameters of {tool.function.name} cannot be enforced, and it is strict",
                    got=error.got,
                    expected=error.expected,
                    hint="leave strict out: then any object is taken",
                    param="tools",
                ) from error
            return _ANY_ARGUMENTS
        return schema


def _check_bare_parameters(schema: Mapping[str, Any]) -> None:
    """Refuse a schema by which arguments that are no JSON could be read as what it does not allow.

    Raises:
        RequestError: says which part.
    """
    further = [schema.get(name, False) for name in _OF_FURTHER_NAMES]
    if any(each is not False for each in further) and (schema.get("properties") or further[0] not in (True, {})):
        raise cannot_be_enforced("#", "arguments of names that are not in the schema, which are not read as JSON")
    if schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        raise cannot_be_enforced("#", "arguments whose properties are not named at the top, which are not read as JSON")
    for name, of_name in schema.get("properties", {}).items():
        if not tells_texts(of_name, schema):
            raise cannot_be_enforced(
                f"#/properties/{name}", "a value that may be a text or something else, which is written alike"
            )
    try:
        arguments_of(schema)
    except (ValueError, LookupError, TypeError) as error:
        raise cannot_be_enforced("#", str(error)) from None


def tool_use(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel_tool_calls: bool | None
) -> ToolUse | None:
    """Return which tools may be used; None when none may.

    Raises:
        RequestError: a choice that the tools do not have.
    """
    names = [tool.function.name for tool in tools or ()]
    seen = set[str]()
    for index, name in enumerate(names):
        if name in seen:
            raise RequestError(
                "two tools have the same name",
                got=f"{name}, as tools[{names.index(name)}] and tools[{index}]",
                expected="a name of its own for every tool: a call tells by it which one is meant",
                hint="rename one of them, or leave it out",
                param="tools",
            )
        seen.add(name)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice without tools", got=_plain(choice), expected="tools beside it", param="tool_choice"
            )
        return None
    if choice == "none":
        return None
    several = parallel_tool_calls is not False
    if isinstance(choice, NamedToolChoice):
        named = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        if not named:
            raise RequestError(
                "tool_choice names a function that is not among the tools",
                got=choice.function.name,
                expected=", ".join(names),
                param="tool_choice",
            )
        return ToolUse(named, must_call=True, may_call_several=False)
    return ToolUse(tuple(tools), must_call=choice == "required", may_call_several=several)


def tools_of(functions: Sequence[FunctionDefinition] | None) -> list[Tool]:
    """Return functions, the older form of tools, as tools."""
    return [Tool(type="function", function=function) for function in functions or ()]


def function_use(
    functions: Sequence[FunctionDefinition] | None, choice: Literal["none", "auto"] | FunctionName | None
) -> ToolUse | None:
    """Return `tool_use` of functions; one answer calls one of them.

    Raises:
        RequestError: a choice that the functions do not have.
    """
    named = NamedToolChoice(type="function", function=choice) if isinstance(choice, FunctionName) else choice
    try:
        return tool_use(tools_of(functions), named, parallel_tool_calls=False)
    except RequestError as error:
        error.param = "functions" if error.param == "tools" else "function_call"
        raise


def _plain(choice: ToolChoice | None) -> object:
    return choice.function.name if isinstance(choice, NamedToolChoice) else choice
