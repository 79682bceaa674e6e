"""Random texts against a schema: what a grammar allows is valid, what is valid is allowed, what is invalid is not.

Two sources of texts that know nothing of each other: walks through a grammar's own masks, and values written by looking
at the schema. `jsonschema` judges both.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.validators
from grammar_texts import END
from jsonschema.protocols import Validator
from llguidance import LLMatcher

CORPUS = Path(__file__).parents[2] / "data" / "schemas.json.xz"
_CLOSING = frozenset(b'"]},: ')
_OF_FORMATS = {
    "date": "2024-02-29",
    "date-time": "2024-02-29T12:30:00Z",
    "duration": "P1DT2H",
    "email": "ann@example.com",
    "hostname": "www.example.com",
    "ipv4": "192.0.2.7",
    "ipv6": "2001:db8::1",
    "time": "12:30:00Z",
    "uri": "https://example.com/a?b=c",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
}


def corpus() -> list[dict[str, Any]]:
    """Return real schemas: `source`, `name` and `schema` of each."""
    entries: list[dict[str, Any]] = json.loads(lzma.decompress(CORPUS.read_bytes()))
    return entries


def validator_of(schema: Any) -> Validator:
    """Return what judges: by the draft that the schema names, without formats."""
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    made: Validator = jsonschema.validators.extend(cls, {"multipleOf": _multiple_of})(schema)
    return made


def _multiple_of(validator: Validator, step: float, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """Judge by the digits: jsonschema divides floats, and 19.99 is no multiple of 0.01 to it."""
    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(step)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


def is_valid(validator: Validator, value: Any) -> bool | None:
    """Return whether a value is valid; None if that cannot be told."""
    try:
        return validator.is_valid(value)
    except Exception:  # references to nothing, patterns that Python has no meaning for, recursion
        return None


def walk(matcher: LLMatcher, rng: random.Random, max_bytes: int = 600) -> str | None:
    """Return a random text that the masks allow; None if it does not end.

    Bytes that open or write something are likely at first and then ever less, so that most texts end.
    """
    follower, text = matcher.deep_copy(), bytearray()
    while len(text) < max_bytes:
        bits = int.from_bytes(follower.compute_bitmask(), "little")
        if follower.is_error():
            return None
        is_late = len(text) > max_bytes // 3
        if bits >> END & 1 and (bits == 1 << END or rng.random() < (0.9 if is_late else 0.4)):
            return text.decode()
        allowed = [byte for byte in range(END) if bits >> byte & 1]
        if not allowed:
            return text.decode() if follower.is_accepting() else None
        closing = [byte for byte in allowed if byte in _CLOSING]
        if closing and rng.random() < (0.97 if is_late else 0.4):
            allowed = closing
        else:
            kinds: dict[int, list[int]] = {}
            for byte in allowed:  # a kind first, lest most of a string be bytes of one kind
                kinds.setdefault((byte >= 128) * 2 + chr(byte).isalnum(), []).append(byte)
            allowed = kinds[rng.choice(sorted(kinds))]
        byte = rng.choice(allowed)
        text.append(byte)
        if not follower.consume_token(byte):
            raise AssertionError(f"a byte that the mask allows is refused: {bytes(text)!r}, {follower.get_error()}")
    return None


def values(schema: Any, rng: random.Random, count: int) -> Iterator[Any]:
    """Yield values written by looking at a schema; most are valid, not all."""
    for _ in range(count):
        try:
            yield _Writer(schema, rng).value(schema, 0)
        except (RecursionError, LookupError, ValueError, TypeError):
            continue


def written(value: Any) -> str:
    """Return a value as Python's json.dumps writes it, words as they are."""
    return json.dumps(value, ensure_ascii=False)


class _Writer:
    """Writes one value."""

    def __init__(self, root: Any, rng: random.Random) -> None:
        self._root = root
        self._rng = rng

    def value(self, schema: Any, depth: int) -> Any:
        rng = self._rng
        if schema is True or schema == {}:
            return rng.choice([None, True, 7, "año", [], {}])
        if depth > 12:
            raise RecursionError
        merged = self._flat(schema, depth)
        if "const" in merged:
            return merged["const"]
        if merged.get("enum"):
            return rng.choice(merged["enum"])
        kinds = merged.get("type", self._kind_by_keywords(merged))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if depth > 5:
            kinds = sorted(kinds, key=lambda kind: kind in ("object", "array"))[:1]
        match rng.choice(kinds):
            case "object":
                return self._object(merged, depth)
            case "array":
                return self._array(merged, depth)
            case "string":
                return self._string(merged)
            case "integer" | "number" as kind:
                return self._number(merged, kind)
            case "boolean":
                return rng.random() < 0.5
            case _:
                return None

    def _flat(self, schema: Any, depth: int) -> dict[str, Any]:
        """Return keywords of a schema, its references, all of `allOf` and one of each choice, put together."""
        merged: dict[str, Any] = {}
        for _ in range(40):
            if schema is True:
                return merged
            choices = [schema.get("anyOf"), schema.get("oneOf")]
            parts = [*schema.get("allOf", [])]
            for several in choices:
                if several:
                    small = sorted(several, key=lambda part: len(json.dumps(part)))
                    parts.append(self._rng.choice(several if depth < 4 else small[:1]))
            for part in parts:
                self._merge(merged, self._flat(part, depth))
            self._merge(merged, {k: v for k, v in schema.items() if k not in ("anyOf", "oneOf", "allOf", "$ref")})
            if "$ref" not in schema:
                return merged
            schema = self._target(schema["$ref"])
        raise RecursionError

    @staticmethod
    def _merge(merged: dict[str, Any], more: dict[str, Any]) -> None:
        for key, value in more.items():
            if key == "properties" and key in merged:
                merged[key] = {**merged[key], **value}
            elif key == "required" and key in merged:
                merged[key] = list(dict.fromkeys([*merged[key], *value]))
            elif key == "type" and key in merged and isinstance(merged[key], str):
                continue
            else:
                merged[key] = value

    def _target(self, reference: str) -> Any:
        part = self._root
        if not reference.startswith("#"):
            raise LookupError(reference)
        for name in reference[1:].split("/")[1:]:
            name = jsonschema.validators.unquote(name).replace("~1", "/").replace("~0", "~")
            part = part[int(name)] if isinstance(part, list) else part[name]
        return part

    @staticmethod
    def _kind_by_keywords(schema: dict[str, Any]) -> str:
        if schema.keys() & {"properties", "required", "additionalProperties", "patternProperties"}:
            return "object"
        if schema.keys() & {"items", "prefixItems", "minItems", "maxItems"}:
            return "array"
        if schema.keys() & {"minimum", "maximum", "multipleOf"}:
            return "number"
        return "string"

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", [])
        made = {}
        for name, part in schema.get("properties", {}).items():
            if name in required or (part is not False and depth < 5 and self._rng.random() < 0.5):
                made[name] = self.value(part, depth + 1)
        for name in required:
            if name not in made:
                made[name] = self.value(self._of_other_name(schema, name), depth + 1)
        rest = schema.get("additionalProperties", not schema.get("properties"))
        if rest is not False and "patternProperties" not in schema and self._rng.random() < 0.3 and depth < 5:
            names = schema.get("propertyNames", {})
            name = self._rng.choice(["zz", "años", "z_1"]) if not names else self.value(names, depth + 1)
            made.setdefault(name, self.value(rest, depth + 1))
        return made

    @staticmethod
    def _of_other_name(schema: dict[str, Any], name: str) -> Any:
        for pattern, part in schema.get("patternProperties", {}).items():
            if re.search(pattern, name):
                return part
        return schema.get("additionalProperties", True)

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        items = schema.get("items", True)
        first = schema.get("prefixItems", items if isinstance(items, list) else [])
        rest = items if not isinstance(items, list) else schema.get("additionalItems", True)
        least = schema.get("minItems", len(first))
        most = min(schema.get("maxItems", least + 3), least + (3 if depth < 5 else 0))
        if rest is False:
            most = min(most, len(first))
        count = self._rng.randint(min(least, most), most)
        return [self.value(first[i] if i < len(first) else rest, depth + 1) for i in range(count)]

    def _string(self, schema: dict[str, Any]) -> str:
        rng = self._rng
        if schema.get("format") in _OF_FORMATS:
            return _OF_FORMATS[schema["format"]]
        if "pattern" in schema:
            return _matching(schema["pattern"], rng)
        least = schema.get("minLength", 0)
        most = min(schema.get("maxLength", least + 12), least + 12)
        letters = 'abcxyzABC019 _-./"\\\n\téñ中文дйعربी한국ไทยλ😀'
        return "".join(rng.choices(letters, k=rng.randint(least, most)))

    def _number(self, schema: dict[str, Any], kind: str) -> int | float:
        rng = self._rng
        low, high = schema.get("minimum"), schema.get("maximum")
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        low = low if low is not None else above if isinstance(above, int | float) else None
        high = high if high is not None else below if isinstance(below, int | float) else None
        low = low if low is not None else -20 if high is None else high - 50
        high = high if high is not None else low + 50
        step = schema.get("multipleOf")
        if step:
            return step * rng.randint(int(-(-low // step)), int(high // step))
        if kind == "integer":
            return rng.randint(int(low), int(high))
        return rng.choice([rng.randint(int(low), int(high)), round(rng.uniform(low, high), 3)])


def _matching(pattern: str, rng: random.Random) -> str:
    """Return a text that a simple pattern matches.

    Raises:
        ValueError: the pattern is not simple.
    """
    import re._constants as kinds
    import re._parser as parser

    def text_of(parts: Any) -> str:
        made = ""
        for kind, argument in parts:
            if kind in (kinds.AT, kinds.ASSERT, kinds.ASSERT_NOT):
                continue
            if kind is kinds.LITERAL:
                made += chr(argument)
            elif kind is kinds.IN:
                made += _of_class(argument)
            elif kind in (kinds.ANY, kinds.NOT_LITERAL):
                made += "k"
            elif kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT):
                least, most, inner = argument
                made += "".join(text_of(inner) for _ in range(rng.randint(least, min(most, least + 3))))
            elif kind is kinds.SUBPATTERN:
                made += text_of(argument[-1])
            elif kind is kinds.BRANCH:
                made += text_of(rng.choice(argument[1]))
            else:
                raise ValueError(pattern)
        return made

    def _of_class(members: Any) -> str:
        if members[0][0] is kinds.NEGATE:
            return "k"
        kind, argument = rng.choice(members)
        if kind is kinds.LITERAL:
            return chr(argument)
        if kind is kinds.RANGE:
            return chr(rng.randint(*argument))
        return {kinds.CATEGORY_DIGIT: "5", kinds.CATEGORY_WORD: "w", kinds.CATEGORY_SPACE: " "}.get(argument, "k")

    try:
        return text_of(parser.parse(pattern))
    except re.error:
        raise ValueError(pattern) from None


def mutated(value: Any, rng: random.Random) -> Any:
    """Return a value with one change somewhere: it may be valid still."""
    value = json.loads(json.dumps(value))
    places = [place for place in _places(value) if place]
    if not places:
        return _changed(value, rng)
    *path, last = rng.choice(places)
    part = value
    for step in path:
        part = part[step]
    match rng.randrange(4):
        case 0:
            del part[last]
        case 1 if isinstance(part, dict):
            part[rng.choice(["extra", "", "é", f"{last}0"])] = rng.choice([None, 1, "x"])
        case 2 if isinstance(part, list):
            part.append(part[last])
        case _:
            part[last] = _changed(part[last], rng)
    return value


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    yield ()
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        for place in _places(part):
            yield (name, *place)


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or value is None or rng.random() < 0.4:
        return rng.choice([None, True, 0, -1, 1.5, 10**9, "", "x", [], {}, [1, 1], {"x": 1}])
    if isinstance(value, int | float):
        return value + rng.choice([-1000, -1, -0.5, 0.01, 1, 0.25, 100000])
    if isinstance(value, str):
        return rng.choice([value + "x", value[:-1], value * 3, value.upper(), "x" + value, value + "\n"])
    return rng.choice([[], {}])
