"""What a JSON schema accepts, as sets of values of one type each, one of which a value has to be in.

So `allOf`, `not`, `if`, `oneOf` and the like are computed here, and no grammar has to know of them. Two readings:

- narrow: all that is in the sets is accepted, though not all that is accepted is in them. This is what is generated.
- wide: all that is accepted is in the sets. What shares nothing here shares nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

from raypp.grammar.schema_check import cannot_be_enforced
from raypp.grammar.schema_complements import Complements
from raypp.grammar.schema_keywords import (
    OF_ARRAYS,
    OF_NUMBERS,
    OF_OBJECTS,
    OF_STRINGS,
    check_keywords,
    count_of,
    distinct,
    map_of,
    number_of,
    of_scalar,
    pattern_of,
    required_of,
    string_of,
    types_of,
    without,
    without_declarations,
)
from raypp.grammar.schema_references import References, malformed
from raypp.grammar.schema_shapes import (
    ANY,
    EVERYTHING,
    NEVER,
    OF_TYPE,
    Array,
    ArrayLayer,
    Number,
    Object,
    ObjectLayer,
    Shape,
    Shapes,
    String,
    Term,
    Terms,
    array,
    meet,
    object_,
)

_MAX_SHAPES = 20_000
_MAX_MEETINGS = 300_000
_MAX_HOPS = 4
"""Properties within properties that are looked at for whether two schemas share a value."""
_MAX_CONTAINED = 16

_NO_ARRAYS = tuple(shape for shape in EVERYTHING if not isinstance(shape, Array))


class Alternatives:
    """The sets of one schema and of its parts."""

    def __init__(self, root: Any) -> None:
        """Find the schema's parts.

        Raises:
            RequestError: the schema is too large, or something in it is no schema.
        """
        self.references = References(root)
        self._schemas: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}
        self._known: dict[tuple[Term, bool], Shapes] = {}
        self._open: set[tuple[Term, bool]] = set()
        self._num_meetings = 0
        self._complements = Complements(self)
        self._structures: set[int] = set()  # by identity, the objects that were made of one value
        self.root = self.terms(root)
        """What the schema's values have to meet."""

    def terms(self, schema: Any, *, is_met: bool = True) -> Terms:
        """Return that values meet a schema, or that they do not."""
        if isinstance(schema, bool):
            return ANY if schema == is_met else NEVER
        if id(schema) not in self._numbers:
            self._numbers[id(schema)] = len(self._schemas)
            self._schemas.append(schema)
        return frozenset([(is_met, self._numbers[id(schema)])])

    def of(self, terms: Terms, *, wide: bool = False) -> Shapes:
        """Return the sets of what meets all of the terms.

        Raises:
            RequestError: names a part that cannot be said in this way.
        """
        if terms >= NEVER:
            return ()
        return self.meet(self._of_term(term, wide) for term in sorted(terms, key=lambda term: term[1]))

    def is_empty(self, terms: Terms, num_hops: int = _MAX_HOPS) -> bool:
        """Return whether it is plain that nothing meets all of the terms."""
        return all(self._is_empty(shape, num_hops) for shape in self.of(terms, wide=True))

    def path_of(self, terms: Terms) -> str:
        """Return the place of the part that was met last."""
        known = [number for _, number in terms if number >= 0]
        return self.references.path_of(self._schemas[max(known)]) if known else "#"

    def _is_empty(self, shape: Shape, num_hops: int) -> bool:
        if not num_hops:
            return False
        match shape:
            case Object(required=required):
                return any(self.is_empty(shape.child(name), num_hops - 1) for name in sorted(required))
            case Array(min_items=least):
                seen = range(min(least, shape.num_prefix + 1))
                return any(self.is_empty(shape.child(index), num_hops - 1) for index in seen)
            case _:
                return False

    def meet(self, parts: Iterable[Shapes]) -> Shapes:
        """Return the sets of what is in each of some lists.

        Raises:
            RequestError: there are too many.
        """
        result = EVERYTHING
        for part in parts:
            if part is EVERYTHING or result is EVERYTHING:
                result = result if part is EVERYTHING else part
                continue
            self._num_meetings += len(result) * len(part)
            if self._num_meetings > _MAX_MEETINGS:
                raise cannot_be_enforced("the schema", "more alternatives than can be compared")
            result = distinct(shape for a in result for b in part if (shape := meet(a, b)) is not None)
        return result

    def _of_term(self, term: Term, wide: bool) -> Shapes:
        is_met, number_ = term
        key = (term, wide)
        if key not in self._known:
            schema = self._schemas[number_]
            path = self.references.path_of(schema)
            if key in self._open:
                raise cannot_be_enforced(path, "a $ref that leads back to itself")
            self._open.add(key)
            try:
                self._known[key] = self._met(schema, path, wide) if is_met else self._complements.of(schema, path, wide)
            finally:
                self._open.discard(key)
            if len(self._known[key]) > _MAX_SHAPES:
                raise cannot_be_enforced(path, f"more than {_MAX_SHAPES:,} alternatives")
        return self._known[key]

    # What meets a schema.

    def _met(self, schema: dict[str, Any], path: str, wide: bool) -> Shapes:
        check_keywords(schema, path)
        parts = [self._plain(schema, path, wide)]
        named = [self.references.target(schema, name) for name in ("$ref", "$dynamicRef") if name in schema]
        parts += [self.of(self.terms(part), wide=wide) for part in named]
        parts += [self.of(self.terms(part), wide=wide) for part in schema.get("allOf", ())]
        if "anyOf" in schema:
            parts.append(distinct(shape for part in schema["anyOf"] for shape in self.of(self.terms(part), wide=wide)))
        if "oneOf" in schema:
            parts.append(self._one_of(schema["oneOf"], wide))
        if "not" in schema:
            parts.append(self.of(self.terms(schema["not"], is_met=False), wide=wide))
        if "if" in schema and schema.keys() & {"then", "else"}:
            met, unmet = self.terms(schema["if"]), self.terms(schema["if"], is_met=False)
            met |= self.terms(schema.get("then", True))
            unmet |= self.terms(schema.get("else", True))
            parts.append(distinct((*self.of(met, wide=wide), *self.of(unmet, wide=wide))))
        for name, names in map_of(schema, "dependentRequired", list, path):
            if not all(isinstance(other, str) for other in names):
                raise malformed(path, schema, "dependentRequired")
            parts.append((*without(name), Object(required=frozenset([name, *names]))))
        for name, part in map_of(schema, "dependentSchemas", dict | bool, path):
            present: Shapes = (Object(required=frozenset([name])),)
            parts.append((*without(name), *self.meet([present, self.of(self.terms(part), wide=wide)])))
        if "contains" in schema:
            parts.append(self._containing(schema, path, wide))
        shapes = self.meet(parts)
        if not wide and schema.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
            shapes = self._with_rest(schema, shapes)
        return shapes

    def _plain(self, schema: dict[str, Any], path: str, wide: bool) -> Shapes:
        """Return the sets of what is said without other schemas beside this one."""
        parts = [self._of_types(schema, path, wide)]
        if "const" in schema:
            parts.append(self._of_values([schema["const"]], schema, wide))
        if "enum" in schema:
            if not isinstance(schema["enum"], list):
                raise malformed(path, schema, "enum")
            parts.append(self._of_values(schema["enum"], schema, wide))
        return self.meet(parts)

    def _of_types(self, schema: dict[str, Any], path: str, wide: bool) -> Shapes:
        if not schema.keys() & (OF_OBJECTS | OF_ARRAYS | OF_STRINGS | OF_NUMBERS | {"type"}):
            return EVERYTHING
        shapes = list[Shape]()
        for name in types_of(schema, path, wide):
            for shape in OF_TYPE[name]:
                made: Shape | None = shape
                match shape:
                    case Number():
                        own = number_of(schema, path)
                        made = meet(shape, own) if own is not None else None
                    case String():
                        made = string_of(schema, path)
                    case Array():
                        made = self._array(schema, path)
                    case Object():
                        made = self._object(schema, path)
                shapes += [] if made is None else [made]
        return tuple(shapes)

    def _array(self, schema: dict[str, Any], path: str) -> Array | None:
        prefix = tuple(self.terms(part) for part in schema.get("prefixItems", ()))
        items = self.terms(schema["items"]) if "items" in schema else None
        layers = (ArrayLayer(prefix, items),) if prefix or items is not None else ()
        is_unique = schema.get("uniqueItems", False)
        if not isinstance(is_unique, bool):
            raise malformed(path, schema, "uniqueItems")
        least, most = count_of(schema, "minItems", path), count_of(schema, "maxItems", path)
        return array(Array(layers, least or 0, most, is_unique))

    def _object(self, schema: dict[str, Any], path: str) -> Object | None:
        properties = tuple((name, self.terms(part)) for name, part in schema.get("properties", {}).items())
        patterns = tuple(
            (pattern_of(pattern, path), self.terms(part))
            for pattern, part in schema.get("patternProperties", {}).items()
        )
        additional = self.terms(schema["additionalProperties"]) if "additionalProperties" in schema else None
        layers = (ObjectLayer(properties, patterns, additional),) if properties or patterns else ()
        if not layers and additional is not None:
            layers = (ObjectLayer(additional=additional),)
        names = self.terms(schema["propertyNames"]) if "propertyNames" in schema else ANY
        least, most = count_of(schema, "minProperties", path), count_of(schema, "maxProperties", path)
        return object_(Object(layers, frozenset(required_of(schema, path)), least or 0, most, names))

    def _of_values(self, values: list[Any], schema: dict[str, Any], wide: bool) -> Shapes:
        strings = frozenset(value for value in values if isinstance(value, str))
        shapes: list[Shape] = [String(values=strings)] if strings else []
        for value in values:
            if isinstance(value, dict | list):
                structure = self.of(self.terms(self.structure(value, schema)), wide=wide)
                shapes += map(without_declarations, structure)
            elif not isinstance(value, str):
                shapes += of_scalar(value)
        return distinct(shapes)

    def structure(self, value: dict[str, Any] | list[Any], parent: dict[str, Any]) -> dict[str, Any]:
        """Return a schema that a value alone meets."""
        if isinstance(value, dict):
            properties = {name: self._made({"const": part}, parent) for name, part in value.items()}
            made = {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}
            self._structures.add(id(made))
        else:
            items = [self._made({"const": part}, parent) for part in value]
            made = {"type": "array", "prefixItems": items, "minItems": len(value), "maxItems": len(value)}
        return self._made(made, parent)

    def _made(self, schema: dict[str, Any], parent: dict[str, Any]) -> dict[str, Any]:
        self.references.adopt(schema, parent)
        self.terms(schema)  # keeps it, so that its identity stays its own
        return schema

    def _one_of(self, parts: list[Any], wide: bool) -> Shapes:
        """Return the sets of what meets one of the schemas and no other; which only some pairs have to be told."""
        shared = [
            pair for pair in combinations(range(len(parts)), 2) if not self.share_nothing(*(parts[i] for i in pair))
        ]
        shapes = list[Shape]()
        for index, part in enumerate(parts):
            others = [sum(pair) - index for pair in shared if index in pair]
            unmet = [self.of(self.terms(parts[other], is_met=False), wide=wide) for other in others]
            shapes += self.meet([self.of(self.terms(part), wide=wide), *unmet])
        return distinct(shapes)

    def share_nothing(self, a: Any, b: Any) -> bool:
        """Return whether it is plain that no value meets two schemas."""
        return self.is_empty(self.terms(a) | self.terms(b))

    def is_structure(self, schema: dict[str, Any]) -> bool:
        """Return whether a schema is of an object that was made of one value."""
        return id(schema) in self._structures

    def _containing(self, schema: dict[str, Any], path: str, wide: bool) -> Shapes:
        """Return the sets of arrays whose counted items come in a row, as early as it can be."""
        least, most = count_of(schema, "minContains", path), count_of(schema, "maxContains", path)
        least = 1 if least is None else least
        if wide or (least == 0 and most is None):
            return EVERYTHING
        met, unmet = self.terms(schema["contains"]), self.terms(schema["contains"], is_met=False)
        if least > _MAX_CONTAINED or (most or 0) > _MAX_CONTAINED:
            raise cannot_be_enforced(path, f"contains that counts more than {_MAX_CONTAINED} items")
        shapes = list[Shape]()
        for before in range(len(schema.get("prefixItems", ())) + 1):
            for count in [least] if most is None else range(least, most + 1):
                other = ANY if most is None else unmet
                layer = ArrayLayer((other,) * before + (met,) * count, other, is_declared=False)
                made = array(Array((layer,), before + count))
                shapes += [] if made is None or (before and not count) else [made]
        return distinct((*_NO_ARRAYS, *shapes))

    def _with_rest(self, schema: dict[str, Any], shapes: Shapes) -> Shapes:
        """Return the sets with what is said of all items and properties that nothing has been said of."""
        rest = {
            name: self.terms(schema[name]) for name in ("unevaluatedItems", "unevaluatedProperties") if name in schema
        }
        result = list[Shape]()
        for shape in shapes:
            made: Shape | None = shape
            if isinstance(shape, Array) and "unevaluatedItems" in rest:
                known = [layer for layer in shape.layers if layer.is_declared]
                if all(layer.items is None for layer in known):
                    num_known = max((len(layer.prefix) for layer in known), default=0)
                    layer = ArrayLayer((ANY,) * num_known, rest["unevaluatedItems"])
                    made = meet(shape, Array((layer,)))
            elif isinstance(shape, Object) and "unevaluatedProperties" in rest:
                told = [layer for layer in shape.layers if layer.is_declared]
                if all(layer.additional is None for layer in told):
                    names = tuple((name, ANY) for layer in told for name, _ in layer.properties)
                    patterns = tuple((pattern, ANY) for layer in told for pattern, _ in layer.patterns)
                    made = meet(shape, Object((ObjectLayer(names, patterns, rest["unevaluatedProperties"]),)))
            result += [] if made is None else [made]
        return distinct(result)
