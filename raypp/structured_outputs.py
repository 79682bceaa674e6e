"""What a text has to look like: `SamplingParams.structured_outputs`, and how it is kept.

A dict of one entry, whose key says what kind of constraint it is. Names are those of vllm's where it has them.

    {"json_schema": {...}}    JSON that the schema accepts; also as text, or as a pydantic model's class
    {"json_object": True}     any JSON object
    {"regex": "..."}          the whole text matches
    {"choice": ["a", "b"]}    one of these texts
    {"grammar": "..."}        EBNF as of GGML, with a rule `root`
    {"structural_tag": {...}} free text with constrained parts; what tool calls are made of
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raypp.errors import RequestError

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")

MAX_SOURCE_CHARS = 1 << 20
"""A constraint is text that is parsed; a megabyte is more than any needs."""

StructuredOutputs = dict[str, Any]
"""One entry, plain JSON: schemas and structural tags as text."""


def as_structured_outputs(value: object) -> StructuredOutputs | None:
    """Return a constraint in the form in which it is kept; None and an empty dict are none.

    Raises:
        RequestError: it is none of the kinds above. Whether it can be compiled is found out later.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refused("not a dict", value)
    given = {key: entry for key, entry in value.items() if entry is not None and (key, entry) != ("json_object", False)}
    if not given:
        return None
    if not given.keys() <= set(KINDS):
        raise _refused("not one of the kinds there are", sorted(map(str, given.keys() - set(KINDS))))
    if len(given) > 1:
        raise _refused("several kinds for one text", sorted(given))
    [(kind, entry)] = given.items()
    return {kind: _kept(kind, entry)}


def source_of(constraint: StructuredOutputs) -> str:
    """Return the constraint as text: the same for the same constraint."""
    return json.dumps(constraint, sort_keys=True)


def _kept(kind: str, entry: object) -> Any:
    match kind:
        case "json_schema" | "structural_tag":
            kept: Any = _json_text(kind, entry)
        case "json_object":
            if entry is not True:
                raise _refused("json_object is not true", entry)
            return True
        case "choice":
            if not isinstance(entry, list | tuple) or not entry or not all(isinstance(e, str) and e for e in entry):
                raise _refused("choice is not a list of texts, at least one, none of them empty", entry)
            kept = list(dict.fromkeys(entry))
        case _:
            if not isinstance(entry, str) or not entry:
                raise _refused(f"{kind} is {'empty' if entry == '' else 'not text'}", entry)
            kept = entry
    num_chars = len(kept) if isinstance(kept, str) else sum(map(len, kept))
    if num_chars > MAX_SOURCE_CHARS:
        raise RequestError(
            f"structured_outputs: {kind} is too long",
            got=f"{num_chars:,} characters",
            expected=f"at most {MAX_SOURCE_CHARS:,}",
            param="structured_outputs",
        )
    return kept


def _json_text(kind: str, entry: Any) -> str:
    if kind == "json_schema" and hasattr(entry, "model_json_schema"):
        entry = entry.model_json_schema()
    try:
        if isinstance(entry, str):
            entry = json.loads(entry)
        if not isinstance(entry, dict | bool):
            raise _refused(f"{kind} is no JSON object", entry)
        return json.dumps(entry, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(f"{kind} is no JSON: {error}", entry) from None


def _refused(what: str, got: object) -> RequestError:
    return RequestError(
        f"SamplingParams.structured_outputs: {what}",
        got=_excerpt(got),
        expected=f"a dict with one of {', '.join(KINDS)}",
        hint='for instance {"json_schema": {"type": "object", ...}} or {"choice": ["yes", "no"]}',
        param="structured_outputs",
    )


def _excerpt(value: object) -> str:
    try:
        return repr(value)[:80]
    except RecursionError:
        return "something nested too deeply"
