"""A JSON schema in words that llguidance follows to the letter: one type at a time, nothing beside choices and `$ref`.

`schema_alternatives` says what there is to write, and says it without `allOf`, `not` and the like.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any

from raypp.errors import RequestError
from raypp.grammar.json_pattern import UnsupportedPatternError, length_of_text_pattern, other_texts_pattern
from raypp.grammar.schema_alternatives import Alternatives
from raypp.grammar.schema_check import cannot_be_enforced, enforceable
from raypp.grammar.schema_shapes import ANY, NEVER, Array, Constant, Number, Object, Shape, String, Terms, matches

_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)  # that llguidance knows
_MAX_EXACT = 2**53  # it keeps numbers as floats
_MAX_LENGTH = 20_000
_MAX_PARTS = 20_000
_MAX_REMAINDERS = 2_000
"""What is left of a division has a state of its own for each value, and each is tried with every token."""
_MAX_MULTIPLES = 256
"""Multiples between two bounds that are counted up."""


def rewritten(schema: Any) -> Any:
    """Return a schema that accepts nothing else than the given one, and that llguidance follows to the letter.

    Raises:
        RequestError: names a part that could not be enforced.
    """
    try:
        return _Writer(Alternatives(schema)).write()
    except RecursionError:
        raise cannot_be_enforced("the schema", "parts that refer to each other too often") from None


def enforceable_by_xgrammar(schema: Any) -> Any:
    """Return a schema that accepts nothing else than the given one, and that xgrammar follows to the letter.

    Raises:
        RequestError: names the first part that could not be enforced.
    """
    try:
        return enforceable(schema)
    except RequestError:
        with suppress(RequestError):
            return enforceable(rewritten(schema))
        raise


class _Writer:
    def __init__(self, alternatives: Alternatives) -> None:
        self._alternatives = alternatives
        self._root = ANY
        self._shapes: dict[Terms, list[Shape]] = {}
        self._names: dict[Terms, str] = {}

    def write(self) -> Any:
        self._root = self._alternatives.root
        if self._root == ANY:
            return True
        self._find()
        self._drop_what_never_ends()
        if not self._shapes[self._root]:
            raise cannot_be_enforced("#", "a schema that no value is accepted by")
        definitions = {}
        for terms, shapes in self._shapes.items():
            if shapes and not _is_flat(shapes):
                definitions[self._name(terms)] = self._choice(terms)
        written = self._reference(self._root)
        return {"$defs": definitions, **written} if definitions else written

    def _find(self) -> None:
        """Find all sets that can be reached, with objects and arrays made ready to be written."""
        waiting = deque([self._root])
        while waiting:
            terms = waiting.popleft()
            if terms in self._shapes or terms == ANY:
                continue
            if len(self._shapes) > _MAX_PARTS:
                raise cannot_be_enforced("the schema", f"more than {_MAX_PARTS:,} parts")
            self._shapes[terms] = [shape for shape in self._alternatives.of(terms) if self._may_be(shape)]
            for shape in self._shapes[terms]:
                waiting += _children(shape)

    def _may_be(self, shape: Shape) -> bool:
        """Return whether an object may have the names that it has to have."""
        if not isinstance(shape, Object) or shape.names == ANY:
            return True
        return all(self._takes(shape.names, name) for name in shape.required)

    def _drop_what_never_ends(self) -> None:
        """Leave out sets in which every value would have to hold a value of the same, for ever."""
        ending: set[Terms] = {ANY}
        size = -1
        while size != len(ending):
            size = len(ending)
            ending |= {terms for terms, shapes in self._shapes.items() if any(_ends(shape, ending) for shape in shapes)}
        for shapes in self._shapes.values():
            shapes[:] = [shape for shape in shapes if _ends(shape, ending)]

    def _name(self, terms: Terms) -> str:
        return self._names.setdefault(terms, str(len(self._names)))

    def _reference(self, terms: Terms) -> Any:
        if terms == ANY:
            return True
        shapes = [] if terms >= NEVER else self._shapes[terms]
        if not shapes:
            return False
        return self._choice(terms) if _is_flat(shapes) else {"$ref": f"#/$defs/{self._name(terms)}"}

    def _choice(self, terms: Terms) -> Any:
        path = self._alternatives.path_of(terms)
        written = [self._one(shape, path) for shape in self._shapes[terms]]
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _one(self, shape: Shape, path: str) -> dict[str, Any]:
        match shape:
            case Constant(value):
                return {"const": value}
            case Number():
                return _number(shape, path)
            case String():
                return _string(shape, path)
            case Array():
                return self._array(shape, path)
            case Object():
                return self._object(shape, path)

    def _array(self, shape: Array, path: str) -> dict[str, Any]:
        if shape.is_unique and (shape.max_items is None or shape.max_items > 1):
            raise cannot_be_enforced(path, "uniqueItems")
        indices = range(shape.num_prefix)
        written: dict[str, Any] = {"type": "array", "items": self._reference(shape.child(shape.num_prefix))}
        if indices:
            written["prefixItems"] = [self._reference(shape.child(index)) for index in indices]
        if shape.min_items:
            written["minItems"] = shape.min_items
        if shape.max_items is not None:
            written["maxItems"] = shape.max_items
        return written

    def _object(self, shape: Object, path: str) -> dict[str, Any]:
        properties, patterns, rest = _fields(shape)
        properties = {name: self._kept(shape, name, terms) for name, terms in properties.items()}
        if shape.names != ANY and (patterns or rest != NEVER):
            if patterns:
                raise cannot_be_enforced(path, "propertyNames beside patternProperties")
            patterns, rest = self._named(shape, rest, properties, path), NEVER
        if rest == NEVER and not patterns:
            properties = {name: terms for name, terms in properties.items() if self._reference(terms) is not False}
        num_open = shape.min_properties - len(shape.required)
        if num_open > 1 and (patterns or rest != NEVER):
            # A name may be written twice, and counts once.
            raise cannot_be_enforced(path, "minProperties counting properties without a name in the schema")
        written: dict[str, Any] = {"type": "object", "additionalProperties": self._reference(rest)}
        if properties:
            written["properties"] = {name: self._reference(terms) for name, terms in properties.items()}
        if patterns:
            written["patternProperties"] = {f"^({key})$": self._reference(terms) for key, terms in patterns.items()}
        if shape.required:
            written["required"] = sorted(shape.required)
        if num_open > 0:
            written["minProperties"] = shape.min_properties
        if shape.max_properties is not None:
            written["maxProperties"] = shape.max_properties
        return written

    def _kept(self, shape: Object, name: str, terms: Terms) -> Terms:
        """Return what a property has to meet, nothing if it must not have its name."""
        if shape.names == ANY or self._takes(shape.names, name):
            return terms
        return NEVER

    def _takes(self, names: Terms, name: str) -> bool:
        return any(isinstance(kind, String) and _holds(kind, name) for kind in self._alternatives.of(names))

    def _named(self, shape: Object, rest: Terms, properties: dict[str, Terms], path: str) -> dict[str, Terms]:
        """Return patterns for the further names that may be; those that are counted up become properties."""
        patterns: dict[str, Terms] = {}
        for kind in self._alternatives.of(shape.names):
            if not isinstance(kind, String):
                continue
            if kind.values is not None:
                properties |= {name: rest for name in sorted(kind.values) if name not in properties}
                continue
            try:
                written = [*kind.patterns]
                written += [other_texts_pattern(kind.excluded)] if kind.excluded else []
                if kind.min_length or kind.max_length is not None:
                    written.append(length_of_text_pattern(kind.min_length, kind.max_length))
            except UnsupportedPatternError as error:
                raise cannot_be_enforced(path, f"propertyNames of {error}") from None
            if len(written) > 1:
                raise cannot_be_enforced(path, "propertyNames with more than one of a pattern, lengths and values")
            patterns[written[0] if written else length_of_text_pattern(0, None)] = rest
        return patterns


def _fields(shape: Object) -> tuple[dict[str, Terms], dict[str, Terms], Terms]:
    """Return what the named properties have to meet, those that match a pattern, and all others."""
    properties = {name: shape.child(name) for layer in shape.layers for name, _ in layer.properties}
    properties |= {name: shape.child(name) for name in sorted(shape.required) if name not in properties}
    rest = ANY.union(*(layer.additional or ANY for layer in shape.layers))
    given = dict.fromkeys(pattern for layer in shape.layers for pattern, _ in layer.patterns)
    patterns = {}
    for pattern in given:
        said = [dict(layer.patterns).get(pattern, layer.additional) or ANY for layer in shape.layers]
        patterns[pattern] = ANY.union(*said)
    if len(patterns) > 1 and len({*patterns.values()}) == 1:
        patterns = {"|".join(f"({pattern})" for pattern in patterns): next(iter(patterns.values()))}
    says_rest = any(layer.additional is not None for layer in shape.layers)
    has_names = any(layer.is_declared and (layer.properties or layer.patterns) for layer in shape.layers)
    return properties, patterns, rest if says_rest or not has_names else NEVER


def _children(shape: Shape) -> list[Terms]:
    match shape:
        case Array():
            return [terms for index in range(shape.num_prefix + 1) if not (terms := shape.child(index)) >= NEVER]
        case Object():
            properties, patterns, rest = _fields(shape)
            return [terms for terms in (*properties.values(), *patterns.values(), rest) if not terms >= NEVER]
        case _:
            return []


def _ends(shape: Shape, ending: set[Terms]) -> bool:
    match shape:
        case Array():
            return all(shape.child(index) in ending for index in range(min(shape.min_items, shape.num_prefix + 1)))
        case Object():
            return all(shape.child(name) in ending for name in shape.required)
        case _:
            return True


def _is_flat(shapes: list[Shape]) -> bool:
    return not any(isinstance(shape, Array | Object) for shape in shapes)


def _holds(kind: String, text: str) -> bool:
    if kind.values is not None:
        return text in kind.values
    most = len(text) if kind.max_length is None else kind.max_length
    in_bounds = kind.min_length <= len(text) <= most
    return in_bounds and text not in kind.excluded and all(matches(pattern, text) for pattern in kind.patterns)


def _number(shape: Number, path: str) -> dict[str, Any]:
    is_whole = shape.step is not None and shape.step.denominator == 1
    if shape.low is not None and shape.low == shape.high and shape.low.denominator == 1:
        is_whole, shape = True, replace(shape, step=None)
    written: dict[str, Any] = {"type": "integer" if is_whole else "number"}
    if shape.low is not None:
        written["exclusiveMinimum" if shape.is_above else "minimum"] = _exact(shape.low, path)
    if shape.high is not None:
        written["exclusiveMaximum" if shape.is_below else "maximum"] = _exact(shape.high, path)
    if not is_whole and _is_misread(shape):
        raise cannot_be_enforced(path, "a bound that is left out, whole, and less than 1 from the other bound")
    if shape.step is not None and shape.step != 1:
        if shape.low is not None and shape.high is not None and shape.high - shape.low <= _MAX_MULTIPLES * shape.step:
            return {"enum": [_exact(shape.low + i * shape.step, path) for i in range(_num_multiples(shape))]}
        written["multipleOf"] = _exact(shape.step, path)
        if shape.step.numerator > _MAX_REMAINDERS:
            raise cannot_be_enforced(
                path, f"multipleOf {written['multipleOf']}, of more than {_MAX_REMAINDERS:,} remainders"
            )
    return written


def _is_misread(shape: Number) -> bool:
    """Return whether llguidance would take a bound that is left out, since what is before the point is the same."""
    low, high = shape.low, shape.high
    if low is None or high is None or high - low >= 1:
        return False
    return (shape.is_above and low >= 0 and low.denominator == 1) or (
        shape.is_below and high <= 0 and high.denominator == 1
    )


def _num_multiples(shape: Number) -> int:
    assert shape.low is not None
    assert shape.high is not None
    assert shape.step is not None
    return int((shape.high - shape.low) / shape.step) + 1


def _exact(value: Fraction, path: str) -> float:
    number = int(value) if value.denominator == 1 else float(value)
    if abs(value) > _MAX_EXACT or Fraction(str(number)) != value:
        raise cannot_be_enforced(path, f"the number {str(value)[:40]}, which a double does not hold exactly")
    return number


def _string(shape: String, path: str) -> dict[str, Any]:
    if shape.values is not None:
        for value in shape.values:
            if any((char < " " and char not in "\b\t\n\f\r") or char == "\x7f" for char in value):
                raise cannot_be_enforced(path, f"the value {value[:40]!r}, with a control character")
        return {"enum": sorted(shape.values)}
    if max(shape.min_length, shape.max_length or 0) > _MAX_LENGTH:
        raise cannot_be_enforced(path, f"a length above {_MAX_LENGTH:,}")
    written: dict[str, Any] = {"type": "string"}
    if shape.min_length:
        written["minLength"] = shape.min_length
    if shape.max_length is not None:
        written["maxLength"] = shape.max_length
    patterns = sorted(shape.patterns)
    if shape.excluded:
        try:
            patterns.append(other_texts_pattern(shape.excluded))
        except UnsupportedPatternError as error:
            raise cannot_be_enforced(path, str(error)) from None
    if written.keys() == {"type"} and not patterns and len(shape.formats) == 1 and shape.formats <= _FORMATS:
        written["format"] = next(iter(shape.formats))
    if patterns:
        written["pattern"] = f"^({patterns[0]})$"
    if len(patterns) > 1:
        further = [{"type": "string", "pattern": f"^({pattern})$"} for pattern in patterns[1:]]
        return {"allOf": [written, *further]}
    return written
