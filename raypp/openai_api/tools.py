"""The tools of a chat request: functions that the model may call.

Some models write arguments as bare text, which does not say whether 12 is a number or a text of two digits. Where the
schema of a parameter does not say it either, no call can be held to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from raypp.errors import RequestError
from raypp.grammar.lark import check_schema
from raypp.grammar.schema_check import cannot_be_enforced
from raypp.grammar.structural_tag import arguments_of
from raypp.openai_api.request_fields import LenientModel, RequestModel

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}
_MAX_DEPTH = 32  # of references to references


def parameter_types(schema: Any, root: Mapping[str, Any], depth: int = _MAX_DEPTH) -> frozenset[str]:
    """Return the types that a parameter may have, at least, in the words of JSON schemas.

    Args:
        schema: Of the parameter.
        root: Of all arguments: what references refer to.
        depth: How many schemas within schemas are looked at.
    """
    if not isinstance(schema, Mapping) or not depth:
        return ALL_TYPES if schema is not False else frozenset()
    types, given = ALL_TYPES, schema.get("type")
    if given is not None:
        types &= {given} if isinstance(given, str) else frozenset(each for each in given if isinstance(each, str))
    if "enum" in schema:
        types &= {_type_of(value) for value in schema["enum"]}
    if "const" in schema:
        types &= {_type_of(schema["const"])}
    for name in ("anyOf", "oneOf"):
        if name in schema:
            types &= frozenset().union(*(parameter_types(each, root, depth - 1) for each in schema[name]))
    for each in schema.get("allOf", ()):
        types &= parameter_types(each, root, depth - 1)
    if "$ref" in schema:
        types &= parameter_types(_referred(schema["$ref"], root), root, depth - 1)
    return types


def tells_texts(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether a parameter's schema says of every bare text whether it is a text; if anything goes, it is JSON.

    Args:
        schema: Of the parameter.
        root: As of `parameter_types`.
    """
    if schema is True or (isinstance(schema, Mapping) and not schema.keys() - _NOTES):
        return True
    types = parameter_types(schema, root)
    return "string" not in types or types <= {"string", "null"}


def has_type(value: Any, types: Set[str]) -> bool:
    """Return whether a JSON value has one of the types."""
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return what a reference into the same schema refers to; True, which anything is, for any other."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return True
    at: Any = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(at, Mapping) or name not in at:
            return True
        at = at[name]
    return at


def _type_of(value: Any) -> str:
    names = {bool: "boolean", type(None): "null", str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")


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

    def argument_schema(self, tool: Tool, style: str) -> dict[str, Any]:
        """Return what a tool's arguments are held to.

        Args:
            tool: One of these.
            style: How the model writes them, see `ArgumentsReader`.

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
            if style != "json":
                _check_bare_parameters(schema, style)
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


def _check_bare_parameters(schema: Mapping[str, Any], style: str) -> None:
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
        arguments_of(schema, style)
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
                "tool_choice without tools",
                got=choice.function.name if isinstance(choice, NamedToolChoice) else choice,
                expected="tools beside it",
                param="tool_choice",
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
