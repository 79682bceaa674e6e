"""Every keyword of a schema, compiled and tried: a text that the schema does not accept is never allowed."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
import xgrammar

from raypp.errors import RequestError
from raypp.grammar.compile import compile_constraint
from raypp.grammar.vocabulary import Vocabulary
from raypp.structured_outputs import source_of

CHARS = [chr(code) for code in range(0x20, 0x7F)]
END = len(CHARS)


@cache
def vocabulary() -> Vocabulary:
    info = xgrammar.TokenizerInfo([*CHARS, "<end>"], vocab_size=END + 1, stop_token_ids=[END])
    return Vocabulary(info, info, info)


def compiled(schema: dict[str, Any]) -> Any:
    return compile_constraint(source_of({"json_schema": json.dumps(schema)}), vocabulary(), 1)


def allows(grammar: Any, value: Any) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    if not matcher.accept_string(json.dumps(value)):
        return False
    mask = xgrammar.allocate_token_bitmask(1, END + 1)
    matcher.fill_next_token_bitmask(mask)
    return bool(int(mask[0, END // 32]) >> END % 32 & 1)


INT, STR = {"type": "integer"}, {"type": "string"}
AB = {"properties": {"a": INT, "b": STR}}
OF_A = {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}
OF_B = {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]}

# A schema; values that it accepts and its grammar allows; values that it does not accept.
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "integer"}, [0, -7], [1.5, "1", None]),
    ({"type": ["integer", "null"]}, [3, None], ["a", 1.5]),
    ({"enum": [1, "a", None]}, [1, "a", None], [2, "b"]),
    ({"const": {"a": 1}}, [], [{"a": 2}, {}]),
    ({"anyOf": [INT, {"type": "null"}]}, [1, None], ["a"]),
    ({"type": "integer", "anyOf": [{"const": 1}, {"type": "integer", "minimum": 5}]}, [1, 5], [2, 4]),
    ({"allOf": [STR]}, ["a"], [1]),
    ({"oneOf": [INT, STR]}, [1, "a"], [None]),
    ({"oneOf": [OF_A, OF_B]}, [{"kind": "a"}, {"kind": "b"}], [{}, {"kind": "c"}]),
    ({"$ref": "#/$defs/x", "type": "string", "$defs": {"x": {"enum": ["a", "b"]}}}, ["a"], ["c", 1]),
    (AB, [{}, {"a": 1, "b": "x"}], [{"a": "x"}, {"b": 1}]),
    (AB | {"type": "object", "required": ["b"]}, [{"b": "x"}], [{}, {"a": 1}]),
    (AB | {"additionalProperties": False}, [{"a": 1}], [{"c": 1}]),
    (AB | {"additionalProperties": INT}, [{"a": 1, "c": 1}], [{"a": "x"}, {"c": "x"}, {"c": 1, "b": 2}]),
    (AB | {"unevaluatedProperties": INT, "type": "object"}, [{"c": 1}], [{"c": "x"}, {"b": 1}]),
    (AB | {"minProperties": 1}, [{"a": 1}], [{}]),
    (AB | {"minProperties": 2.0, "type": "object"}, [{"a": 1, "b": "x"}], [{}, {"a": 1}]),
    ({"maxProperties": 1}, [{}, {"x": 1}], [{"x": 1, "y": 2}]),
    ({"maxProperties": 0}, [{}], [{"x": 1}]),
    ({"patternProperties": {"^x": INT}}, [{}, {"x1": 1}], [{"x1": "a"}]),
    ({"patternProperties": {"^x": INT}} | AB, [{"a": 1, "x1": 1}], [{"x1": "a"}, {"a": "x"}]),
    ({"patternProperties": {"^x": INT, "y$": INT}}, [{"xy": 1, "y": 2}], [{"y": "a"}]),
    ({"propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    ({"propertyNames": {"pattern": "^a+$"}, "maxProperties": 1}, [{"aa": 1}], [{"b": 1}, {"a": 1, "aa": 1}]),
    ({"propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}], [{"c": 1}]),
    ({"items": INT}, [[], [1, 2]], [["a"], [1, "a"]]),
    ({"type": "array", "prefixItems": [INT, STR]}, [[1, "a"]], [["a"], [1, 2]]),
    ({"type": "array", "prefixItems": [INT], "items": STR}, [[1, "a"]], [["a"], [1, 2]]),
    ({"minItems": 1}, [[1], [1, "a"]], [[]]),
    ({"minItems": 2.0, "type": "array", "items": INT}, [[1, 2]], [[], [1]]),
    ({"maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    ({"type": "string", "minLength": 2}, ["ab"], ["a", ""]),
    ({"type": "string", "maxLength": 2.0}, ["", "ab"], ["abc"]),
    ({"type": "string", "minLength": 200}, ["a" * 200], ["a" * 199]),
    ({"type": "string", "pattern": "^a.$"}, ["ab"], ["a", "ba"]),
    ({"type": ["string", "integer"], "pattern": "^a", "minimum": 3}, ["ab", 3], ["b", 2]),
    ({"type": "integer", "minimum": -2, "exclusiveMaximum": 5}, [-2, 4], [-3, 5]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, [0.1, 1.5], [0, -1, 1.6, 2]),
    ({"type": "integer", "multipleOf": 3}, [0, 3, -6], [1, -2]),
    ({"type": "integer", "multipleOf": 1.5}, [0, 3, -6], [1, 4]),
    ({"type": "integer", "multipleOf": 0.1}, [0, 1, 7], []),
    ({"type": "integer", "multipleOf": 3, "minimum": -4, "exclusiveMaximum": 6}, [-3, 3], [-6, 1, 6]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case[0])[:80])
def test_nothing_is_allowed_that_the_schema_does_not_accept(case: tuple[dict[str, Any], list[Any], list[Any]]) -> None:
    schema, valid, invalid = case
    grammar, validator = compiled(schema), jsonschema.Draft202012Validator(schema)
    for value in valid:
        assert validator.is_valid(value), value
        assert allows(grammar, value), value
    for value in invalid:
        assert not validator.is_valid(value), value
        assert not allows(grammar, value), value


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"x": {"type": "number", "multipleOf": 0.5}}}, "multipleOf, at #/properties/x"),
    ({"type": ["integer", "number"], "multipleOf": 2}, "multipleOf of numbers"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf '0'"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, "multipleOf beside minimum"),
    ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 5}, "that no multiple is within"),
    ({"items": {"oneOf": [INT, {"type": "number"}]}}, "oneOf whose schemas.*, at #/items"),
    ({"oneOf": [{"properties": {"a": INT}}, STR]}, "oneOf whose schemas"),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]}, "oneOf whose schemas"),
    ({"type": "object", "oneOf": [OF_A, {"type": "null"}]}, "type object beside oneOf"),
    ({"type": "integer", "anyOf": [{"type": "number"}]}, "type integer beside anyOf"),
    ({"type": "string", "$ref": "#/$defs/x", "$defs": {"x": INT}}, "type string beside \\$ref"),
    (AB | {"propertyNames": {"maxLength": 2}}, "properties beside propertyNames"),
    ({"patternProperties": {"^x": INT}, "additionalProperties": True}, "patternProperties beside others"),
    ({"patternProperties": {"^x": INT, "y": STR}}, "several patternProperties"),
    (AB | {"patternProperties": {"^a": STR}}, "the property 'a', whose name"),
    ({"type": "object", "minProperties": 1}, "minProperties counting properties"),
    ({"minItems": 1, "maxProperties": 1}, "without a type"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        compiled(schema)
