"""A JSON schema said in the keywords that llguidance enforces: the same values or fewer, never more.

References become `$defs` of their own. Objects are closed: unless a schema says what further properties may be, there
are none. Where several schemas are about the same object (`allOf`, a `$ref` with keywords beside it, ...), all of their
properties may be.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import ceil, floor, inf, lcm
from typing import Any

from raypp.grammar.schema_check import IN_PLACE, cannot_be_enforced, checked, children, is_note, pattern_of, step_of

_FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
_OF_OBJECTS = {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"}
_KEYWORDS_OF = {
    "object": _OF_OBJECTS | {"required", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"},
}
_OPEN = _OF_OBJECTS - {"properties", "patternProperties"}
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
_MAX_REMAINDERS = 10_000
_MAX_WORD_CHARS = 100  # of a text that a pattern leaves out: it is nested as deep


def rewritten(schema: Any) -> Any:
    """Return a schema that accepts nothing else than the given one, in keywords that llguidance enforces.

    Raises:
        RequestError: names the first part that could not be enforced.
    """
    writer = _Writer(checked(schema))
    try:
        written = writer.write(schema, "#", None)
    except RecursionError:
        raise cannot_be_enforced("#", "parts that refer to each other too often") from None
    if written is False:
        raise cannot_be_enforced("#", "a schema that accepts no value")
    return {**({} if written is True else written), **({"$defs": writer.definitions} if writer.definitions else {})}


class _Every:
    """The names of which every one is said something about elsewhere, too."""

    def __contains__(self, name: object) -> bool:
        return True


_EVERY = _Every()
_Shared = frozenset[str | None] | _Every | None
"""Of a schema whose value has to meet others, too: properties, None for items, that others speak of, too."""


@dataclass
class _Writer:
    targets: dict[int, Any]
    definitions: dict[str, Any] = field(default_factory=dict)
    _names: dict[tuple[int, _Shared], str] = field(default_factory=dict)
    _num_steps: int = 0

    def write(self, schema: Any, at: str, shared: _Shared) -> Any:
        """Return a schema in other words."""
        self._step()
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
        inner = self._shared_names(schema) if shared is None and is_merged else shared
        if not num_parts and shared is None and "type" not in own and own:
            own |= {"type": name for name, keywords in _KEYWORDS_OF.items() if own.keys() <= keywords}
        conjuncts = list[Any]()
        if own:
            conjuncts.append(self._own(own, schema, at, inner, is_alone=not num_parts and shared is None))
        for keyword in said:
            if keyword in IN_PLACE or keyword == "dependentRequired":
                conjuncts += self._in_place(keyword, schema, at, inner)
        if num_parts and "unevaluatedProperties" in said:
            conjuncts.append(self._unevaluated(schema, at))
        elif shared is None and is_merged:
            conjuncts += self._closed(schema)
        conjuncts = [each for each in conjuncts if each is not True]
        if False in conjuncts:
            return False
        return True if not conjuncts else conjuncts[0] if len(conjuncts) == 1 else {"allOf": conjuncts}

    def _step(self) -> None:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise cannot_be_enforced("#", "parts that refer to each other too often")

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
        return out

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
        if "propertyNames" in out:
            self._property_names(out, at)
        elif is_alone and (properties or patterns):
            out.setdefault("additionalProperties", False)
        if len(patterns) > 1 and len({json.dumps(part, sort_keys=True) for part in patterns.values()}) == 1:
            out["patternProperties"] = {"|".join(f"(?:{each})" for each in patterns): next(iter(patterns.values()))}
        required = out.get("required", [])
        if out.get("additionalProperties") is False and not patterns and is_alone and "propertyNames" not in schema:
            if "additionalProperties" not in schema:
                out["properties"] = {**properties, **{name: True for name in required if name not in properties}}
            if out.get("minProperties", 0) == len(out.get("properties", ())):
                required = out["required"] = list(out.get("properties", ()))
        if out.get("minProperties", 0) <= len(set(required)):
            out.pop("minProperties", None)
        is_closed = out.get("additionalProperties") is False and not out.get("patternProperties")
        if out.get("minProperties", 0) > 1 and not is_closed:
            # A name may be written twice, and counts once.
            raise cannot_be_enforced(at, "minProperties counting properties without a name in the schema")

    def _property_names(self, out: dict[str, Any], at: str) -> None:
        pattern = self._name_pattern(out.pop("propertyNames"), at)
        if pattern is None:
            return
        if out.get("patternProperties"):
            raise cannot_be_enforced(at, "propertyNames beside patternProperties")
        try:
            named = {name: part for name, part in out.get("properties", {}).items() if re.search(pattern, name)}
        except re.error:
            raise cannot_be_enforced(at, "propertyNames beside properties") from None
        rest = out.get("additionalProperties", not named)
        if named and not isinstance(rest, bool):
            raise cannot_be_enforced(at, "additionalProperties beside propertyNames and properties")
        out |= {"properties": named, "patternProperties": {pattern: rest}, "additionalProperties": False}
        if rest is False:
            del out["patternProperties"]

    def _name_pattern(self, names: Any, at: str) -> str | None:
        """Return the pattern of the names that a schema accepts; None for all."""
        if isinstance(names, bool):
            return None if names else "^[^\\s\\S]$"
        if id(names) in self.targets:
            return self._name_pattern(self.targets[id(names)], at)
        said = {key for key in names if not is_note(key) and key not in ("type", "format")}
        if "string" not in names.get("type", "string"):
            return "^[^\\s\\S]$"
        if not said:
            return None
        if said == {"pattern"}:
            return str(names["pattern"])
        if said <= {"const", "enum"}:
            words = [word for word in names.get("enum", [names.get("const")]) if isinstance(word, str)]
            return f"^(?:{'|'.join(map(re.escape, words))})$"
        if said <= {"minLength", "maxLength"}:
            return f"^[\\s\\S]{{{int(names.get('minLength', 0))},{names.get('maxLength', '')}}}$"
        if said == {"not"} and isinstance(names["not"], dict) and names["not"].keys() <= {"const", "enum", "type"}:
            return _other_words(names["not"].get("enum", [names["not"].get("const")]))
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
                    _any_of([_lacking(name), self._dependent(name, part, f"{place}/{name}")])
                    for name, part in value.items()
                ]
            case _:
                return []

    def _dependent(self, name: str, part: Any, at: str) -> Any:
        if isinstance(part, list):
            return {"required": [name, *part]}
        return _all_of([{"required": [name]}, self.write(part, at, _EVERY)])

    def _reference(self, schema: Any, shared: _Shared) -> Any:
        target = self.targets[id(schema)]
        if isinstance(target, bool):
            return target
        key = (id(target), shared)
        if key not in self._names:
            self._names[key] = f"{len(self._names)}"
            self.definitions[self._names[key]] = True
            self.definitions[self._names[key]] = self.write(target, schema["$ref"], shared)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _one_of(self, branches: list[Any], at: str, shared: _Shared) -> Any:
        overlapping: dict[int, list[int]] = {index: [] for index in range(len(branches))}
        for first, second in combinations(range(len(branches)), 2):
            if not self.are_apart(branches[first], branches[second]):
                overlapping[first].append(second)
                overlapping[second].append(first)
        written = []
        for index, others in overlapping.items():
            one = self.write(branches[index], f"{at}/{index}", _EVERY if others else shared)
            written.append(_all_of([one, *(self._without(branches[other], f"{at}/{other}") for other in others)]))
        return _any_of(written)

    def _without(self, schema: Any, at: str) -> Any:
        return _any_of(self.write(each, at, _EVERY) for each in self._opposite(schema, at))

    def _opposite(self, schema: Any, at: str) -> list[Any]:
        """Return schemas, each of which accepts only what a schema does not accept, together most of it."""
        self._step()
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
                    found += [{"type": "object", **_lacking(name)} for name in value]
                case "properties":
                    for name, part in value.items():
                        if others := self._opposite(part, f"{place}/{name}"):
                            has = {"type": "object", "required": [name]}
                            found.append({**has, "properties": {name: {"anyOf": others}}})
                case "$ref":
                    found += self._opposite(self.targets[id(schema)], schema["$ref"])
                case "allOf":
                    found += [each for part in value for each in self._opposite(part, place)]
                case "anyOf":
                    found.append({"allOf": [{"anyOf": self._opposite(part, place) or [False]} for part in value]})
                case "not":
                    found.append(value)
                case _:
                    raise cannot_be_enforced(at, f"{keyword} within not, if, or oneOf of schemas that share values")
        return found

    # What schemas of the same value say together.

    def in_place(self, schema: Any, keywords: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield a schema and those of the same value that it has by certain keywords."""
        waiting, seen = [schema], set[int]()
        while waiting:
            part = waiting.pop()
            if isinstance(part, bool) or id(part) in seen:
                continue
            self._step()
            seen.add(id(part))
            yield part
            waiting += [child for keyword, _, child in children(part) if keyword in keywords]
            if "$ref" in keywords and id(part) in self.targets:
                waiting.append(self.targets[id(part)])

    def _shared_names(self, schema: Any) -> frozenset[str | None]:
        counts = Counter[str | None]()
        for part in self.in_place(schema, IN_PLACE):
            counts.update([*part.get("properties", ())])
            counts.update([None] if part.keys() & {"items", "prefixItems", "unevaluatedItems"} else ())
        return frozenset(name for name, count in counts.items() if count > 1)

    def _closed(self, schema: Any) -> list[Any]:
        parts = [*self.in_place(schema, [keyword for keyword in IN_PLACE if keyword != "not"])]
        names, patterns = _named(parts)
        if not (names or patterns) or any(part.keys() & _OPEN for part in parts):
            return []
        names |= {name: True for part in parts for name in part.get("required", ())}
        return [{"properties": names, "patternProperties": patterns, "additionalProperties": False}]

    def _unevaluated(self, schema: Any, at: str) -> Any:
        if schema["unevaluatedProperties"] is True:
            return True
        surely = [*self.in_place(schema, ("$ref", "allOf"))]
        if any("additionalProperties" in part or ("unevaluatedProperties" in part and part is not schema)
               for part in surely):  # fmt: skip
            return True
        maybe = len([*self.in_place(schema, [keyword for keyword in IN_PLACE if keyword != "not"])])
        if maybe != len(surely):
            raise cannot_be_enforced(at, "unevaluatedProperties beside anyOf, oneOf, if or dependentSchemas")
        names, patterns = _named(surely)
        rest = self.write(schema["unevaluatedProperties"], f"{at}/unevaluatedProperties", _EVERY)
        return {"properties": names, "patternProperties": patterns, "additionalProperties": rest}

    def _check_numbers(self, schema: Any, at: str) -> None:
        """Refuse numbers that llguidance would not count right, or not in time, when it puts schemas together."""
        parts = [*self.in_place(schema, IN_PLACE)]
        steps = [step_of(part["multipleOf"]) for part in parts if "multipleOf" in part]
        most = max((power for _, power in steps), default=0)
        if len(steps) > 1 and lcm(*(whole * 10 ** (most - power) for whole, power in steps)) > _MAX_REMAINDERS:
            raise cannot_be_enforced(at, f"several multipleOf with more than {_MAX_REMAINDERS:,} remainders")
        for ending, other, rounded in (("Minimum", "aximum", floor), ("Maximum", "inimum", ceil)):
            given = [(part.get(f"exclusive{ending}", False), part.get(ending.lower())) for part in parts]
            left_out = {plain if bound is True else bound for bound, plain in given if bound is not False}
            for value in (value for part in parts for key, value in part.items() if key.endswith(other)):
                bound = rounded(value)
                if value != bound and bound in left_out and (bound == 0 or (bound > 0) == (rounded is floor)):
                    raise cannot_be_enforced(at, f"exclusive{ending} {bound} less than 1 from the other bound")

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
        self._step()
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
        for own, parts in ((values[0], sides[1]), (values[1], sides[0])):
            if own and all(any(_is_unmatched(value, part) for part in parts) for value in own[0]):
                return True
        if common == {"object"}:
            names = {name for parts in sides for part in parts for name in part.get("required", ())}
            return any(self.are_apart(a, b) for name in names for a in _of_name(sides[0], name)
                       for b in _of_name(sides[1], name))  # fmt: skip
        if common == {"number"}:
            return _low(sides[0]) > _high(sides[1]) or _low(sides[1]) > _high(sides[0])
        return False


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


def _lacking(name: str) -> dict[str, Any]:
    return {"properties": {name: False}}


def _types_said(value: str | list[str]) -> frozenset[str]:
    names = [value] if isinstance(value, str) else value
    return frozenset("number" if name == "integer" else name for name in names)


def _named(parts: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = {name: True for part in parts for name in part.get("properties", ())}
    return names, {pattern_of(key): True for part in parts for key in part.get("patternProperties", ())}


def _of_name(parts: list[dict[str, Any]], name: str) -> list[Any]:
    """Return what schemas of an object say of a property, if it is there."""
    found = []
    for part in parts:
        if name in part.get("properties", {}):
            found.append(part["properties"][name])
        elif not part.get("patternProperties"):
            found.append(part.get("additionalProperties", True))
    return found


def _low(parts: list[dict[str, Any]]) -> float:
    return max((part["minimum"] for part in parts if "minimum" in part), default=-inf)


def _high(parts: list[dict[str, Any]]) -> float:
    return min((part["maximum"] for part in parts if "maximum" in part), default=inf)


def _is_unmatched(value: Any, schema: dict[str, Any]) -> bool:
    try:
        return isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value)
    except re.error:
        return False


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
        found.append({"type": "string", "pattern": _other_words(by_type["string"])})
    return found


def _other_words(words: Iterable[str]) -> str:
    """Return the pattern of all texts but some."""

    def behind(rests: list[str]) -> str:
        first = dict.fromkeys(rest[0] for rest in rests if rest)
        branches = [re.escape(char) + behind([rest[1:] for rest in rests if rest[:1] == char]) for char in first]
        branches.append(f"[^{''.join(map(re.escape, first))}][\\s\\S]*" if first else "[\\s\\S]+")
        return f"(?:{'|'.join(branches)}){'' if '' in rests else '?'}"

    return f"^{behind([*words])}$"
