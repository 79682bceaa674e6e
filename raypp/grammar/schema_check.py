"""Which JSON schemas are taken: what a grammar would not hold a text to is refused by name and place.

llguidance passes over keywords that it does not know, and reads some numbers and texts in another way than a schema
means them. A text would then be held to something else than what was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from typing import Any

from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from raypp.errors import RequestError, page

MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 20_000
MAX_PROPERTIES = 3_000  # llguidance takes a second for these, and four times as long for twice as many
MAX_COUNT = 20_000
"""The largest length, and number of items or properties."""

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "strict", "discriminator"}
    | {"$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "$vocabulary", "$dynamicAnchor"}
    | {"$recursiveAnchor", "contentEncoding", "contentMediaType", "contentSchema", "markdownDescription", "enumNames"}
    | {"enumDescriptions", "example", "externalDocs", "propertyOrdering", "xml"}
)
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
"""Keywords whose schemas are for the same value."""

_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = frozenset(
    {"items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames"}
    | {"not", "if", "then", "else", "contains"}
)
_COUNTS = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys((*_MAPS, "dependentRequired"), ((dict,), f"an object of at most {MAX_PROPERTIES:,} names")),
    **dict.fromkeys(_LISTS, ((list,), "a list of schemas")),
    **dict.fromkeys(_SCHEMAS, ((dict, bool), "a schema")),
    **dict.fromkeys(_COUNTS, ((int, float), f"a whole number from 0 to {MAX_COUNT:,}")),
    **dict.fromkeys(BOUNDS, ((int, float, bool), "a number")),
    "items": ((dict, bool, list), "a schema"),
    "multipleOf": ((int, float), "a number above 0"),
    "type": ((str, list), "a type, or a list of them"),
    "enum": ((list,), "a list of values"),
    "required": ((list,), f"a list of at most {MAX_PROPERTIES:,} names"),
    "uniqueItems": ((bool,), "true or false"),
    **dict.fromkeys(("pattern", "format", "$ref"), ((str,), "a text")),
}
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAX_EXACT = 2**53  # llguidance keeps numbers as doubles, and computes them of their digits and a power of ten
_MAX_BOUND_DIGITS = 10**15 - 1
_MAX_EXPONENT = 22
_MAX_REMAINDERS = 2_000  # each has a state of its own, which is tried with every token
_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|$)", re.DOTALL)


def checked(root: Any) -> dict[int, Any]:
    """Check a schema, as far as its parts are used, and return what references refer to.

    Args:
        root: The schema.

    Returns:
        What the `$ref` of a schema refers to, by the `id` of that schema.

    Raises:
        RequestError: names the first part that could not be enforced.
    """
    resource = _resource("#", root if isinstance(root, dict) else {})
    base = resource.id() or ""
    resolver = Registry[Any]().with_resource(base, resource).resolver(base)
    targets, edges, seen = dict[int, Any](), dict[int, set[int]](), set[int]()
    waiting = [("#", root, resolver, 0)]
    while waiting:
        at, schema, resolver, depth = waiting.pop()
        if isinstance(schema, bool) or id(schema) in seen:
            continue
        if not isinstance(schema, dict):
            raise cannot_be_enforced(at, f"{str(schema)[:40]!r} in place of a schema")
        if depth > MAX_SCHEMA_DEPTH:
            raise cannot_be_enforced(at, f"nesting deeper than {MAX_SCHEMA_DEPTH}")
        seen.add(id(schema))
        if len(seen) > MAX_SCHEMA_NODES:
            raise cannot_be_enforced("#", f"more than {MAX_SCHEMA_NODES:,} parts")
        if "$id" in schema and schema is not root:
            resolver = resolver.in_subresource(_resource(at, schema))
        _check_keywords(at, schema)
        for keyword, place, child in children(schema):
            waiting.append((f"{at}/{place}", child, resolver, depth + 1))
            if keyword in IN_PLACE:
                edges.setdefault(id(schema), set()).add(id(child))
        if "$ref" in schema:
            try:
                resolved = resolver.lookup(schema["$ref"])
            except (Unresolvable, ValueError, TypeError, AttributeError):  # the last of names that are no texts
                what = f"$ref to {schema['$ref'][:80]!r}: it has to name a part of the schema itself"
                raise cannot_be_enforced(at, what) from None
            targets[id(schema)] = resolved.contents
            edges.setdefault(id(schema), set()).add(id(resolved.contents))
            waiting.append((schema["$ref"], resolved.contents, resolved.resolver, 0))
    try:
        TopologicalSorter(edges).prepare()
    except CycleError:
        raise cannot_be_enforced("#", "a $ref that leads back to itself") from None
    return targets


def is_note(keyword: str) -> bool:
    """Return whether no text can offend against a keyword: it describes, or is an extension, `x-...`, of some tool."""
    return keyword in _NOTES or keyword.startswith("x-")


def _resource(at: str, schema: dict[str, Any]) -> Resource[Any]:
    """Return a schema as what references within it are relative to."""
    try:
        resource: Resource[Any] = Resource.from_contents(schema, DRAFT202012)
        resource.id()
    except AttributeError:
        raise cannot_be_enforced(at, "$id, id or $schema that is no text", expected="a text") from None
    return resource


def children(schema: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the schemas in a schema: of which keyword, at which place, and the schema itself."""
    for keyword, value in schema.items():
        if keyword in _MAPS:
            for name, child in value.items():
                if not isinstance(child, list):  # of `dependencies`
                    yield keyword, f"{keyword}/{name}", child
        elif keyword in _LISTS and isinstance(value, list):
            for index, child in enumerate(value):
                yield keyword, f"{keyword}/{index}", child
        elif keyword in _SCHEMAS:
            yield keyword, keyword, value


def _check_keywords(at: str, schema: dict[str, Any]) -> None:
    for keyword, value in schema.items():
        if is_note(keyword):
            continue
        if keyword == "const":
            check_values(at, [value])
            continue
        if keyword not in _KINDS:
            raise cannot_be_enforced(at, keyword)
        kinds, expected = _KINDS[keyword]
        is_right = type(value) in kinds
        if keyword in ("anyOf", "oneOf", "enum"):
            is_right = is_right and bool(value)
        if keyword in ("required", "dependentRequired"):
            names = [value] if keyword == "required" else [*value.values()] if is_right else []
            is_right = is_right and all(
                isinstance(each, list) and all(isinstance(name, str) for name in each) for each in names
            )
        if keyword in (*_MAPS, "required"):
            is_right = is_right and len(value) <= MAX_PROPERTIES
        if keyword in _COUNTS:
            is_right = is_right and value in range(MAX_COUNT + 1)
        if not is_right:
            raise cannot_be_enforced(at, f"{keyword} {str(value)[:40]!r}", expected=expected)
        if keyword in ("required", "properties", "patternProperties", "pattern"):
            for text in [value] if isinstance(value, str) else value:
                _check_characters(at, text)
        match keyword:
            case "type":
                _check_types(at, value)
            case "enum":
                check_values(at, value)
            case "multipleOf" if not 0 < step_of(value)[0] <= _MAX_REMAINDERS:
                what = f"multipleOf {str(value)[:40]}, not above 0 or of more than {_MAX_REMAINDERS:,} remainders"
                raise cannot_be_enforced(at, what)
            case "pattern" | "patternProperties":
                try:
                    _ = [pattern_of(pattern) for pattern in ([value] if keyword == "pattern" else value)]
                except ValueError as error:
                    raise cannot_be_enforced(at, str(error)) from None
            case _ if keyword in BOUNDS and not isinstance(value, bool):
                _check_number(at, value, _MAX_EXACT if isinstance(value, int) else _MAX_BOUND_DIGITS)


def _check_characters(at: str, text: str) -> None:
    if half := re.search("[\ud800-\udfff]", text):
        raise cannot_be_enforced(at, f"the character \\u{ord(half[0]):x}, which is half of one")


def _check_types(at: str, value: str | list[Any]) -> None:
    for name in [value] if isinstance(value, str) else value:
        if name not in TYPES:
            raise cannot_be_enforced(at, f"the type {name!r}", expected=f"one of {', '.join(sorted(TYPES))}")


def check_values(at: str, values: list[Any]) -> None:
    """Check that a grammar can write certain values.

    Raises:
        RequestError: names the first that it cannot.
    """
    for value in values:
        match value:
            case bool() | None:
                continue
            case str():
                if re.search(r"[\x00-\x07\x0b\x0e-\x1f\x7f]", value):
                    raise cannot_be_enforced(at, f"the value {value[:40]!r}, with a control character")
                _check_characters(at, value)
            case int() | float():
                _check_number(at, value, _MAX_EXACT)
            case dict():
                check_values(at, [*value, *value.values()])
            case list():
                check_values(at, value)


def _check_number(at: str, value: float, most: int) -> None:
    _, digits, exponent = Decimal(str(value)).as_tuple()
    is_kept = isinstance(exponent, int) and abs(exponent) <= _MAX_EXPONENT and abs(value) <= _MAX_EXACT
    if not is_kept or int("".join(map(str, digits))) > most:
        raise cannot_be_enforced(at, f"the number {str(value)[:40]}, whose digits llguidance does not keep")


def step_of(value: float) -> tuple[int, int]:
    """Return `multipleOf` as a whole number and by which power of ten it is divided."""
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    if not isinstance(exponent, int):
        return 0, 0  # infinite
    whole = int("".join(map(str, digits)))
    return (whole * 10**exponent, 0) if exponent > 0 else (whole, -exponent)


def pattern_of(pattern: str) -> str:
    """Return a pattern as llguidance reads it: a bracket, `&` and `~` mean nothing within brackets of ECMAScript.

    Raises:
        ValueError: it would be read in another way.
    """

    def escaped(found: re.Match[str]) -> str:
        text = found[0]
        if text[0] == "\\":
            return text
        if "--" in text:
            raise ValueError(f"the pattern {text[:40]!r}, of which -- would be read as a difference of characters")
        return text[0] + re.sub(r"\\.|[&~\[]", lambda part: part[0] if len(part[0]) > 1 else rf"\{part[0]}", text[1:])

    return _CLASS.sub(escaped, pattern)


def cannot_be_enforced(
    at: str, what: str, *, expected: str = "keywords that a grammar can hold a text to"
) -> RequestError:
    """Return the error of a schema with a part that no grammar here holds a text to."""
    return RequestError(
        "structured_outputs: this json_schema cannot be enforced",
        got=f"{what}, at {at[:200]}",
        expected=expected,
        hint=f"{page('structured_outputs')} lists them; take the part out and check it on the answer instead",
        param="structured_outputs",
    )
