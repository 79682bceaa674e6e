"""Every keyword of a schema, compiled and tried: a text that the schema does not accept is never allowed."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from grammar_texts import allows, allows_text, compiled, compiled_within_text, is_refused
from hypothesis import given, settings
from hypothesis import strategies as st
from structured_schemas import SCHEMAS

from raypp.errors import RequestError

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
    (
        {"properties": {name: {} for name in "abcd"}, "required": ["c"], "minProperties": 2, "maxProperties": 3},
        [{"a": 1, "c": 1}, {"c": 1, "d": 1}, {"a": 1, "b": 1, "c": 1}],
        [{"c": 1}, {"a": 1, "b": 1, "c": 1, "d": 1}, {"a": 1, "b": 1}],
    ),
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


BRANCH = {"properties": {"next": {"$ref": "#/$defs/branch"}, "v": INT}, "type": "object"}
DISTINCT = {"not": {"const": "a"}}

# As above, of several that are about the same value; the invalid ones may be texts.
TOGETHER: list[tuple[Any, list[Any], list[Any]]] = [
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
    (
        {"properties": {"a": INT, "bb": INT}, "propertyNames": {"maxLength": 1}, "additionalProperties": STR},
        [{"a": 1, "c": "x"}],
        [{"bb": 1}, {"c": 1}, {"cc": "x"}],
    ),
    ({"type": "object", "propertyNames": {"not": {"type": "string"}}}, [{}], [{"a": 1}, {"": 1}]),
    ({"type": "object", "propertyNames": {"not": {}}}, [{}], [{"a": 1}, {"": 1}]),
    ({"type": "object", "propertyNames": {"not": {"enum": [1, "b", ["c"]]}}}, [{"a": 1}, {"1": 1}], [{"b": 1}]),
    ({"type": "object", "propertyNames": {"not": {"type": "integer"}}}, [{"a": 1}], []),
    ({"type": "object", "propertyNames": {"enum": [1, None]}}, [{}], [{"": 1}, {"a": 1}]),
    ({"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"enum": ["a", "b"]}}}, [{"a": 1}], [{"c": 1}]),
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


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: json.dumps(case[0])[:80])
def test_schemas_of_one_value_are_all_kept_to(case: tuple[Any, list[Any], list[Any]]) -> None:
    schema, valid, invalid = case
    grammar, validator = compiled(schema), jsonschema.Draft202012Validator(schema)
    for value in valid:
        assert validator.is_valid(value), value
        assert allows(grammar, value), value
    for value in invalid:
        is_text = isinstance(value, str) and value[:1] == "{"
        assert not validator.is_valid(json.loads(value) if is_text else value), value
        assert not (allows_text(grammar, value) if is_text else allows(grammar, value)), value


PAIRS = {f"{i}": {"properties": {key: {"$ref": f"#/$defs/{i + 1}"} for key in "ab"}} for i in range(40)}

REFUSED: list[tuple[Any, str]] = [
    ({"items": {"uniqueItems": True}}, "uniqueItems, at #/items"),
    ({"type": "array", "contains": {"const": 5}}, "contains, at #"),
    ({"allOf": [{"prefixItems": [INT]}], "unevaluatedItems": STR}, "unevaluatedItems beside schemas of the same array"),
    ({"anyOf": [AB, {}], "unevaluatedProperties": False}, "unevaluatedProperties beside anyOf"),
    ({"$dynamicRef": "#x"}, "\\$dynamicRef, at #"),
    ({"type": "object", "propertys": {}}, "propertys, at #"),
    ({"type": "string", "nullable": True}, "nullable, at #"),
    ({"type": "objekt"}, "the type 'objekt'.*one of array, boolean, integer, null, number, object, string"),
    ({"type": "string", "not": {"pattern": "a"}}, "pattern within not"),
    ({"type": "array", "not": {"items": INT}}, "items within not"),
    ({"type": "object", "minProperties": 2}, "minProperties counting"),
    (AB | {"maxProperties": 1, "additionalProperties": INT}, "min/maxProperties only supported"),
    ({"required": ["c"], "propertyNames": {"enum": ["a"]}}, "required property 'c' is unsatisfiable"),
    ({"patternProperties": {"a": STR}, "propertyNames": {"pattern": "b"}}, "not disjoint"),
    ({"patternProperties": {"^x": INT, "y": STR}}, "not disjoint"),
    ({"propertyNames": {"allOf": []}}, "propertyNames with allOf"),
    ({"propertyNames": {"enum": ["a", "b"], "const": "a"}}, "propertyNames with const"),
    ({"propertyNames": {"$ref": "#/$defs/a", "maxLength": 1}, "$defs": {"a": STR}}, r"propertyNames with \$ref"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum .5. is greater than maximum"),
    ({"type": "integer", "enum": ["a"]}, "incompatible types"),
    ({"oneOf": [INT, INT]}, "incompatible types"),
    ({"not": {}}, "accepts no value"),
    (AB | {"required": ["z"], "unevaluatedProperties": False}, "required property 'z' is unsatisfiable"),
    ({"anyOf": []}, "anyOf '\\[\\]'"),
    ({"const": "a\u0000"}, "control character"),
    ({"enum": [1, [{"\u007f": 1}]]}, "control character"),
    ({"enum": ["a", "\ud83d"]}, r"the character \\ud83d, which is half of one, at #"),
    ({"properties": {"a": {"properties": {"\ude00": {}}}}}, "half of one, at #/properties/a"),
    ({"type": "object", "required": ["\ude00"]}, "half of one, at #"),
    ({"items": {"pattern": "[\ud800-\udfff]"}}, "half of one, at #/items"),
    ({"type": "integer", "maximum": 2**60}, "does not keep"),
    ({"enum": [12345678901234567]}, "12345678901234567, whose digits llguidance does not keep"),
    ({"type": "number", "minimum": 0.1234567890123456}, "does not keep"),
    ({"type": "integer", "multipleOf": 123456789}, "remainders"),
    ({"type": "integer", "multipleOf": 0}, "not above 0"),
    ({"type": "integer", "allOf": [{"multipleOf": 1999}, {"multipleOf": 1997}]}, "several multipleOf"),
    ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 5}, "does not contain a multiple"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum 0 less than 1 from the other bound"),
    ({"exclusiveMinimum": 0, "anyOf": [{"exclusiveMaximum": 0.5}, STR]}, "exclusiveMinimum 0 less than 1"),
    ({"allOf": [{"exclusiveMaximum": 0}, {"exclusiveMinimum": -0.5}]}, "exclusiveMaximum 0 less than 1"),
    ({"allOf": [{"items": {"exclusiveMinimum": 1}}, {"items": {"maximum": 1.5}}]}, "1 less than 1 .*/allOf/0/items"),
    (
        {"properties": {"ab": {"exclusiveMinimum": 0}}, "patternProperties": {"^a": {"maximum": 0.5}}},
        "exclusiveMinimum 0 less than 1",
    ),
    ({"type": "number", "maximum": 1.5, "not": {"maximum": 1}}, "exclusiveMinimum 1 less than 1 .*, at #/not"),
    ({"type": "number", "not": {"enum": [1, 1.5]}}, "exclusiveMinimum 1 less than 1 .*, at #/not"),
    ({"oneOf": [{"minimum": -1.5}, {"minimum": -1}]}, "exclusiveMaximum -1 less than 1 .*/oneOf/0"),
    ({"type": "string", "pattern": "(?=a)b"}, r"got: regex parse error: look-around, .*: \(\?= in \(\?=a\)b; expected"),
    ({"type": "string", "pattern": "(?x)\na\nb("}, "got: regex parse error: unclosed group"),
    ({"type": "string", "pattern": "(a)\\1"}, "backreferences"),
    ({"type": "string", "pattern": "\\bx"}, "not supported"),
    ({"type": "string", "pattern": "[+--]"}, "a difference of characters"),
    ({"type": "string", "pattern": 3}, "pattern '3'"),
    ({"$ref": "http://example.com/x", "maxLength": 3}, "part of the schema itself"),
    ({"$ref": "#/nowhere"}, "to '#/nowhere'"),
    ({"$ref": "#/$defs/x", "$defs": 5}, "to '#/\\$defs/x'"),
    ({"$ref": "#x", "$defs": {"a": {"$id": 5}}}, "to '#x'"),
    ({"$ref": "#x", "$defs": [5]}, "to '#x'"),
    ({"$id": 5}, r"\$id, .*, at #; expected: a text"),
    ({"items": {"$id": ["a"]}}, r"\$id, .*, at #/items; expected: a text"),
    ({"$schema": 7}, r"\$schema that is no text, at #"),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "id": {}}, r"id or \$schema that is no text, at #"),
    ({"$ref": "#"}, "leads back to itself"),
    ({"anyOf": [{"$ref": "#"}, {"type": "null"}], "minimum": 1}, "leads back to itself"),
    ({"not": 3}, "not '3'"),
    ({"dependentRequired": {"a": "b"}}, "dependentRequired .*an object"),
    ({"required": [1]}, "required .*a list of at most 3,000 names"),
    ({"properties": {f"{i}": {} for i in range(3001)}}, "properties .*an object of at most 3,000 names"),
    ({"minItems": -1}, "minItems '-1'"),
    ({"minItems": True}, "minItems 'True'"),
    ({"minimum": "a"}, "minimum 'a'"),
    ({"format": ["date"]}, "format .*a text"),
    ({"type": "string", "minLength": "a"}, "minLength 'a'"),
    ({"type": "array", "maxItems": 10**9}, "maxItems '1000000000'.*a whole number from 0 to"),
    (json.loads('{"not":' * 100 + "true" + "}" * 100), "nesting deeper"),
    ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": INT}} for j in range(6)]} for i in range(9)]}, "too large"),
    ({"$defs": PAIRS | {"40": INT}, "not": {"$ref": "#/$defs/0"}}, "refer to each other too often"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_would_not_be_enforced_is_refused_by_name(schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        compiled(schema)


def test_definitions_may_refer_to_one_another_in_a_long_row_that_no_stack_overflows() -> None:
    row = {f"{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(1500)}
    assert allows(compiled({"$defs": row | {"1500": INT}, "$ref": "#/$defs/1350"}), {"a": {"a": {}}})
    with pytest.raises(RequestError, match="more than 400 levels deep"):
        compiled({"$defs": row | {"1500": INT}, "$ref": "#/$defs/0"})


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize("is_object", [False, True])
def test_many_alternatives_with_constants_of_their_own_are_told_apart(is_object: bool, is_reference: bool) -> None:
    def of(kind: str) -> dict[str, Any]:
        rest = {"next": {"$ref": "#/$defs/k0"}, "b": STR, "kind": {"const": kind}}
        return {"type": "object", "properties": rest, "required": ["b", "kind"]} if is_object else {"const": kind}

    kinds = {f"k{i}": of(f"k{i}") for i in range(400)}
    branches = [{"$ref": f"#/$defs/{name}"} for name in kinds] if is_reference else [*kinds.values()]
    grammar = compiled({"$defs": kinds, "oneOf": branches})
    for kind, is_one in (("k0", True), ("k399", True), ("k400", False)):
        assert allows(grammar, {"b": "", "kind": kind} if is_object else kind) == is_one


def test_alternatives_of_which_two_share_a_constant_exclude_each_other() -> None:
    names = [{"enum": [f"k{i}", f"k{i + 1}"]} for i in (0, 2, 4, 5)]
    grammar = compiled({"oneOf": names})
    assert [allows(grammar, f"k{i}") for i in range(7)] == [True, True, True, True, True, False, True]
    kinds = [{"required": ["kind"], "properties": {"kind": name, "a": INT}} for name in names[:2]]
    assert [allows(compiled({"oneOf": kinds}), value) for value in ({"kind": "k1"}, 3)] == [True, False]


def test_bounds_of_different_values_have_nothing_to_do_with_each_other() -> None:
    share = {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}}
    grammar = compiled({"allOf": [share], "properties": {"c": {"not": {"const": "x"}}}, "required": ["a", "b"]})
    assert [allows(grammar, {"a": a, "b": 0.25}) for a in (0, 0.1)] == [False, True]


def test_parts_that_nothing_refers_to_are_not_looked_at() -> None:
    unused = {"uniqueItems": True, "propertys": 3}
    assert allows(compiled({"$defs": {"unused": unused, "misc": {"x": INT}}, "$ref": "#/$defs/misc/x"}), 1)


def test_all_others_are_taken_and_left_as_they_are() -> None:
    for name, schema in SCHEMAS.items():
        before = json.dumps(schema)
        compiled(schema)
        assert json.dumps(schema) == before, name


PATTERNS = [
    "^[a-z]{2,5}$",
    "ab",
    "^https://",
    "^a|b$",
    "^yes$|^no$",
    r"^(foo|ba[rz])+-\d{2}$",
    r"^[^a-z]{1,3}$",
    r"^\S.\W?\D$",
    r"^[^\s,]{1,4}$",
    r"^[\w.-]+@\w+\.\w{2,3}$",
    r"^\.\*\+\?\(\)\[\]\{\}\|\^\$/-$",
    r"^[a[b&&~]c]$",
    "^[[:alpha:]]$",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=25)
@given(data=st.data())
def test_a_pattern_is_found_in_what_its_grammar_allows(pattern: str, data: st.DataObject) -> None:
    grammar = compiled({"type": "string", "pattern": pattern})
    found = re.compile(pattern, re.ASCII)
    text = data.draw(st.one_of(st.from_regex(found), st.text('abcyes19-,.:é[]&~/\\" ', max_size=6)))
    text = "".join(char for char in text if char >= " " and char not in "\u2028\u2029\u0085\u001c\x7f\xa0")
    assert allows_text(grammar, json.dumps(text, ensure_ascii=False)) == bool(found.search(text)), text


@given(st.integers(0, 5), st.integers(0, 5), st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=11))
def test_lengths_count_characters(least: int, more: int, text: str) -> None:
    grammar = compiled({"type": "string", "minLength": least, "maxLength": least + more})
    assert allows_text(grammar, json.dumps(text, ensure_ascii=False)) == (least <= len(text) <= least + more)


@given(st.one_of(st.floats(), st.floats(-1e4, 1e4), st.decimals(-(10**5), 10**5, places=11).map(float)))
def test_numbers_are_written_to_the_last_digit_or_refused(value: float) -> None:
    if not math.isfinite(value) or not value:
        return
    if is_refused({"enum": [value, "x"]}):
        assert len(repr(value)) > 16 or not 1e-7 < abs(value) < 1e15
        return
    grammar = compiled({"enum": [value, "x"]})
    assert allows_text(grammar, _plain(value))
    for other in (math.nextafter(value, math.inf), math.nextafter(value, -math.inf)):
        assert not allows_text(grammar, _plain(other))


def _plain(value: float) -> str:
    """Return the shortest text of a number without an exponent."""
    return f"{Decimal(repr(value)):f}".removesuffix(".0")
