"""What of JSON schema is enforced, refused, and said in other words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structured_schemas import SCHEMAS

from raypp.errors import RequestError
from raypp.grammar.json_pattern import UnsupportedPatternError, json_pattern, length_pattern
from raypp.grammar.schema_check import enforceable
from raypp.grammar.schema_values import are_disjoint

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
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=25)
@given(data=st.data())
def test_what_a_rewritten_pattern_allows_the_pattern_finds(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(re.compile(json_pattern(pattern), re.ASCII), fullmatch=True))
    text = text.removesuffix("\n")  # Python's $ lets one pass
    assert re.search(pattern, text)
    assert json.loads(f'"{text}"') == text


@given(st.integers(0, 5), st.integers(0, 5), st.data())
def test_lengths_count_characters(least: int, more: int, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(length_pattern(least, least + more), fullmatch=True)).removesuffix("\n")
    assert least <= len(text) <= least + more
    assert json.loads(f'"{text}"') == text


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", '"', r"a\\b", r"\bx", r"\p{L}", "[", "a^b", "(?i:a)", "\n"])
def test_patterns_that_cannot_be_followed(pattern: str) -> None:
    with pytest.raises(UnsupportedPatternError):
        json_pattern(pattern)


REFUSED: dict[str, Any] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"type": "null"}},
    "contains": {"type": "array", "contains": {"const": 5}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "if": {"type": "object", "if": {}, "then": {}},
    "allOf of several": {"allOf": [{"type": "string"}, {"type": "string"}]},
    "maxLength beside pattern": {"type": "string", "pattern": "a", "maxLength": 3},
    "minLength beside \\$ref": {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "minLength": 3},
    "properties beside anyOf": {"properties": {"a": {}}, "anyOf": [{"type": "null"}]},
    "part of the schema itself": {"$ref": "http://example.com/x"},
    "to '#/nowhere'": {"$ref": "#/nowhere"},
    "the type 'objekt'.*one of array, boolean, integer, null, number, object, string": {"type": "objekt"},
    "maxLength without a type": {"maxLength": 3},
    "'z', required": {"type": "object", "properties": {"a": {}}, "required": ["z"]},
    "the value '1' beside": {"type": "string", "enum": ["a", 1]},
    "oneOf whose schemas": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "without any entry": {"anyOf": []},
    "nesting deeper": json.loads('{"items":' * 100 + "true" + "}" * 100),
    "multipleOf": {"type": "number", "multipleOf": 0.5},
    "in place of a schema": {"type": "array", "items": 3},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_would_not_be_enforced_is_refused_by_name(said: str) -> None:
    with pytest.raises(RequestError, match=said):
        enforceable({"type": "object", "properties": {"x": REFUSED[said]}} if "ref" not in said else REFUSED[said])
    with pytest.raises(RequestError, match=said):
        enforceable(REFUSED[said])


def test_all_others_are_taken_and_left_as_they_are() -> None:
    for name, schema in SCHEMAS.items():
        before = json.dumps(schema)
        enforceable(schema)
        assert json.dumps(schema) == before, name


def test_schemas_that_share_no_value() -> None:
    a, b = {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}, {"$ref": "#/b"}
    root = {"b": {"type": "object", "properties": {"k": {"enum": ["b", "c"]}}, "required": ["k"]}}
    assert are_disjoint([a, b, {"type": "string"}], root)
    assert not are_disjoint([a, b, {"type": "object"}], root)
    assert not are_disjoint([{"type": "integer"}, {"type": "number"}], {})
    assert not are_disjoint([{"const": 1}, {"const": 1.0}], {})
    assert are_disjoint([{"const": 1}, {"const": True}], {})
