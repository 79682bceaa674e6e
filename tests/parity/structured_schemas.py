"""JSON schemas of many kinds, each bounded: whatever a model writes under one ends by itself, and soon."""

from __future__ import annotations

from typing import Any

SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
WORD = {"type": "string", "maxLength": 8}
FLAG = {"type": "boolean"}


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    keys = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": keys, "additionalProperties": False}


def _array(items: Any, most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _nested(depth: int) -> dict[str, Any]:
    return _object(next=_nested(depth - 1), level=SMALL) if depth else WORD


SCHEMAS: dict[str, Any] = {
    # scalars
    "notes": {**FLAG, "title": "Done", "x-google-hint": 1, "enumNames": ["a", "b"], "propertyOrdering": []},
    "string": {"type": "string", "maxLength": 12},
    "string of a length": {"type": "string", "minLength": 5, "maxLength": 5},
    "string at least": {"type": "string", "minLength": 3, "maxLength": 6},
    "long string": {"type": "string", "minLength": 100, "maxLength": 128},
    "boolean": FLAG,
    "null": {"type": "null"},
    "digit": SMALL,
    "negative integer": {"type": "integer", "minimum": -120, "maximum": -3},
    "integer across zero": {"type": "integer", "minimum": -25, "maximum": 1017},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 12},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    "one of types": {"type": ["boolean", "null"]},
    "bounded or null": {"type": ["string", "null"], "maxLength": 4},
    # patterns
    "pattern": {"type": "string", "pattern": "^[a-z]{2,5}$"},
    "pattern with groups": {"type": "string", "pattern": r"^(foo|ba[rz]){1,3}-\d{2}$"},
    "pattern of others": {"type": "string", "pattern": "^[^a-z ]{1,4}$"},
    "pattern with dots": {"type": "string", "pattern": "^a.{0,3}z$"},
    "colour": {"type": "string", "pattern": "^#[0-9a-fA-F]{6}$"},
    "alternatives": {"type": "string", "pattern": "^yes$|^no$|^maybe$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    # values
    "enum of strings": {"enum": ["red", "green", "blue"]},
    "enum of all kinds": {"enum": [1, "a", None, True, {"x": [1]}, []]},
    "enum with escapes": {"enum": ['say "hi"', "back\\slash", "new\nline", "é"]},
    "typed enum": {"type": "integer", "enum": [3, 5, 8]},
    "const": {"const": "only"},
    "const object": {"const": {"a": [1, 2, {"b": None}], "c": "d"}},
    # arrays
    "array": _array(SMALL, 4),
    "array of at least": _array(FLAG, 3, 2),
    "array of a length": _array(WORD, 2, 2),
    "empty array": {"type": "array", "maxItems": 0},
    "matrix": _array(_array(SMALL, 3, 1), 3, 1),
    "array of objects": _array(_object(id=SMALL, name=WORD), 3, 1),
    "tuple": {"type": "array", "prefixItems": [WORD, SMALL, FLAG], "items": False, "minItems": 3},
    "tuple and more": {"type": "array", "prefixItems": [WORD], "items": SMALL, "minItems": 2, "maxItems": 4},
    "array of choices": _array({"anyOf": [SMALL, WORD, {"type": "null"}]}, 4),
    # objects
    "object": _object(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "nothing required": _object([], a=SMALL, b=FLAG, c=WORD),
    "some required": _object(["b"], a=SMALL, b=FLAG, c=WORD),
    "last required": _object(["c"], a=SMALL, b=FLAG, c=WORD),
    "empty object": {"type": "object", "additionalProperties": False},
    "one property": _object(value={"type": "null"}),
    "many properties": _object(**{f"field_{index}": SMALL for index in range(20)}),
    "strange names": _object(**{"": SMALL, 'a "b"': FLAG, "ü": SMALL, "with space": FLAG}),
    "nested": _nested(3),
    "deeply nested": _nested(12),
    "object of arrays": _object(tags=_array(WORD, 3), scores=_array(SMALL, 3)),
    "other properties": {
        "type": "object",
        "properties": {"kind": {"const": "map"}},
        "required": ["kind"],
        "patternProperties": {"^k[0-9]$": SMALL},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "map of names": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]{1,2}$"},
        "additionalProperties": SMALL,
        "maxProperties": 3,
    },
    "at most two": {**_object([], a=SMALL, b=SMALL, c=SMALL), "maxProperties": 2},
    "at least two": {**_object([], a=SMALL, b=SMALL, c=SMALL), "minProperties": 2},
    "untyped object": {"properties": {"a": SMALL}, "required": ["a"], "additionalProperties": False},
    # combinations
    "any of scalars": {"anyOf": [SMALL, FLAG, {"type": "null"}]},
    "any of objects": {"anyOf": [_object(cat=WORD), _object(dog=SMALL)]},
    "optional": _object(value={"anyOf": [WORD, {"type": "null"}]}),
    "one of types by value": {"oneOf": [{"type": "string", "maxLength": 3}, SMALL]},
    "tagged": {"oneOf": [_object(kind={"const": "a"}, n=SMALL), _object(kind={"const": "b"}, s=WORD)]},
    "all of one": {"allOf": [_object(a=SMALL)]},
    "nested choices": {"anyOf": [{"anyOf": [SMALL, FLAG]}, _array({"anyOf": [SMALL, FLAG]}, 2)]},
    # references
    "reference": {"$defs": {"word": WORD}, **_object(w={"$ref": "#/$defs/word"})},
    "shared reference": {
        "definitions": {"point": _object(x=SMALL, y=SMALL)},
        **_object(start={"$ref": "#/definitions/point"}, end={"$ref": "#/definitions/point"}),
    },
    "reference to a reference": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": SMALL},
        **_array({"$ref": "#/$defs/a"}, 3, 1),
    },
    "array of references": {"$defs": {"row": _object(k=WORD, v=SMALL)}, **_array({"$ref": "#/$defs/row"}, 2, 1)},
    # as pydantic writes them
    "pydantic": {
        "$defs": {"Side": {"enum": ["left", "right"], "title": "Side", "type": "string"}},
        "properties": {
            "title": {"maxLength": 10, "title": "Title", "type": "string"},
            "side": {"$ref": "#/$defs/Side"},
            "count": {"default": 3, "maximum": 9, "minimum": 0, "title": "Count", "type": "integer"},
            "note": {"anyOf": [{"maxLength": 5, "type": "string"}, {"type": "null"}], "default": None, "title": "Note"},
        },
        "required": ["title", "side"],
        "title": "Thing",
        "type": "object",
    },
    "extraction": _object(
        people=_array(_object(["name"], name=WORD, born={"type": "integer", "minimum": 1800, "maximum": 2030}), 2, 1),
        place=_object(city=WORD, country={"enum": ["AT", "CH", "DE"]}),
        summary={"type": "string", "maxLength": 30},
        is_certain=FLAG,
    ),
}
"""By what is special about them."""
