"""What a JSON schema does not accept."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any, Protocol

from raypp.errors import RequestError
from raypp.grammar.schema_check import cannot_be_enforced, is_note
from raypp.grammar.schema_keywords import (
    OF_NUMBERS,
    check_keywords,
    count_of,
    distinct,
    fraction_of,
    lacking,
    map_of,
    of_scalar,
    other_counts,
    other_numbers,
    other_types,
    required_of,
    some,
    types_of,
    without_declarations,
)
from raypp.grammar.schema_references import References
from raypp.grammar.schema_shapes import (
    ANY,
    EVERYTHING,
    Array,
    ArrayLayer,
    Number,
    Object,
    ObjectLayer,
    Shape,
    Shapes,
    String,
    Terms,
    array,
    object_,
)


class _Accepted(Protocol):
    """See `schema_alternatives.Alternatives`."""

    references: References

    def terms(self, schema: Any, *, is_met: bool = True) -> Terms: ...
    def of(self, terms: Terms, *, wide: bool = False) -> Shapes: ...
    def meet(self, parts: Iterable[Shapes]) -> Shapes: ...
    def share_nothing(self, a: Any, b: Any) -> bool: ...
    def structure(self, value: Any, parent: dict[str, Any]) -> dict[str, Any]: ...
    def is_structure(self, schema: dict[str, Any]) -> bool: ...


class Complements:
    """The sets of what does not meet a schema, of its parts by what they accept."""

    def __init__(self, accepted: _Accepted) -> None:
        """Compute nothing yet."""
        self._all = accepted

    def of(self, schema: dict[str, Any], path: str, wide: bool) -> Shapes:
        """Return the sets of what does not meet a schema.

        Args:
            schema: A part of the whole.
            path: Its place.
            wide: Whether they may hold more than that, in place of less.

        Raises:
            RequestError: names a keyword whose complement cannot be said.
        """
        check_keywords(schema, path)
        shapes = list[Shape]()
        for keyword in schema:
            if is_note(keyword) or keyword in ("then", "else", "minContains", "maxContains"):
                continue
            try:
                shapes += self._breaking(keyword, schema, path, wide)
            except RequestError:
                if not wide:
                    raise
                return EVERYTHING
        return distinct(map(without_declarations, shapes))

    def _breaking(self, keyword: str, schema: dict[str, Any], path: str, wide: bool) -> Iterable[Shape]:
        """Return the sets of what one keyword does not accept, of `wide` at least as much."""
        value = schema[keyword]

        def unmet(part: Any) -> Shapes:
            return self._all.of(self._all.terms(part, is_met=False), wide=wide)

        match keyword:
            case "type":
                return other_types(types_of(schema, path, wide=True), wide)
            case "const" | "enum":
                return self._other_values([value] if keyword == "const" else value, schema, wide)
            case "$ref" | "$dynamicRef":
                return unmet(self._all.references.target(schema, keyword))
            case "allOf":
                return [shape for part in value for shape in unmet(part)]
            case "anyOf":
                return self._all.meet(unmet(part) for part in value)
            case "oneOf" if all(self._all.share_nothing(*pair) for pair in combinations(value, 2)):
                return self._all.meet(unmet(part) for part in value)
            case "not":
                return self._all.of(self._all.terms(value), wide=wide)
            case "if":
                met, other = self._all.terms(value), self._all.terms(value, is_met=False)
                met |= self._all.terms(schema.get("then", True), is_met=False)
                other |= self._all.terms(schema.get("else", True), is_met=False)
                return (*self._all.of(met, wide=wide), *self._all.of(other, wide=wide))
            case _ if keyword in OF_NUMBERS:
                return other_numbers(keyword, schema, path)
            case "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties":
                return other_counts(keyword, count_of(schema, keyword, path) or 0)
            case "format" | "$anchor" | "$dynamicAnchor" | "$vocabulary":
                return ()
            case "required":
                return [Object((lacking(name),)) for name in required_of(schema, path)]
            case "properties":
                of_names = {
                    name: ObjectLayer(((name, self._all.terms(part, is_met=False)),)) for name, part in value.items()
                }
                return some(object_(Object((layer,), frozenset([name]))) for name, layer in of_names.items())
            case "dependentRequired":
                pairs = [(name, other) for name, names in map_of(schema, keyword, list, path) for other in names]
                return some(object_(Object((lacking(other),), frozenset([name]))) for name, other in pairs)
            case "dependentSchemas":
                return [
                    shape
                    for name, part in value.items()
                    for shape in self._all.meet([(Object(required=frozenset([name])),), unmet(part)])
                ]
            case "prefixItems":
                parts = [self._all.terms(part, is_met=False) for part in value]
                layers = [ArrayLayer((ANY,) * index + (part,)) for index, part in enumerate(parts)]
                return some(array(Array((layer,), min_items=index + 1)) for index, layer in enumerate(layers))
            case "items" | "unevaluatedItems" | "additionalProperties" | "unevaluatedProperties" | "propertyNames" if (
                value is True
            ):
                return ()
            case "items" if value is False:
                return [Array(min_items=len(schema.get("prefixItems", ())) + 1)]
            case "additionalProperties" if self._all.is_structure(schema) and not wide:
                return ()  # narrower: what has further names is not in any set
            case "patternProperties" if all(part is True for part in value.values()):
                return ()
            case "uniqueItems" if value is False:
                return ()
            case "contains" if not schema.keys() & {"minContains", "maxContains"}:
                return [Array((ArrayLayer((), self._all.terms(value, is_met=False)),))]
        raise cannot_be_enforced(path, f"{keyword} within not, if or one of several oneOf that share a value")

    def _other_values(self, values: list[Any], schema: dict[str, Any], wide: bool) -> Shapes:
        strings = frozenset(value for value in values if isinstance(value, str))
        parts: list[Shapes] = [
            (*(shape for shape in EVERYTHING if not isinstance(shape, String)), String(excluded=strings))
        ]
        for value in values:
            if isinstance(value, dict | list):
                made = self._all.structure(value, schema)
                parts.append(self._all.of(self._all.terms(made, is_met=False), wide=wide))
            elif isinstance(value, bool) or value is None:
                parts.append(tuple(shape for shape in EVERYTHING if shape != of_scalar(value)[0]))
            elif not isinstance(value, str):
                given = fraction_of(value)
                numbers = (Number(high=given, is_below=True), Number(low=given, is_above=True))
                parts.append((*(shape for shape in EVERYTHING if not isinstance(shape, Number)), *numbers))
        return self._all.meet(parts)
