"""A JSON schema said in the keywords that llguidance enforces: the same values or fewer, never more.

References become `$defs` of their own. Objects are closed: unless a schema says what further properties may be, there
are none. Where several schemas are about the same object (`allOf`, a `$ref` with keywords beside it, ...), all of their
properties may be.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
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
from raypp.grammar.schema_facts import Facts, lacking, opposite_bounds, other_words

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
        conjuncts = [each for each in conjuncts if each is not True]
        if False in conjuncts:
            return False
        return True if not conjuncts else conjuncts[0] if len(conjuncts) == 1 else {"allOf": conjuncts}

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
