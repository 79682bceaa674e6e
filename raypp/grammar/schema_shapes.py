"""Sets of JSON values of one type each, and what two of them share.

A set of any values is a list of these, read as "one of them". What is inside of arrays and objects is only named here,
by the terms that it has to meet: `schema_alternatives` says what they are. So recursive schemas are finite.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

Term = tuple[bool, int]
"""A schema by its number, and whether values have to meet it, or must not."""
Terms = frozenset[Term]
"""What a value has to meet, all of it."""

ANY: Terms = frozenset()
NEVER: Terms = frozenset([(False, -1)])


@dataclass(frozen=True)
class Constant:
    """`true`, `false` or `null`."""

    value: bool | None


@dataclass(frozen=True)
class Number:
    """Numbers between two bounds; of integers, `step` is whole."""

    low: Fraction | None = None
    high: Fraction | None = None
    is_above: bool = False  # whether low itself is left out
    is_below: bool = False
    step: Fraction | None = None


@dataclass(frozen=True)
class String:
    """Strings. Patterns match all of a text; see `json_pattern.text_pattern`."""

    min_length: int = 0
    max_length: int | None = None
    patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    values: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ArrayLayer:
    """What one schema says of an array's items."""

    prefix: tuple[Terms, ...] = ()
    items: Terms | None = None
    is_declared: bool = True  # whether items that it speaks of count as evaluated

    def child(self, index: int) -> Terms:
        """Return what an item has to meet."""
        return self.prefix[index] if index < len(self.prefix) else self.items or ANY


@dataclass(frozen=True)
class Array:
    """Arrays."""

    layers: tuple[ArrayLayer, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    is_unique: bool = False

    @property
    def num_prefix(self) -> int:
        """The items that have something said of their place."""
        return max((len(layer.prefix) for layer in self.layers), default=0)

    def child(self, index: int) -> Terms:
        """Return what an item has to meet."""
        return ANY.union(*(layer.child(index) for layer in self.layers))


@dataclass(frozen=True)
class ObjectLayer:
    """What one schema says of an object's properties."""

    properties: tuple[tuple[str, Terms], ...] = ()
    patterns: tuple[tuple[str, Terms], ...] = ()
    additional: Terms | None = None
    is_declared: bool = True  # whether properties that it speaks of count as evaluated, and as names to choose from

    def child(self, name: str) -> Terms:
        """Return what a property has to meet."""
        found = [terms for key, terms in self.properties if key == name]
        found += [terms for pattern, terms in self.patterns if matches(pattern, name)]
        return ANY.union(*found) if found else self.additional or ANY


@dataclass(frozen=True)
class Object:
    """Objects."""

    layers: tuple[ObjectLayer, ...] = ()
    required: frozenset[str] = frozenset()
    min_properties: int = 0
    max_properties: int | None = None
    names: Terms = ANY  # what every name has to meet

    def child(self, name: str) -> Terms:
        """Return what a property has to meet."""
        return ANY.union(*(layer.child(name) for layer in self.layers))


Shape = Constant | Number | String | Array | Object
Shapes = tuple[Shape, ...]

OF_TYPE: dict[str, Shapes] = {
    "null": (Constant(None),),
    "boolean": (Constant(True), Constant(False)),
    "number": (Number(),),
    "integer": (Number(step=Fraction(1)),),
    "string": (String(),),
    "array": (Array(),),
    "object": (Object(),),
}
EVERYTHING: Shapes = tuple(shape for name, shapes in OF_TYPE.items() if name != "integer" for shape in shapes)


def meet(a: Shape, b: Shape) -> Shape | None:
    """Return what two sets share; None if that is plainly nothing."""
    match a, b:
        case Constant(), Constant():
            return a if a.value is b.value else None
        case Number(), Number():
            return number(_numbers(a, b))
        case String(), String():
            return _strings(a, b)
        case Array(), Array():
            most = _least(a.max_items, b.max_items)
            layers = tuple(dict.fromkeys(a.layers + b.layers))
            return array(Array(layers, max(a.min_items, b.min_items), most, a.is_unique or b.is_unique))
        case Object(), Object():
            most = _least(a.max_properties, b.max_properties)
            layers_ = tuple(dict.fromkeys(a.layers + b.layers))
            least = max(a.min_properties, b.min_properties)
            return object_(Object(layers_, a.required | b.required, least, most, a.names | b.names))
        case _:
            return None


def number(shape: Number) -> Number | None:
    """Return a set of numbers with bounds that are in it where steps say so; None if it is empty."""
    low, high, step = shape.low, shape.high, shape.step
    if step is not None:
        if low is not None:
            low = step * (math.floor(low / step) + 1 if shape.is_above else math.ceil(low / step))
        if high is not None:
            high = step * (math.ceil(high / step) - 1 if shape.is_below else math.floor(high / step))
        shape = Number(low, high, False, False, step)
    if low is not None and high is not None and (low > high or (low == high and (shape.is_above or shape.is_below))):
        return None
    return shape


def array(shape: Array) -> Array | None:
    """Return a set of arrays that ends before an item that cannot be; None if it is empty."""
    for index in range(shape.num_prefix + 1):
        if shape.child(index) >= NEVER:
            shape = replace(shape, max_items=_least(shape.max_items, index))
            break
    return None if shape.max_items is not None and shape.min_items > shape.max_items else shape


def object_(shape: Object) -> Object | None:
    """Return a set of objects; None if it is empty."""
    most = shape.max_properties
    if most is not None and max(shape.min_properties, len(shape.required)) > most:
        return None
    return None if any(shape.child(name) >= NEVER for name in shape.required) else shape


def _numbers(a: Number, b: Number) -> Number:
    lows = [(shape.low, shape.is_above) for shape in (a, b) if shape.low is not None]
    highs = [(shape.high, not shape.is_below) for shape in (a, b) if shape.high is not None]
    low, is_above = max(lows, default=(None, False))
    high, is_within = min(highs, default=(None, True))
    steps = [shape.step for shape in (a, b) if shape.step is not None]
    step = steps[0] if steps else None
    if len(steps) == 2:
        numerator = math.lcm(steps[0].numerator, steps[1].numerator)
        step = Fraction(numerator, math.gcd(steps[0].denominator, steps[1].denominator))
    return Number(low, high, is_above, not is_within, step)


def _strings(a: String, b: String) -> String | None:
    values = a.values if b.values is None else b.values if a.values is None else a.values & b.values
    most = _least(a.max_length, b.max_length)
    shape = String(
        max(a.min_length, b.min_length), most, a.patterns | b.patterns, a.formats | b.formats, values,
        a.excluded | b.excluded,
    )  # fmt: skip
    if most is not None and shape.min_length > most:
        return None
    if values is None:
        return shape
    kept = frozenset(value for value in values if _is_in(shape, value))
    return String(values=kept) if kept else None


def _is_in(shape: String, value: str) -> bool:
    return (
        shape.min_length <= len(value) <= (len(value) if shape.max_length is None else shape.max_length)
        and value not in shape.excluded
        and all(matches(pattern, value) for pattern in shape.patterns)
    )


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern of `json_pattern.text_pattern` is a text's."""
    return _compiled(pattern).match(text) is not None


@lru_cache(4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(f"(?:{pattern})\\Z")
