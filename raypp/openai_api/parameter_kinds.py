"""What a parameter that a model writes as bare text stands for, by its schema: a text, or JSON.

Bare text does not say whether 12 is a number or a text of two digits. Where the schema does not say it either, no call
can be held to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}
_ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_MAX_DEPTH = 32  # of references to references


class ParameterKind(Enum):
    """How the text of a parameter is read."""

    TEXT = "a text, as it stands"
    TEXT_OR_NULL = "null, or else a text"
    JSON = "JSON"
    ANY = "JSON, or else a text"


def parameter_kind(schema: Any, root: Mapping[str, Any]) -> ParameterKind | None:
    """Return how a parameter is read; None where its schema leaves open whether it is a text.

    Args:
        schema: Of the parameter.
        root: Of all arguments: what references refer to.
    """
    if schema is True or (isinstance(schema, Mapping) and not schema.keys() - _NOTES):
        return ParameterKind.ANY
    types = _types(schema, root, _MAX_DEPTH)
    if types == {"string"}:
        return ParameterKind.TEXT
    if types == {"string", "null"}:
        return ParameterKind.TEXT_OR_NULL
    return None if "string" in types else ParameterKind.JSON


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Return the types that a value may have, at least."""
    if not isinstance(schema, Mapping) or not depth:
        return _ALL_TYPES if schema is not False else frozenset()
    types, given = _ALL_TYPES, schema.get("type")
    if given is not None:
        types &= {given} if isinstance(given, str) else frozenset(each for each in given if isinstance(each, str))
    if "enum" in schema:
        types &= {_type_of(value) for value in schema["enum"]}
    if "const" in schema:
        types &= {_type_of(schema["const"])}
    for name in ("anyOf", "oneOf"):
        if name in schema:
            types &= frozenset().union(*(_types(each, root, depth - 1) for each in schema[name]))
    for each in schema.get("allOf", ()):
        types &= _types(each, root, depth - 1)
    if "$ref" in schema:
        types &= _types(_referred(schema["$ref"], root), root, depth - 1)
    return types


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
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "object")
