"""A JSON schema made enforceable: what its grammar would not hold a text to is refused, the rest said in its words.

xgrammar passes over what it does not know, with a line on stderr; the text would then be held to less than was asked
for. So a schema with such a part is refused by name.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterator
from fractions import Fraction
from itertools import product
from typing import Any

from raypp.errors import RequestError, page
from raypp.grammar.json_pattern import (
    UnsupportedPatternError,
    json_pattern,
    length_pattern,
    name_pattern,
    other_names_pattern,
)
from raypp.grammar.schema_values import are_disjoint, followed, is_of_type, is_within, resolve

MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 20_000

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable", "strict"}
    | {"$schema", "$id", "$comment", "$defs", "definitions", "discriminator", "format"}
    | {"contentEncoding", "contentMediaType", "contentSchema"}
    | {"enumNames", "enumDescriptions", "example", "externalDocs", "markdownDescription", "propertyOrdering", "xml"}
)
_NUMBER = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
_BY_TYPE = {
    "object": frozenset(
        {"properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"}
        | {"propertyNames", "minProperties", "maxProperties"}
    ),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
    "string": frozenset(["minLength", "maxLength", "pattern"]),
    "integer": _NUMBER | {"multipleOf"},
    "number": _NUMBER,
    "boolean": frozenset(),
    "null": frozenset(),
}
_OTHERS = ("additionalProperties", "unevaluatedProperties")
_NAMING = _BY_TYPE["object"] - {"minProperties", "maxProperties", "required"}
_CHOICES = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
"""One of these decides alone; xgrammar does not look at what stands beside it."""
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")

_MAX_MULTIPLES = 256
"""Multiples between two bounds that are counted up."""

_MAX_STEP = 1024
"""Of multiples; xgrammar passes over larger ones."""

_MAX_NAME_LENGTH = 100
"""Of properties that a pattern for all other names leaves out: it is nested as deep as they are long."""

_MAX_PATTERN_LENGTH = 128
"""Longer strings are counted by xgrammar itself: its regular expressions become slow to follow."""


def enforceable(schema: Any) -> Any:
    """Return a schema that accepts nothing else than the given one, and that xgrammar follows to the letter.

    Raises:
        RequestError: names the first part that could not be enforced.
    """
    schema = copy.deepcopy(schema)
    for count, (path, node, depth) in enumerate(_nodes(schema)):
        if depth > MAX_SCHEMA_DEPTH:
            raise cannot_be_enforced(path, f"nesting deeper than {MAX_SCHEMA_DEPTH}")
        if count > MAX_SCHEMA_NODES:
            raise cannot_be_enforced("the schema", f"more than {MAX_SCHEMA_NODES:,} parts")
        if node is True:
            continue
        if not isinstance(node, dict):
            raise cannot_be_enforced(path, f"{str(node)[:40]!r} in place of a schema")
        _check_node(path, node, schema)
        _rewrite_strings(path, node)
        _rewrite_others(node)
    return schema


def is_note(keyword: str) -> bool:
    """Return whether no text can offend against a keyword: it describes, or is an extension, `x-...`, of some tool.

    `format` is a note by the standard, too; xgrammar follows most of them.
    """
    return keyword in _NOTES or keyword.startswith("x-")


def _check_node(path: str, node: dict[str, Any], schema: Any) -> None:
    keywords = {keyword for keyword in node if not is_note(keyword)}
    for choice in _CHOICES:
        if choice in node:
            if beside := keywords - {choice, "type"}:
                raise cannot_be_enforced(path, f"{sorted(beside)[0]} beside {choice}")
            _check_choice(path, choice, node[choice], schema)
            _check_values(path, node)
            _check_type_beside(path, choice, node, schema)
            return
    types = _types(path, node, keywords)
    if unknown := sorted(keywords - {"type"} - frozenset().union(*(_BY_TYPE[name] for name in types))):
        raise cannot_be_enforced(path, unknown[0])
    if len(types) == 1:
        node["type"] = types[0]  # xgrammar looks at some keywords only if a type is beside them
    for name in node.keys() & set(_COUNTS):
        if isinstance(node[name], float) and node[name].is_integer():
            node[name] = int(node[name])
    # A schema that says nothing of items and names means any; xgrammar takes it for none as soon as they are counted.
    if "array" in types and node.keys() & {"minItems", "maxItems"} and not node.keys() & {"items", "prefixItems"}:
        node["items"] = True
    if "object" in types and node.keys() & {"minProperties", "maxProperties"} and not node.keys() & _NAMING:
        node["additionalProperties"] = True
    _check_object(path, node)
    if "multipleOf" in node:
        _rewrite_multiples(path, node, types)


def _types(path: str, node: dict[str, Any], keywords: Collection[str]) -> list[str]:
    if "type" not in node:
        # Without a type the keywords have to say which it is.
        for name in ("object", "array"):
            if keywords and _BY_TYPE[name].issuperset(keywords):
                return [name]
        if keywords:
            raise cannot_be_enforced(path, f"{sorted(keywords)[0]} without a type")
        return []
    types = node["type"] if isinstance(node["type"], list) else [node["type"]]
    for name in types:
        if not isinstance(name, str) or name not in _BY_TYPE:
            raise cannot_be_enforced(path, f"the type {name!r}", expected=f"one of {', '.join(sorted(_BY_TYPE))}")
    return types


def _check_object(path: str, node: dict[str, Any]) -> None:
    properties, patterns = node.get("properties", {}), node.get("patternProperties", {})
    has_others = any(node.get(name, False) is not False for name in _OTHERS)
    is_open = has_others or "patternProperties" in node or "propertyNames" in node
    missing = [name for name in node.get("required", ()) if name not in properties]
    if missing and not is_open:
        raise cannot_be_enforced(path, f"{missing[0]!r}, required and not among the properties")
    if missing or (is_open and "minProperties" in node):
        raise cannot_be_enforced(path, "required or minProperties counting properties without a name in the schema")
    # A property has to keep to everything that is said of its name, and xgrammar follows one of these at a time.
    if "propertyNames" in node:
        for name in ("properties", "patternProperties"):
            if node.get(name):
                raise cannot_be_enforced(path, f"{name} beside propertyNames")
    if properties and has_others and all(name in node for name in _OTHERS):
        raise cannot_be_enforced(path, "properties beside both additionalProperties and unevaluatedProperties")
    if properties and has_others and max(map(len, properties)) > _MAX_NAME_LENGTH:
        longest = max(properties, key=len)
        raise cannot_be_enforced(
            path, f"the property {longest[:40]!r}..., of more than {_MAX_NAME_LENGTH} characters, beside others"
        )
    if patterns and has_others:
        raise cannot_be_enforced(path, "patternProperties beside others that may have any name")
    if len(patterns) > 1 and any(schema != next(iter(patterns.values())) for schema in patterns.values()):
        raise cannot_be_enforced(path, "several patternProperties, whose patterns may match the same name")
    for pattern, name in product(patterns, properties):
        if not _is_unmatched(pattern, name):
            raise cannot_be_enforced(path, f"the property {name[:40]!r}, whose name one of patternProperties matches")


def _is_unmatched(pattern: str, name: str) -> bool:
    """Return whether it is plain that a pattern is not found in a name."""
    try:
        return name.isascii() and re.search(pattern, name) is None
    except (re.error, RecursionError, OverflowError):
        return False


def _rewrite_multiples(path: str, node: dict[str, Any], types: list[str]) -> None:
    """Say what is asked of integers in xgrammar's words: a whole number to divide them by, or the multiples."""
    if "number" in types:
        raise cannot_be_enforced(path, "multipleOf of numbers that need not be integers")
    given = node["multipleOf"]
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise cannot_be_enforced(path, f"multipleOf {str(given)[:40]!r}, which is no number above 0")
    # An integer n is a multiple of p / q in lowest terms if n * q is one of p, so if n is one of p.
    step = Fraction(str(given)).numerator
    bounds = node.keys() & _NUMBER
    if step == 1:
        del node["multipleOf"]
    elif not bounds and step <= _MAX_STEP:
        node["multipleOf"] = step
    else:
        multiples = _multiples(node, step)
        if multiples is None or types != ["integer"]:
            beside = f"multipleOf beside {sorted(bounds)[0]}" if bounds else f"multipleOf of more than {_MAX_STEP}"
            raise cannot_be_enforced(path, beside)
        if not multiples:
            raise cannot_be_enforced(path, "multipleOf with bounds that no multiple is within")
        for name in bounds | {"multipleOf"}:
            del node[name]
        node["enum"] = multiples


def _multiples(node: dict[str, Any], step: int) -> list[int] | None:
    """Return the multiples within a number's bounds; None if there are many."""
    least = [math.ceil(node[name]) for name in ("minimum",) if name in node]
    least += [math.floor(node[name]) + 1 for name in ("exclusiveMinimum",) if name in node]
    most = [math.floor(node[name]) for name in ("maximum",) if name in node]
    most += [math.ceil(node[name]) - 1 for name in ("exclusiveMaximum",) if name in node]
    if not least or not most or min(most) - max(least) > _MAX_MULTIPLES * step:
        return None
    return list(range(-(-max(least) // step) * step, min(most) + 1, step))


def _check_type_beside(path: str, choice: str, node: dict[str, Any], schema: Any) -> None:
    """Check that a type beside other schemas adds nothing to what these say."""
    if "type" not in node or choice in ("const", "enum"):
        return
    types = frozenset(_types(path, node, frozenset()))
    branches = [node[choice]] if choice == "$ref" else node[choice]
    for branch in branches:
        branch = {"$ref": branch} if choice == "$ref" else branch
        if not is_within(branch, types, schema):
            raise cannot_be_enforced(
                path, f"type {str(node['type'])[:80]} beside {choice} of schemas that accept other types"
            )


def _check_choice(path: str, choice: str, value: Any, schema: Any) -> None:
    if choice == "$ref" and resolve(value, schema) is None:
        raise cannot_be_enforced(path, f"$ref to {str(value)[:80]!r}: it has to name a part of the schema itself")
    if choice == "$ref" and isinstance(end := followed({"$ref": value}, schema), dict) and "$ref" in end:
        raise cannot_be_enforced(path, "a $ref that leads back to itself")
    if choice == "allOf" and (not isinstance(value, list) or len(value) != 1):
        raise cannot_be_enforced(path, "allOf of several schemas")
    if choice in ("anyOf", "oneOf", "enum") and (not isinstance(value, list) or not value):
        raise cannot_be_enforced(path, f"{choice} without any entry")
    if choice == "oneOf" and not are_disjoint(value, schema):
        raise cannot_be_enforced(path, "oneOf whose schemas may accept the same value; anyOf, if that is meant")


def _check_values(path: str, node: dict[str, Any]) -> None:
    """Check that a type beside values is theirs."""
    values = node.get("enum", [node["const"]] if "const" in node else [])
    if "type" not in node or not values:
        return
    types = _types(path, node, frozenset())
    for value in values:
        if not any(is_of_type(value, name) for name in types):
            raise cannot_be_enforced(path, f"the value {str(value)[:40]!r} beside type {node['type']!r}")


def _rewrite_strings(path: str, node: dict[str, Any]) -> None:
    """Say what is asked of a string's text by a pattern for the raw JSON."""
    lengths = node.keys() & {"minLength", "maxLength"}
    if "pattern" in node:
        if lengths:
            raise cannot_be_enforced(path, f"{sorted(lengths)[0]} beside pattern")
        try:
            node["pattern"] = json_pattern(str(node["pattern"]))
        except UnsupportedPatternError as error:
            raise cannot_be_enforced(path, f"a pattern with a part that cannot be followed ({error})") from None
        node.pop("format", None)
    elif lengths:
        least, most = node.get("minLength", 0), node.get("maxLength")
        node.pop("format", None)
        if max(least, most or 0) <= _MAX_PATTERN_LENGTH:
            for name in lengths:
                del node[name]
            node["pattern"] = length_pattern(least, most)
    if isinstance(names := node.get("patternProperties"), dict):
        node["patternProperties"] = {_key_pattern(path, name): child for name, child in names.items()}


def _rewrite_others(node: dict[str, Any]) -> None:
    """Say by a pattern what further properties may be called.

    Otherwise the name of a property may be written with escapes, which xgrammar takes for another name.
    """
    names = node.get("properties")
    for name in _OTHERS:
        if names and node.get(name, False) is not False:
            node["patternProperties"] = {other_names_pattern(names): node.pop(name)}


def _key_pattern(path: str, pattern: str) -> str:
    try:
        return name_pattern(pattern)
    except UnsupportedPatternError as error:
        raise cannot_be_enforced(path, f"a pattern with a part that cannot be followed ({error})") from None


def _nodes(schema: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield every schema in a schema, with its path and its depth."""
    open_nodes: list[tuple[str, Any, int]] = [("#", schema, 0)]
    while open_nodes:
        path, node, depth = open_nodes.pop()
        children = [(f"{path}/{name}", child, depth + 1) for name, child in _children(node)]
        yield path, node, depth
        open_nodes += children


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        return
    for name in ("$defs", "definitions", "properties", "patternProperties"):
        if isinstance(node.get(name), dict):
            yield from ((f"{name}/{key}", child) for key, child in node[name].items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(node.get(name), list):
            yield from ((f"{name}/{index}", child) for index, child in enumerate(node[name]))
    for name in ("items", "additionalProperties", "unevaluatedProperties"):
        if node.get(name, False) is not False:
            yield name, node[name]
    if "propertyNames" in node:
        if isinstance(node["propertyNames"], dict) and not node["propertyNames"].keys() & {"type", *_CHOICES}:
            node["propertyNames"]["type"] = "string"  # names are
        yield "propertyNames", node["propertyNames"]


def cannot_be_enforced(
    path: str, what: str, *, expected: str = "keywords that a grammar can hold a text to"
) -> RequestError:
    """Return the error of a schema with a part that no grammar here holds a text to."""
    return RequestError(
        "structured_outputs: this json_schema cannot be enforced",
        got=f"{what}, at {path[:200]}",
        expected=expected,
        hint=f"{page('structured_outputs')} lists them; take the part out and check it on the answer instead",
        param="structured_outputs",
    )
