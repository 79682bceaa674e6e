"""Every keyword of a schema, compiled and tried: a text that the schema does not accept is never allowed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from grammar_texts import allows, allows_text, compiled, compiled_within_text

from raypp.errors import RequestError
from raypp.grammar.compiled_grammar import LlguidanceGrammar, XgrammarGrammar
from raypp.grammar.schema_check import enforceable

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
    ({"properties": {"b": STR}, "patternProperties": {"^[^b]$": INT}}, [{"b": "x", "a": 1}], [{"b": 1}, {"a": "x"}]),
    ({"patternProperties": {"^[-b]$": INT}}, [{"-": 1, "b": 1}], [{"b": "x"}]),
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


@pytest.mark.parametrize("keyword", ["additionalProperties", "unevaluatedProperties"])
@pytest.mark.parametrize("others", [{}, True, INT], ids=json.dumps)
@pytest.mark.parametrize("grammar_of", [compiled, compiled_within_text])
def test_further_properties_have_none_of_the_names_that_the_schema_has_however_written(
    keyword: str, others: Any, grammar_of: Any
) -> None:
    names = {"a": INT, "ab": INT, "b": STR, "\u00e9": INT, 'q"': INT, "": INT}
    grammar = grammar_of({"type": ["object", "null"], "properties": names, "required": ["a"], keyword: others})
    for text in ('{"a": 1}', '{"a": 1, "aa": 2, "aba": 3}', '{"a": 1, "b": "x", "c": 2, "\u00e8": 3}', "null"):
        assert allows_text(grammar, text), text
    written = ("a", "\\u0061", "ab", "\\u0061b", "\\u0062", "\u00e9", "\\u00e9", 'q\\"', "q\\u0022", "")
    for text in (*(f'{{"a": 1, "c": 2, "{name}": null}}' for name in written), '{"c": 1}', '{"a": "x"}'):
        assert not allows_text(grammar, text), text
    assert allows_text(grammar, '{"a": 1, "c": "x"}') == (others != INT)


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
    (AB | {"additionalProperties": True, "unevaluatedProperties": INT}, "properties beside both"),
    ({"properties": {"a" * 101: INT}, "additionalProperties": {}}, "the property 'aaa.*of more than 100 characters"),
    ({"patternProperties": {"^x": INT}, "additionalProperties": {}}, "patternProperties beside others"),
    ({"patternProperties": {"^>": INT}}, "cannot be asked for"),
    ({"type": "integer", "multipleOf": 1025}, "multipleOf of more than 1024"),
    ({"$ref": "#"}, "leads back to itself"),
    ({"type": "integer", "enum": ["a"]}, "the value 'a' beside type"),
    ({"minItems": 1, "maxProperties": 1}, "without a type"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_xgrammar_cannot_be_held_to_is_refused_with_its_place(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        enforceable(schema)


BRANCH = {"properties": {"next": {"$ref": "#/$defs/branch"}, "v": INT}, "type": "object"}
DISTINCT = {"not": {"const": "a"}}  # nothing that xgrammar takes

# As above, of what is beyond xgrammar; the invalid ones may be texts.
BEYOND: list[tuple[Any, list[Any], list[Any]]] = [
    ({"minimum": 3}, [3, "a", None, [1]], [2, -1.5]),
    ({"type": "number", "multipleOf": 0.25, "exclusiveMaximum": 1}, [0.75, -2], [0.3, 1]),
    ({"type": "integer", "minimum": 2.5, "exclusiveMaximum": 1e1}, [3, 9], [2, 10]),
    ({"type": "number", "exclusiveMinimum": 1e-3, "maximum": 1.5e3} | DISTINCT, [0.0011, 1500], [0.001, 1500.1]),
    ({"type": "integer", "multipleOf": 1500}, [3000, 0], [1, 1501]),
    ({"type": "string", "pattern": "^a", "maxLength": 3}, ["a", 'a\n"'], ["abcd", "b"]),
    ({"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b$"}]}, ["ab", "ba\\b"], ["a", "b"]),
    ({"type": ["string", "null"]} | DISTINCT, ["", "b", "aa", None], ["a", 1]),
    ({"type": "integer", "not": {"enum": [2, 3]}}, [1, 4], [2, 3]),
    ({"type": "string", "not": {"maxLength": 2}}, ["abc"], ["ab"]),
    ({"not": {"type": ["object", "integer"]}, "type": ["object", "string"]}, ["x"], [{}, 1]),
    (
        {"allOf": [AB | {"required": ["a"]}, {"properties": {"c": INT}}]},
        [{"a": 1, "c": 2}],
        [{"c": 2}, {"a": 1, "c": "x"}],
    ),
    ({"required": ['é"\n'], "type": "object"}, [{'é"\n': 1}, {'é"\n': 1, "a": 2}], [{}, {"a": 1}]),
    (AB | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": "x"}], [{}, {"a": 1, "b": "x"}]),
    ({"oneOf": [INT, {"type": "number", "minimum": 2}]}, [1], [2, 1.5]),
    (
        AB | {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
        [{}, {"a": 2}, {"a": 1, "b": ""}],
        [{"a": 1}],
    ),
    (AB | {"dependentRequired": {"a": ["b"]}}, [{}, {"b": ""}, {"a": 1, "b": ""}], [{"a": 1}]),
    (AB | {"dependentSchemas": {"a": {"properties": {"b": False}}}}, [{"a": 1}, {"b": ""}], [{"a": 1, "b": ""}]),
    (AB | {"propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
    ({"propertyNames": {"not": {"const": "ab"}}}, [{"a": 1}], [{"ab": 1}, '{"\\u0061b": 1}']),
    (
        {"type": "object", "patternProperties": {"^x": INT}, "additionalProperties": {"type": "null"}},
        [{"x1": 1, "y": None, '"': None}],
        [{"x": None}, {"y": 1}, '{"\\u0078": null}', {'x"': None}],
    ),
    (
        {"allOf": [AB, {"properties": {"c": INT}}], "unevaluatedProperties": False, "type": "object"},
        [{"a": 1, "c": 1}],
        [{"a": 1, "d": 1}],
    ),
    ({"prefixItems": [INT], "items": STR, "contains": {"const": "x"}}, [[1, "x"], [1, "x", "y"]], [[], [1], [1, "y"]]),
    ({"items": INT, "contains": {"const": 1}, "maxContains": 2}, [[1], [1, 1, 2]], [[1, 1, 1], [2], []]),
    ({"allOf": [{"prefixItems": [INT]}], "unevaluatedItems": STR}, [[1, "x"], []], [["x"], [1, 2]]),
    ({"enum": [[9], []], "unevaluatedItems": False}, [[]], [[9]]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    ({"x-guidance": {"lenient": True}, "not": {"type": "string", "x-of": "a tool"}}, [1, None], ["a"]),
    (
        {"$defs": {"branch": {"allOf": [BRANCH, {"required": ["v"]}]}}, "$ref": "#/$defs/branch", "title": "a tree"},
        [{"v": 1}, {"next": {"next": {"v": 1}, "v": 2}, "v": 3}],
        [{}, {"next": {}, "v": 1}],
    ),
    ({"$id": "http://a/b", "items": {"$ref": "c"}, "$defs": {"c": {"$id": "c", "type": "integer"}}}, [[1]], [["a"]]),
    (
        {"type": "array", "items": {"$anchor": "here", "enum": [1, {"a": [None]}], **DISTINCT}},
        [[1, {"a": [None]}]],
        [[2]],
    ),
]


@pytest.mark.parametrize("case", BEYOND, ids=lambda case: json.dumps(case[0])[:80])
def test_what_is_beyond_xgrammar_is_held_to_by_llguidance(case: tuple[Any, list[Any], list[Any]]) -> None:
    schema, valid, invalid = case
    grammar, validator = compiled(schema), jsonschema.Draft202012Validator(schema)
    assert isinstance(grammar, LlguidanceGrammar)
    for value in valid:
        assert validator.is_valid(value), value
        assert allows(grammar, value), value
    for value in invalid:
        is_text = isinstance(value, str) and value[:1] == "{"
        assert not validator.is_valid(json.loads(value) if is_text else value), value
        assert not (allows_text(grammar, value) if is_text else allows(grammar, value)), value


REFUSED_BY_BOTH: list[tuple[Any, str]] = [
    ({"items": {"uniqueItems": True}}, "uniqueItems, at #/items"),
    ({"type": "object", "propertys": {}}, "propertys, at #"),
    ({"type": "string", "not": {"pattern": "a"}}, "pattern within not"),
    ({"type": "object", "minProperties": 2}, "minProperties counting"),
    ({"required": ["c"], "propertyNames": {"enum": ["a"]}, "const": {"c": 1}}, "no value is accepted"),
    ({"patternProperties": {"b$": STR}, "propertyNames": {"enum": ["a"]}}, "propertyNames beside patternProperties"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "no value is accepted"),
    (
        {"allOf": [{"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, {}]},
        "no value is accepted",
    ),
    ({"const": "a\u0000", "not": {"const": "b"}}, "control character"),
    ({"type": "integer", "maximum": 2**60, "not": {"const": 1}}, "does not hold exactly"),
    ({"type": "integer", "multipleOf": 123456789}, "remainders"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5, "not": {"const": 0.25}}, "left out"),
    ({"type": "string", "pattern": "(?=a)b"}, "assert is not supported"),
    ({"$ref": "http://example.com/x", "maxLength": 3}, "part of the schema itself"),
    ({"$ref": "#"}, "leads back to itself"),
    ({"anyOf": [{"$ref": "#"}, {"type": "null"}], "minimum": 1}, "leads back to itself"),
    ({"not": 3}, "in place of a schema"),
    ({"type": "string", "minLength": "a"}, "minLength 'a'"),
    (json.loads('{"not":' * 100 + "true" + "}" * 100), "nesting deeper"),
    ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": INT}} for j in range(6)]} for i in range(9)]}, "alternatives"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED_BY_BOTH, ids=[said[:40] for _, said in REFUSED_BY_BOTH])
def test_what_neither_can_be_held_to_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        compiled(schema)


def test_xgrammar_is_asked_first() -> None:
    assert isinstance(compiled(AB), XgrammarGrammar)
