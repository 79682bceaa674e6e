"""What is certain about schemas as they are given: which values two of them share, and what one does not accept."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

from raypp.grammar.schema_check import cannot_be_enforced, children, is_note

_TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_MAX_STEPS = 100_000
_MAX_WORD_CHARS = 100  # of a text that a pattern leaves out: it is nested as deep


@dataclass
class Facts:
    """Of one schema and its parts."""

    targets: dict[int, Any]
    """What references refer to, as of `schema_check.checked`."""
    _num_steps: int = 0

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise cannot_be_enforced("#", "parts that refer to each other too often")

    def in_place(self, schema: Any, keywords: Container[str]) -> Iterator[dict[str, Any]]:
        """Yield a schema and those of the same value that it has by certain keywords."""
        waiting, seen = [schema], set[int]()
        while waiting:
            part = waiting.pop()
            if isinstance(part, bool) or id(part) in seen:
                continue
            self.step()
            seen.add(id(part))
            yield part
            waiting += [child for keyword, _, child in children(part) if keyword in keywords]
            if "$ref" in keywords and id(part) in self.targets:
                waiting.append(self.targets[id(part)])

    def _types(self, schema: Any) -> frozenset[str]:
        """Return the types of which a schema may accept values."""
        types = _TYPES if schema is not False else frozenset[str]()
        for part in self.in_place(schema, ("$ref", "allOf")):
            if "type" in part:
                types &= _types_said(part["type"])
            if "enum" in part or "const" in part:
                types &= {_type_of(value) for value in part.get("enum", [part.get("const")])}
            for keyword in part.keys() & {"anyOf", "oneOf"}:
                types &= frozenset().union(*map(self._types, part[keyword]))
        return types

    def are_apart(self, first: Any, second: Any) -> bool:
        """Return whether it is certain that two schemas share no value."""
        self.step()
        common = self._types(first) & self._types(second)
        if not common:
            return True
        sides = [[*self.in_place(schema, ("$ref", "allOf"))] for schema in (first, second)]
        for parts, other in ((sides[0], second), (sides[1], first)):
            for part in parts:
                for keyword in part.keys() & {"anyOf", "oneOf"}:
                    if all(self.are_apart(each, other) for each in part[keyword]):
                        return True
        values = [[part.get("enum", [part.get("const")]) for part in parts if part.keys() & {"enum", "const"}]
                  for parts in sides]  # fmt: skip
        if values[0] and values[1] and not ({*map(_key, values[0][0])} & {*map(_key, values[1][0])}):
            return True
        if common == {"object"}:
            names = dict.fromkeys(name for parts in sides for part in parts for name in part.get("required", ()))
            return any(self.are_apart(a, b) for name in names for a in _of_name(sides[0], name)
                       for b in _of_name(sides[1], name))  # fmt: skip
        if common == {"number"}:
            return _low(sides[0]) > _high(sides[1]) or _low(sides[1]) > _high(sides[0])
        return False

    def have_own_constants(self, schemas: list[Any]) -> bool:
        """Return whether each of many schemas has constants that no other has, itself or for one property of objects.

        That takes one look at each, not one at each two of them.
        """
        sides = [[*self.in_place(schema, ("$ref", "allOf"))] for schema in schemas]
        if _are_distinct(map(_constants, sides)):
            return True
        if not all(self._types(schema) == {"object"} for schema in schemas):
            return False
        for name in dict.fromkeys(name for part in sides[0] for name in part.get("required", ())):
            if all(any(name in part.get("required", ()) for part in parts) for parts in sides):
                found = [[part for each in _of_name(parts, name) for part in self.in_place(each, ("$ref", "allOf"))]
                         for parts in sides]  # fmt: skip
                if _are_distinct(map(_constants, found)):
                    return True
        return False

    def opposite(self, schema: Any, at: str) -> list[Any]:
        """Return schemas, each of which accepts only what a schema does not accept, together most of it."""
        self.step()
        if isinstance(schema, bool):
            return [] if schema else [True]
        found = list[Any]()
        for keyword, value in schema.items():
            place = f"{at}/{keyword}"
            if is_note(keyword) or keyword == "format":
                continue
            if keyword in _OPPOSITES and not isinstance(value, bool):
                kind, other, more = _OPPOSITES[keyword]
                found += [{"type": kind, other: value + more}] if value + more >= 0 or kind == "number" else []
                continue
            match keyword:
                case "type":
                    found += [{"type": name} for name in sorted(_TYPES - _types_said(value))]
                case "const" | "enum":
                    found += _other_values(value if keyword == "enum" else [value])
                case "required":
                    found += [{"type": "object", **lacking(name)} for name in value]
                case "properties":
                    for name, part in value.items():
                        if others := self.opposite(part, f"{place}/{name}"):
                            has = {"type": "object", "required": [name]}
                            found.append({**has, "properties": {name: {"anyOf": others}}})
                case "$ref":
                    found += self.opposite(self.targets[id(schema)], schema["$ref"])
                case "allOf":
                    found += [each for part in value for each in self.opposite(part, place)]
                case "anyOf":
                    found.append({"allOf": [{"anyOf": self.opposite(part, place) or [False]} for part in value]})
                case "not":
                    found.append(value)
                case _:
                    raise cannot_be_enforced(at, f"{keyword} within not, if, or oneOf of schemas that share values")
        return found


def opposite_bounds(parts: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the bounds of numbers that the opposites of schemas may have."""
    for part in parts:
        for keyword, (kind, other, _) in _OPPOSITES.items():
            if kind == "number" and keyword in part:
                yield {other: part[keyword]}
        for value in part.get("enum", [part.get("const")]):
            if _type_of(value) == "number":
                yield {"exclusiveMinimum": value, "exclusiveMaximum": value}


def lacking(name: str) -> dict[str, Any]:
    return {"properties": {name: False}}


def _types_said(value: str | list[str]) -> frozenset[str]:
    names = [value] if isinstance(value, str) else value
    return frozenset("number" if name == "integer" else name for name in names)


def _of_name(parts: list[dict[str, Any]], name: str) -> list[Any]:
    """Return what schemas of an object say of a property, if it is there."""
    found = []
    for part in parts:
        if name in part.get("properties", {}):
            found.append(part["properties"][name])
        elif not part.get("patternProperties"):
            found.append(part.get("additionalProperties", True))
    return found


def _constants(parts: list[dict[str, Any]]) -> set[Any]:
    """Return those of which a value that schemas accept is one; none if it need not be."""
    return next(({*map(_key, part.get("enum", [part.get("const")]))} for part in parts
                 if part.keys() & {"enum", "const"}), set())  # fmt: skip


def _are_distinct(sets: Iterable[set[Any]]) -> bool:
    """Return whether there is something in each set, and nothing in two of them."""
    seen = set[Any]()
    for each in sets:
        if not each or not seen.isdisjoint(each):
            return False
        seen |= each
    return True


def _low(parts: list[dict[str, Any]]) -> float:
    return max((part["minimum"] for part in parts if "minimum" in part), default=-inf)


def _high(parts: list[dict[str, Any]]) -> float:
    return min((part["maximum"] for part in parts if "maximum" in part), default=inf)


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", type(None): "null", str: "string", int: "number", float: "number", list: "array"}
    return kinds.get(type(value), "object")


def _key(value: Any) -> Any:
    """Return something that is equal where JSON values are."""
    match value:
        case bool() | None:
            return ("word", value)
        case dict():
            return frozenset((name, _key(part)) for name, part in value.items())
        case list():
            return tuple(map(_key, value))
        case _:
            return value


def _other_values(values: list[Any]) -> list[Any]:
    """Return schemas of values that differ from some; of types of which there are arrays or objects, none."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(_type_of(value), []).append(value)
    found: list[Any] = [{"type": name} for name in sorted(_TYPES - by_type.keys())]
    if "boolean" in by_type:
        found += [{"const": word} for word in (True, False) if word not in by_type["boolean"]]
    if "number" in by_type:
        ends = sorted(set(by_type["number"]))
        found += [{"type": "number", "exclusiveMaximum": ends[0]}, {"type": "number", "exclusiveMinimum": ends[-1]}]
        found += [{"type": "number", "exclusiveMinimum": a, "exclusiveMaximum": b} for a, b in pairwise(ends)]
    if "string" in by_type and max(map(len, by_type["string"])) <= _MAX_WORD_CHARS:
        found.append({"type": "string", "pattern": other_words(by_type["string"])})
    return found


def other_words(words: Iterable[str]) -> str:
    """Return the pattern of all texts but some."""

    def behind(rests: list[str]) -> str:
        first = dict.fromkeys(rest[0] for rest in rests if rest)
        branches = [re.escape(char) + behind([rest[1:] for rest in rests if rest[:1] == char]) for char in first]
        branches.append(f"[^{''.join(map(re.escape, first))}][\\s\\S]*" if first else "[\\s\\S]+")
        return f"(?:{'|'.join(branches)}){'' if '' in rests else '?'}"

    return f"^{behind([*words])}$"
