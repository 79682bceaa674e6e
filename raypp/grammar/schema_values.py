"""What can be told of the values that schemas accept: their types, and whether two schemas share any."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from typing import Any

_NUM_HOPS = 8


def resolve(reference: Any, schema: Any) -> Any:
    """Return the part of a schema that a `$ref` names; None when it names none of it."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    for part in reference[2:].split("/") if reference != "#" else ():
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(schema, dict) or key not in schema:
            return None
        schema = schema[key]
    return schema


def is_of_type(value: Any, name: str) -> bool:
    """Return whether a JSON value is of one of JSON schema's types."""
    match name:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        case _:
            return not isinstance(value, bool) and isinstance(value, int | float)


def are_disjoint(schemas: list[Any], root: Any) -> bool:
    """Return whether it is plain that no value is accepted by two of the schemas."""
    return all(_differ(followed(a, root), followed(b, root), root) for a, b in combinations(schemas, 2))


def _differ(a: Any, b: Any, root: Any) -> bool:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return not any(x == y and isinstance(x, bool) == isinstance(y, bool) for x in values_a for y in values_b)
    types_a, types_b = _types(a), _types(b)
    if types_a and types_b and not types_a & types_b and not {"integer", "number"} <= types_a | types_b:
        return True
    if _makes_objects(a) and _makes_objects(b):
        shared = set(a.get("required", ())) & set(b.get("required", ()))
        return any(_differ(_property(a, name, root), _property(b, name, root), root) for name in shared)
    return False


def is_within(schema: Any, types: Collection[str], root: Any, num_hops: int = _NUM_HOPS) -> bool:
    """Return whether it is plain that a grammar of the schema makes values of these types alone."""
    schema = followed(schema, root)
    if not isinstance(schema, dict) or not num_hops:
        return False
    if (values := _values(schema)) is not None:
        return all(any(is_of_type(value, name) for name in types) for value in values)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(name), list):
            return all(is_within(branch, types, root, num_hops - 1) for branch in branches)
    own = _types(schema) or ({"object"} if _makes_objects(schema) else set())
    return bool(own) and all(name in types or (name == "integer" and "number" in types) for name in own)


def _makes_objects(schema: dict[str, Any]) -> bool:
    """Return whether a schema's grammar makes objects alone; without a type, it may accept other values, too."""
    return _types(schema) == {"object"} or ("type" not in schema and "properties" in schema)


def _property(schema: dict[str, Any], name: str, root: Any) -> Any:
    return followed(schema.get("properties", {}).get(name), root)


def followed(schema: Any, root: Any) -> Any:
    """Return what a `$ref` to a `$ref`, and so on, leads to; one that leads on as such."""
    for _ in range(_NUM_HOPS):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = resolve(schema["$ref"], root)
    return schema


def _values(schema: dict[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: dict[str, Any]) -> set[str]:
    if (values := _values(schema)) is not None:
        names = ("object", "array", "string", "boolean", "null", "number")
        return {name for value in values for name in names if is_of_type(value, name)}
    given = schema.get("type")
    return set(given if isinstance(given, list) else [given]) - {None}
