"""A JSON schema said in the keywords that llguidance enforces: the same values or fewer, never more.

References become `$defs` of their own. Objects are closed: unless a schema says what further properties may be, there
are none. Where several schemas are about the same object (`allOf`, a `$ref` with keywords beside it, ...), all of their
properties may be.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import ceil, comb, floor, inf, lcm
from typing import Any

from raypp.grammar.schema_check import (
    BOUNDS,
    IN_PLACE,
    cannot_be_enforced,
    checked,
    children,
    is_note,
    pattern_of,
    step_of,
)

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


_FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
_OF_OBJECTS = {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"}
_KEYWORDS_OF = {
    "object": _OF_OBJECTS | {"required", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"},
}
_OPEN = _OF_OBJECTS - {"properties", "patternProperties"}
_NO_NAME = "^[^\\s\\S]$"
_MAX_REMAINDERS = 10_000
_MAX_ALTERNATIVES = 100
MAX_LEVELS = 400  # of 5 KiB of stack each


def rewritten(schema: Any) -> Any:
    """Return a schema that accepts nothing else than the given one, in keywords that llguidance enforces.

    Raises:
        RequestError: names the first part that could not be enforced.
    """
    try:
        writer = _Writer(Facts(checked(schema)), schema)
        written = writer.write(schema, "#", None)
        while writer.pending:
            name, target, at, shared = writer.pending.pop()
            writer.definitions[name] = writer.write(target, at, shared)
    except ValueError as error:
        raise cannot_be_enforced("#", str(error)) from None
    except RecursionError:
        raise cannot_be_enforced("#", "parts that refer to each other too often") from None
    _check_depth(written, writer.definitions)
    if written is False:
        raise cannot_be_enforced("#", "a schema that accepts no value")
    return {**({} if written is True else written), **({"$defs": writer.definitions} if writer.definitions else {})}


def _check_depth(written: Any, definitions: dict[str, Any]) -> None:
    """Refuse what llguidance would follow too deeply: its stack would overflow, which ends the process."""
    waiting, seen = [(written, 0)], set[str]()
    while waiting:
        schema, depth = waiting.pop()
        if depth > MAX_LEVELS:
            raise cannot_be_enforced("#", f"references to references, more than {MAX_LEVELS} levels deep")
        if isinstance(schema, bool):
            continue
        below = [child for _, _, child in children(schema)]
        name = schema.get("$ref", "").rpartition("/")[2]
        if name and name not in seen:
            seen.add(name)
            below.append(definitions[name])
        waiting += [(child, depth + 1) for child in reversed(below)]


class _Every:
    """The names of which every one is said something about elsewhere, too."""

    def __contains__(self, name: object) -> bool:
        return True


_EVERY = _Every()
_Shared = frozenset[str | None] | _Every | None
"""Of a schema whose value has to meet others, too: properties, None for items, that others speak of, too."""


@dataclass
class _Writer:
    facts: Facts
    root: Any
    definitions: dict[str, Any] = field(default_factory=dict)
    pending: list[tuple[str, Any, str, _Shared]] = field(default_factory=list)
    """What is to be written as definitions: name, schema, place, and what others speak of."""
    _names: dict[tuple[int, _Shared], str] = field(default_factory=dict)
    _are_bounds_checked: bool = False  # all of them, each against each

    def write(self, schema: Any, at: str, shared: _Shared) -> Any:
        """Return a schema in other words."""
        self.facts.step()
        if isinstance(schema, bool):
            return schema
        said = {keyword: value for keyword, value in schema.items() if not is_note(keyword)}
        rest = said.pop("additionalItems", True)
        if isinstance(said.get("items"), list):
            said |= {"prefixItems": said["items"], "items": rest}
        own = {keyword: value for keyword, value in said.items() if keyword not in (*IN_PLACE, "dependentRequired")}
        num_parts = len(said.get("allOf", ())) + sum(keyword in said for keyword in IN_PLACE if keyword != "allOf")
        is_merged = num_parts + bool(own.keys() & _OF_OBJECTS | own.keys() & _KEYWORDS_OF["array"]) > 1
        if shared is None:
            self._check_numbers(schema, at)
        if (shared is _EVERY and own.keys() & BOUNDS) or {"properties", "patternProperties"} <= own.keys():
            self._check_all_bounds(at)
        inner = self._shared_names(schema) if shared is None and is_merged else shared
        kinds = [kind for kind, keywords in _KEYWORDS_OF.items() if own.keys() <= keywords]
        if kinds and own and not num_parts and shared is None:
            own["type"] = kinds[0]
        conjuncts = list[Any]()
        if (names := self._name_pattern(own.pop("propertyNames", True), at)) is not None:
            conjuncts.append({"patternProperties": {pattern_of(names): True}, "additionalProperties": False})
        if own:
            conjuncts.append(self._own(own, schema, at, inner, is_alone=not num_parts and shared is None))
        for keyword in said:
            if keyword in IN_PLACE or keyword == "dependentRequired":
                conjuncts += self._in_place(keyword, schema, at, inner)
        if num_parts and "unevaluatedProperties" in said:
            conjuncts.append(self._unevaluated(schema, at))
        elif shared is None and is_merged:
            conjuncts += self._closed(schema)
        return _all_of(conjuncts)

    # What is said of a value without a look at other schemas of the same value.

    def _own(self, said: dict[str, Any], schema: Any, at: str, shared: _Shared, *, is_alone: bool) -> dict[str, Any]:
        out = dict(said)
        for keyword, value in said.items():
            if isinstance(value, float) and value.is_integer() and keyword[:3] in ("min", "max"):
                out[keyword] = int(value)
        for left_out, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(out.get(left_out), bool) and out.pop(left_out) and bound in out:
                out[left_out] = out.pop(bound)
        self._strings(out)
        self._arrays(out, schema, at)
        self._objects(out, schema, at, is_alone=is_alone)
        rest: _Shared = None if shared is None else _EVERY
        for keyword, value in out.items():
            place = f"{at}/{keyword}"
            if keyword in ("properties", "patternProperties"):
                is_named = keyword == "properties"
                out[keyword] = {
                    name if is_named else pattern_of(name): self.write(
                        part, f"{place}/{name}", _of_child(shared, name) if is_named else rest
                    )
                    for name, part in value.items()
                }
            elif keyword == "prefixItems":
                out[keyword] = [
                    self.write(part, f"{place}/{index}", _of_child(shared, None)) for index, part in enumerate(value)
                ]
            elif keyword == "items":
                out[keyword] = self.write(value, place, _of_child(shared, None))
            elif keyword == "additionalProperties":
                out[keyword] = self.write(value, place, rest)
        return _counted(out)

    @staticmethod
    def _strings(out: dict[str, Any]) -> None:
        if "pattern" in out:
            out["pattern"] = pattern_of(out["pattern"])
        if "format" in out and (out["format"] not in _FORMATS or "pattern" in out):
            del out["format"]  # it is a note by the standard

    @staticmethod
    def _arrays(out: dict[str, Any], schema: Any, at: str) -> None:
        rest = out.pop("unevaluatedItems", True)
        if rest is not True and "items" not in out:
            if schema.keys() & {*IN_PLACE, "contains"}:
                raise cannot_be_enforced(at, "unevaluatedItems beside schemas of the same array")
            out["items"] = rest
        if out.pop("uniqueItems", False) and out.get("maxItems", 2) > 1:
            raise cannot_be_enforced(at, "uniqueItems")
        least, most = out.pop("minContains", 1), out.pop("maxContains", None)
        if "contains" in out and (least > 0 or most is not None):
            raise cannot_be_enforced(at, "contains")
        out.pop("contains", None)

    def _objects(self, out: dict[str, Any], schema: Any, at: str, *, is_alone: bool) -> None:
        rest = out.pop("unevaluatedProperties", None)
        if rest is not None and not schema.keys() & {*IN_PLACE}:
            out.setdefault("additionalProperties", rest)
        properties, patterns = out.get("properties", {}), out.get("patternProperties", {})
        required = out.get("required", [])
        if is_alone and (properties or patterns) and "additionalProperties" not in out:
            out["additionalProperties"] = False
            if not patterns:
                out["properties"] = {**properties, **{name: True for name in required if name not in properties}}
        if len(patterns) > 1 and len({json.dumps(part, sort_keys=True) for part in patterns.values()}) == 1:
            out["patternProperties"] = {"|".join(f"(?:{each})" for each in patterns): next(iter(patterns.values()))}
        if out.get("minProperties", 0) <= len(set(required)):
            out.pop("minProperties", None)
        is_closed = out.get("additionalProperties") is False and not out.get("patternProperties")
        if out.get("minProperties", 0) > 1 and not is_closed:  # see `_counted` for the others
            # A name may be written twice, and counts once.
            raise cannot_be_enforced(at, "minProperties counting properties without a name in the schema")

    def _name_pattern(self, names: Any, at: str) -> str | None:
        """Return the pattern of the names that a schema accepts; None for all."""
        if isinstance(names, bool):
            return None if names else _NO_NAME
        said = {key for key in names if not is_note(key) and key not in ("type", "format")}
        if "string" not in names.get("type", "string"):
            return _NO_NAME
        if not said:
            return None
        if said == {"$ref"}:
            return self._name_pattern(self.facts.targets[id(names)], at)
        if said == {"pattern"}:
            return str(names["pattern"])
        if said in ({"const"}, {"enum"}):
            words = _words(names)
            return f"^(?:{'|'.join(map(re.escape, words))})$" if words else _NO_NAME
        if said <= {"minLength", "maxLength"}:
            return f"^[\\s\\S]{{{int(names.get('minLength', 0))},{names.get('maxLength', '')}}}$"
        if said == {"not"} and isinstance(names["not"], dict) and names["not"].keys() <= {"const", "enum", "type"}:
            if names["not"].keys() <= {"type"}:
                return _NO_NAME if "string" in names["not"].get("type", "string") else None
            return other_words(_words(names["not"]))
        raise cannot_be_enforced(at, f"propertyNames with {sorted(said)[0]}")

    # Schemas of the same value.

    def _in_place(self, keyword: str, schema: Any, at: str, shared: _Shared) -> list[Any]:
        value, place = schema[keyword], f"{at}/{keyword}"
        match keyword:
            case "$ref":
                return [self._reference(schema, shared)]
            case "allOf":
                return [self.write(part, f"{place}/{index}", shared) for index, part in enumerate(value)]
            case "anyOf":
                return [_any_of(self.write(part, f"{place}/{index}", shared) for index, part in enumerate(value))]
            case "oneOf":
                return [self._one_of(value, place, shared)]
            case "not":
                return [self._without(value, place)]
            case "if":
                then = self.write(schema.get("then", True), f"{at}/then", shared)
                other = self.write(schema.get("else", True), f"{at}/else", shared)
                if then is other is True:
                    return []
                first = _all_of([self.write(value, place, shared), then])
                return [_any_of([first, _all_of([self._without(value, place), other])])]
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                return [
                    _any_of([lacking(name), self._dependent(name, part, f"{place}/{name}")])
                    for name, part in value.items()
                ]
            case _:
                return []

    def _dependent(self, name: str, part: Any, at: str) -> Any:
        if isinstance(part, list):
            return {"required": [name, *part]}
        return _all_of([{"required": [name]}, self.write(part, at, _EVERY)])

    def _reference(self, schema: Any, shared: _Shared) -> Any:
        target = self.facts.targets[id(schema)]
        if isinstance(target, bool):
            return target
        key = (id(target), shared)
        if key not in self._names:
            self._names[key] = f"{len(self._names)}"
            self.pending.append((self._names[key], target, schema["$ref"], shared))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _one_of(self, branches: list[Any], at: str, shared: _Shared) -> Any:
        overlapping: dict[int, list[int]] = {index: [] for index in range(len(branches))}
        pairs = () if self.facts.have_own_constants(branches) else combinations(range(len(branches)), 2)
        for first, second in pairs:
            if not self.facts.are_apart(branches[first], branches[second]):
                overlapping[first].append(second)
                overlapping[second].append(first)
        written = []
        for index, others in overlapping.items():
            one = self.write(branches[index], f"{at}/{index}", _EVERY if others else shared)
            written.append(_all_of([one, *(self._without(branches[other], f"{at}/{other}") for other in others)]))
        return _any_of(written)

    def _without(self, schema: Any, at: str) -> Any:
        return _any_of(self.write(each, at, _EVERY) for each in self.facts.opposite(schema, at))

    # What schemas of the same value say together.

    def _shared_names(self, schema: Any) -> frozenset[str | None]:
        counts = Counter[str | None]()
        for part in self.facts.in_place(schema, IN_PLACE):
            counts.update([*part.get("properties", ())])
            counts.update([None] if part.keys() & {"items", "prefixItems", "unevaluatedItems"} else ())
        return frozenset(name for name, count in counts.items() if count > 1)

    def _closed(self, schema: Any) -> list[Any]:
        parts = [*self.facts.in_place(schema, [keyword for keyword in IN_PLACE if keyword != "not"])]
        names, patterns = _named(parts)
        if not (names or patterns) or any(part.keys() & _OPEN for part in parts):
            return []
        names |= {name: True for part in parts for name in part.get("required", ())}
        return [{"properties": names, "patternProperties": patterns, "additionalProperties": False}]

    def _unevaluated(self, schema: Any, at: str) -> Any:
        if schema["unevaluatedProperties"] is True:
            return True
        surely = [*self.facts.in_place(schema, ("$ref", "allOf"))]
        if any("additionalProperties" in part or ("unevaluatedProperties" in part and part is not schema)
               for part in surely):  # fmt: skip
            return True
        maybe = len([*self.facts.in_place(schema, [keyword for keyword in IN_PLACE if keyword != "not"])])
        if maybe != len(surely):
            raise cannot_be_enforced(at, "unevaluatedProperties beside anyOf, oneOf, if or dependentSchemas")
        names, patterns = _named(surely)
        rest = self.write(schema["unevaluatedProperties"], f"{at}/unevaluatedProperties", _EVERY)
        return {"properties": names, "patternProperties": patterns, "additionalProperties": rest}

    def _check_numbers(self, schema: Any, at: str) -> None:
        """Refuse numbers that llguidance would not count right, or not in time, when it puts schemas together."""
        parts = [*self.facts.in_place(schema, IN_PLACE)]
        steps = [step_of(part["multipleOf"]) for part in parts if "multipleOf" in part]
        most = max((power for _, power in steps), default=0)
        if len(steps) > 1 and lcm(*(whole * 10 ** (most - power) for whole, power in steps)) > _MAX_REMAINDERS:
            raise cannot_be_enforced(at, f"several multipleOf with more than {_MAX_REMAINDERS:,} remainders")
        self._check_bounds(parts, at)

    def _check_all_bounds(self, at: str) -> None:
        """Check the bounds of all schemas together: here is one that meets others, from wherever, or is an opposite."""
        if not self._are_bounds_checked:
            parts = [*self.facts.in_place(self.root, _EVERY)]
            is_negated = any(part.keys() & {"not", "if", "oneOf"} for part in parts)
            self._check_bounds([*parts, *(opposite_bounds(parts) if is_negated else ())], at)
            self._are_bounds_checked = True

    @staticmethod
    def _check_bounds(parts: list[dict[str, Any]], at: str) -> None:
        for ending, other, rounded in (("Minimum", "aximum", floor), ("Maximum", "inimum", ceil)):
            given = [(part.get(f"exclusive{ending}", False), part.get(ending.lower())) for part in parts]
            left_out = {plain if bound is True else bound for bound, plain in given if bound is not False}
            for value in (value for part in parts for key, value in part.items() if key.endswith(other)):
                bound = rounded(value)
                if value != bound and bound in left_out and (bound == 0 or (bound > 0) == (rounded is floor)):
                    raise cannot_be_enforced(at, f"exclusive{ending} {bound} less than 1 from the other bound")


def _words(schema: dict[str, Any]) -> list[str]:
    """Return the texts among a schema's constants."""
    return [word for word in schema.get("enum", [schema.get("const")]) if isinstance(word, str)]


def _counted(out: dict[str, Any]) -> dict[str, Any]:
    """Return an object whose optional names are counted as alternatives, each with some of them."""
    properties, required = out.get("properties", {}), out.get("required", [])
    optional = [name for name, part in properties.items() if name not in required and part is not False]
    least = out.get("minProperties", 0) - len(required)
    most = min(out.get("maxProperties", inf) - len(required), len(optional))
    is_closed = out.get("additionalProperties") is False and not out.get("patternProperties")
    if not is_closed or not optional or (least <= 0 and most == len(optional)) or most < max(least, 0):
        return out
    least, most = max(least, 0), int(most)
    if comb(len(optional), most) * comb(most, least) > _MAX_ALTERNATIVES:
        return out
    rest = {key: value for key, value in out.items() if key not in ("minProperties", "maxProperties")}
    several = [
        {**rest, "properties": {name: part for name, part in properties.items() if name in {*required, *some}},
         "required": [*required, *musts]}
        for some in combinations(optional, most) for musts in combinations(some, least)
    ]  # fmt: skip
    return {"anyOf": several}


def _any_of(schemas: Iterable[Any]) -> Any:
    several = [schema for schema in schemas if schema is not False]
    if True in several:
        return True
    return False if not several else several[0] if len(several) == 1 else {"anyOf": several}


def _all_of(schemas: Iterable[Any]) -> Any:
    several = [schema for schema in schemas if schema is not True]
    if False in several:
        return False
    return True if not several else several[0] if len(several) == 1 else {"allOf": several}


def _of_child(shared: _Shared, name: str | None) -> _Shared:
    return _EVERY if shared is not None and name in shared else None


def _named(parts: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = {name: True for part in parts for name in part.get("properties", ())}
    return names, {pattern_of(key): True for part in parts for key in part.get("patternProperties", ())}
