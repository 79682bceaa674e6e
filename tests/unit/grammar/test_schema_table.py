"""docs/structured_outputs.md has one table of what is enforced and what is refused: each row is tried here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grammar_texts import is_refused

DOCUMENT = Path(__file__).parents[3] / "docs/structured_outputs.md"
INT, STR = {"type": "integer"}, {"type": "string"}
OPEN = {"type": "object", "properties": {"a": INT, "b": STR}, "additionalProperties": True}
A, B = {"required": ["a"]}, {"required": ["b"]}


@dataclass(frozen=True)
class Row:
    """One row, with schemas for what its words say."""

    keywords: str
    enforced: str
    taken: list[Any]
    refused: str = ""
    not_taken: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"| {self.keywords} | {self.enforced} | {self.refused} |"


ROWS = [
    Row("`type`", "also a list; without it keywords of objects ask for an object, those of arrays for an array",
        [{"type": ["string", "null"]}, {"minLength": 1}],
        "other names, `nullable` (say `[\"string\", \"null\"]`)", ({"type": "any"}, {"nullable": True})),
    Row("`enum`, `const`", "any values, words of all languages; numbers to the last digit",
        [{"enum": ["España", 0.1, {"a": [None]}]}, {"const": 9007199254740991}],
        "numbers above 2^53 or of more digits than that has, control characters but `\\b \\t \\n \\f \\r`",
        ({"const": 12345678901234567}, {"enum": ["\x00"]}, {"const": 0.30000000000000004})),
    Row("`$ref`, `$defs`, `$id`, `$anchor`", "to any part of the schema, with keywords beside it, recursive",
        [{"$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t",
          "required": ["t"]}, {"$defs": {"t": {"$anchor": "x"} | INT}, "$ref": "#x"}],
        "to other documents; back to itself with no value in between; `$dynamicRef`, `$recursiveRef`",
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, {"$ref": "#"}, {"$dynamicRef": "#x"})),
    Row("`allOf`, `anyOf`", "beside each other and beside all else",
        [{"allOf": [OPEN, A], "anyOf": [B, {"properties": {"a": {"minimum": 3}}}]}],
        "combinations of more than some 50,000 parts",
        ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": INT}} for j in range(6)]} for i in range(9)]},)),
    Row("`oneOf`", "where no two schemas share a value, by type, constants, bounds or a required property; else as "
        "`anyOf` of each without the others, where `not` of them is taken",
        [{"oneOf": [INT, STR]}, OPEN | {"oneOf": [A, B]}, {"oneOf": [{"type": ["string", "null"]},
         {"type": ["number", "null"]}]}],
        "what `not` refuses", ({"oneOf": [{"type": "array", "items": INT}, {"type": "array", "items": STR}]},)),
    Row("`not`, `if`, `then`, `else`",
        "of `type`, `enum`, `const`, bounds, lengths, counts, `required`, `properties`, `$ref`, `allOf`, `anyOf` and "
        "`not`",
        [{"not": {"enum": ["a", 1, None]}}, OPEN | {"if": {"properties": {"b": {"const": "x"}}}, "then": A}],
        "of `pattern`, `multipleOf`, `items`, `additionalProperties`, `oneOf` and what is not on the left",
        (STR | {"not": {"pattern": "a"}}, {"if": {"items": INT}, "then": {"minItems": 1}})),
    Row("`properties`, `required`, `additionalProperties`",
        "all; objects have no further properties unless the schema says so",
        [OPEN, {"type": "object", "required": ["z"]}]),
    Row("`patternProperties`", "beside properties, others, and `propertyNames` with the same pattern",
        [OPEN | {"patternProperties": {"^x": INT, "^y": STR}}],
        "different schemas for patterns that may match the same name",
        ({"patternProperties": {"^x": INT, "y": STR}},)),
    Row("`propertyNames`", "of one `pattern`, `enum` or `const`, of lengths, or `not` of values",
        [OPEN | {"propertyNames": {"maxLength": 3}}, {"propertyNames": {"not": {"const": "a"}}}],
        "of anything else", ({"propertyNames": {"anyOf": [{"const": "a"}]}},)),
    Row("`dependentRequired`, `dependentSchemas`, `dependencies`", "all", [OPEN | {"dependencies": {"a": ["b"]}},
        OPEN | {"dependentSchemas": {"a": {"required": ["b"]}}}]),
    Row("`unevaluatedProperties`", "beside `allOf`, `$ref` and keywords of objects",
        [{"allOf": [OPEN], "unevaluatedProperties": False}],
        "beside `anyOf`, `oneOf`, `if`, `dependentSchemas`", ({"anyOf": [A, B], "unevaluatedProperties": False},)),
    Row("`minProperties`, `maxProperties`", "where all properties have a name in the schema, in up to 100 ways "
        "or of 1; where none has, up to a minimum of 1; where the required ones are enough",
        [{"type": "object", "minProperties": 1, "maxProperties": 7, "additionalProperties": INT},
         {"properties": {"a": INT, "b": INT, "c": INT}, "minProperties": 2}, OPEN | A | {"minProperties": 1}],
        "others", ({"type": "object", "minProperties": 2}, OPEN | {"maxProperties": 1})),
    Row("`items`, `prefixItems`, `additionalItems`, `minItems`, `maxItems`", "all, up to 20,000 items",
        [{"prefixItems": [INT], "items": STR, "minItems": 2}, {"items": [INT], "additionalItems": False}],
        "larger counts", ({"maxItems": 20001},)),
    Row("`uniqueItems`, `contains`, `unevaluatedItems`",
        "`uniqueItems` of at most one item; `unevaluatedItems` where nothing else says what items may be",
        [{"uniqueItems": True, "maxItems": 1}, {"prefixItems": [INT], "unevaluatedItems": False}],
        "others", ({"uniqueItems": True}, {"contains": INT}, {"allOf": [{"prefixItems": [INT]}],
                                                             "unevaluatedItems": False})),
    Row("`minLength`, `maxLength`, `pattern`", "all together, up to 20,000 characters; `\\d` and `\\w` are of ASCII",
        [STR | {"pattern": "^[a-z]", "maxLength": 5}, STR | {"allOf": [{"pattern": "a"}, {"pattern": "b$"}]}],
        "look-around, references to groups, `\\b`, two hyphens within brackets",
        (STR | {"pattern": "a(?=b)"}, STR | {"pattern": r"(a)\1"}, STR | {"pattern": r"\bx"}, {"maxLength": 20001})),
    Row("`minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`", "all, up to 2^53; fractions of 15 digits",
        [{"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, INT | {"minimum": -9007199254740992}],
        "more digits; a whole bound that is left out less than 1 from the other",
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, INT | {"maximum": 2**54})),
    Row("`multipleOf`", "with up to 2,000 remainders, beside bounds", [{"type": "number", "multipleOf": 0.01}],
        "more", (INT | {"multipleOf": 2001},)),
    Row("`format`", "`date`, `date-time`, `duration`, `email`, `hostname`, `ipv4`, `ipv6`, `time`, `uri`, `uuid`, "
        "unless `pattern` is beside it; others are notes", [STR | {"format": "date"}, STR | {"format": "int32"}]),
    Row("notes", "`title`, `description`, `default`, `examples`, `deprecated`, `discriminator`, `contentSchema` and "
        "the like bind nothing, nor do `x-...`", [{"title": "a", "x-a": 1, "contentSchema": {"uniqueItems": True}}],
        "any other keyword", ({"propertys": {}}, {"titel": "a"})),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.keywords)
def test_what_a_row_says_is_so(row: Row) -> None:
    assert [schema for schema in row.taken if is_refused(schema)] == []
    assert [schema for schema in row.not_taken if not is_refused(schema)] == []
    assert bool(row.refused) == bool(row.not_taken)


def test_the_document_has_this_table() -> None:
    table = "\n".join(["| keywords | enforced | refused |", "|---|---|---|", *map(str, ROWS)])
    assert table in DOCUMENT.read_text(), f"the table in {DOCUMENT.name} should be:\n{table}"
