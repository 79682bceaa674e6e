"""What single keywords of a JSON schema accept, those that have no other schemas in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from raypp.grammar.json_pattern import UnsupportedPatternError, text_pattern
from raypp.grammar.schema_check import cannot_be_enforced, is_note
from raypp.grammar.schema_references import malformed
from raypp.grammar.schema_shapes import (
    EVERYTHING,
    NEVER,
    OF_TYPE,
    Array,
    Constant,
    Number,
    Object,
    ObjectLayer,
    Shape,
    Shapes,
    String,
    meet,
    number,
)

OF_OBJECTS = frozenset(
    {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "required"}
    | {"minProperties", "maxProperties", "dependentRequired", "dependentSchemas"}
)
OF_ARRAYS = frozenset(
    {"items", "prefixItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems", "maxItems"}
    | {"uniqueItems"}
)
OF_STRINGS = frozenset(["minLength", "maxLength", "pattern", "format"])
OF_NUMBERS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_ANY_TYPE = frozenset(
    {"type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"}
)
_KNOWN = OF_OBJECTS | OF_ARRAYS | OF_STRINGS | OF_NUMBERS | _ANY_TYPE | {"$anchor", "$dynamicAnchor", "$vocabulary"}
_NO_OBJECTS = tuple(shape for shape in EVERYTHING if not isinstance(shape, Object))


def check_keywords(schema: Mapping[str, Any], path: str) -> None:
    """Check that every keyword is understood, or binds nothing.

    Raises:
        RequestError: names one that is not.
    """
    if unknown := sorted(keyword for keyword in schema if keyword not in _KNOWN and not is_note(keyword)):
        raise cannot_be_enforced(path, unknown[0])


def some(shapes: Iterable[Shape | None]) -> list[Shape]:
    """Return the sets that are there."""
    return [shape for shape in shapes if shape is not None]


def distinct(shapes: Iterable[Shape]) -> Shapes:
    """Return each set once, in their order."""
    return tuple(dict.fromkeys(shapes))


def types_of(schema: dict[str, Any], path: str, wide: bool) -> list[str]:
    """Return the types that a schema speaks of. Read narrowly, keywords of objects or arrays alone mean their type."""
    if "type" not in schema:
        families = [family for family in (OF_OBJECTS, OF_ARRAYS, OF_STRINGS, OF_NUMBERS) if schema.keys() & family]
        if not wide and families in ([OF_OBJECTS], [OF_ARRAYS]):
            return ["object" if families[0] is OF_OBJECTS else "array"]
        return [name for name in OF_TYPE if name != "integer"]
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for name in types:
        if not isinstance(name, str) or name not in OF_TYPE:
            raise cannot_be_enforced(path, f"the type {name!r}")
    return [name for name in dict.fromkeys(types) if name != "integer" or "number" not in types]


def other_types(types: list[str], wide: bool) -> list[Shape]:
    """Return the sets of all other types; numbers that are not whole are none of the narrow ones."""
    others = [name for name in OF_TYPE if name != "integer" and name not in types]
    if "integer" in types and not wide:
        others.remove("number")
    return [shape for name in others for shape in OF_TYPE[name]]


def number_of(schema: dict[str, Any], path: str) -> Number | None:
    """Return the numbers that a schema accepts; None if there are none."""
    made: Number | None = Number()
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"):
        if name in schema and made is not None:
            other = number(_numbers_of(name, _given_number(schema, name, path)))
            meeting = None if other is None else meet(made, other)
            made = meeting if isinstance(meeting, Number) else None
    return made


def _numbers_of(name: str, value: Fraction) -> Number:
    match name:
        case "minimum":
            return Number(low=value)
        case "exclusiveMinimum":
            return Number(low=value, is_above=True)
        case "maximum":
            return Number(high=value)
        case "exclusiveMaximum":
            return Number(high=value, is_below=True)
        case _:
            return Number(step=value)


def other_numbers(name: str, schema: dict[str, Any], path: str) -> list[Shape]:
    """Return the numbers that a bound does not accept."""
    if name == "multipleOf":
        raise cannot_be_enforced(path, "multipleOf within not, if or one of several oneOf that share a value")
    opposite = {"minimum": "exclusiveMaximum", "exclusiveMinimum": "maximum"}
    opposite |= {"maximum": "exclusiveMinimum", "exclusiveMaximum": "minimum"}
    return [_numbers_of(opposite[name], _given_number(schema, name, path))]


def _given_number(schema: dict[str, Any], name: str, path: str) -> Fraction:
    value = schema[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise malformed(path, schema, name)
    if name == "multipleOf" and value <= 0:
        raise cannot_be_enforced(path, f"multipleOf {str(value)[:40]!r}, which is no number above 0")
    return fraction_of(value)


def fraction_of(value: float) -> Fraction:
    """Return a number as it is written."""
    return Fraction(str(value))


def string_of(schema: dict[str, Any], path: str) -> String | None:
    """Return the strings that a schema accepts; None if there are none."""
    least, most = count_of(schema, "minLength", path) or 0, count_of(schema, "maxLength", path)
    patterns = frozenset([pattern_of(schema["pattern"], path)] if "pattern" in schema else [])
    formats = frozenset([schema["format"]] if isinstance(schema.get("format"), str) else [])
    return None if most is not None and least > most else String(least, most, patterns, formats)


def pattern_of(pattern: Any, path: str) -> str:
    """Return a pattern as of `text_pattern`."""
    try:
        return text_pattern(str(pattern))
    except UnsupportedPatternError as error:
        raise cannot_be_enforced(path, f"a pattern with a part that cannot be followed ({error})") from None


def count_of(schema: dict[str, Any], name: str, path: str) -> int | None:
    """Return a count; None if there is no such keyword."""
    value = schema.get(name)
    if value is None and name not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
        raise malformed(path, schema, name)
    return int(value)


def other_counts(name: str, count: int) -> list[Shape]:
    """Return the sets of fewer where there is a least number, of more where there is a most."""
    if name.startswith("min") and not count:
        return []
    match name:
        case "minLength":
            return [String(max_length=count - 1)]
        case "maxLength":
            return [String(min_length=count + 1)]
        case "minItems":
            return [Array(max_items=count - 1)]
        case "maxItems":
            return [Array(min_items=count + 1)]
        case "minProperties":
            return [Object(max_properties=count - 1)]
        case _:
            return [Object(min_properties=count + 1)]


def required_of(schema: dict[str, Any], path: str) -> list[str]:
    """Return the names that have to be there."""
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise malformed(path, schema, "required")
    return names


def map_of(schema: dict[str, Any], name: str, kind: Any, path: str) -> list[tuple[str, Any]]:
    """Return what a keyword says of names."""
    value = schema.get(name, {})
    if not isinstance(value, dict) or not all(isinstance(part, kind) for part in value.values()):
        raise malformed(path, schema, name)
    return list(value.items())


def lacking(name: str) -> ObjectLayer:
    """Return that there is no property of a name."""
    return ObjectLayer(((name, NEVER),), is_declared=False)


def without(name: str) -> Shapes:
    """Return all values but the objects with a property."""
    return (*_NO_OBJECTS, Object((lacking(name),)))


def without_declarations(shape: Shape) -> Shape:
    """Return a set that says nothing of which items and properties there are."""
    match shape:
        case Array():
            return replace(shape, layers=tuple(replace(layer, is_declared=False) for layer in shape.layers))
        case Object():
            return replace(shape, layers=tuple(replace(layer, is_declared=False) for layer in shape.layers))
        case _:
            return shape


def of_scalar(value: Any) -> Shapes:
    """Return the set of one number, `true`, `false` or `null`."""
    if isinstance(value, bool) or value is None:
        return (Constant(value),)
    given = fraction_of(value)
    return (Number(given, given),)
