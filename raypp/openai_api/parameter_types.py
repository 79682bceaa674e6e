"""Of which types a parameter may be that a model writes as bare text, by its schema.

Bare text does not say whether 12 is a number or a text of two digits. Where the schema does not say it either, no call
can be held to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}
_MAX_DEPTH = 32  # of references to references


def parameter_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a parameter may have, at least, in the words of JSON schemas.

    Args:
        schema: Of the parameter.
        root: Of all arguments: what references refer to.
    """
    return _types(schema, root, _MAX_DEPTH)


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


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Return the types that a value may have, at least."""
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
