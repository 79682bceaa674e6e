"""The arguments of a call as Qwen3-Coder writes them, as a form of structural tags.

That is `<parameter=NAME>` VALUE `</parameter>` of each. A text is written as it is, other values as JSON; a line
break may stand around each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from raypp.grammar.schema_check import is_note

Form = dict[str, Any]
_END = "</parameter>"
_BREAK: Form = {"type": "regex", "pattern": "\\n?"}
_JSON_TYPES = ["object", "array", "number", "boolean", "null"]
_ANY_TEXT: Form = {"type": "any_text"}


def arguments_of(schema: Any) -> Form:
    """Return the form of the arguments that a schema of an object asks for, in the order of its properties.

    Raises:
        ValueError: it asks for something that has no such form.
    """
    schema = {"additionalProperties": True} if schema is True else schema
    if schema.get("type", "object") != "object":
        raise ValueError("arguments that are no object")
    root = {"$id": "urn:arguments", **schema}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    said = {key for key, value in schema.items() if value is not False and not is_note(key)}
    if beside := sorted(said - {"type", "properties", "required", "additionalProperties"}):
        raise ValueError(f"{beside[0]} of arguments that are not written as JSON")
    if missing := [name for name in required if name not in properties]:
        raise ValueError(f"required {missing[0]!r} is no property")
    elements: list[Form] = []
    for name, of_value in properties.items():
        content = _content(of_value, f"properties/{name.replace('~', '~0').replace('/', '~1')}", root)
        part = _sequence(_BREAK, _text(f"<parameter={name}>"), content)
        elements.append(part if name in required else {"type": "optional", "content": part})
    rest = schema.get("additionalProperties", False)
    if rest is not False:
        names = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_.-]*"}
        content = _content(rest, "additionalProperties", root)
        part = _sequence(_BREAK, _text("<parameter="), names, _text(">"), content)
        elements.append({"type": "star", "content": part})
    return _sequence(*elements)


def _content(schema: Any, place: str, root: dict[str, Any]) -> Form:
    """Return the form of a value and its end."""
    forms = list[Form]()
    for part in _alternatives(schema, root):
        said = {key: value for key, value in part.items() if not is_note(key)} if isinstance(part, dict) else {}
        has_values = bool(said.keys() & {"enum", "const"})
        texts = [value for value in said.get("enum", [said.get("const")]) if isinstance(value, str)]
        if part is False or "string" not in said.get("type", "string") or (has_values and not texts):
            continue  # it is JSON
        if beside := sorted(said.keys() - {"type", "enum", "const", "minLength", "maxLength", "format"}):
            raise ValueError(f"{beside[0]} of a value that may be a text, which is not written as JSON")
        if texts:
            either = {"type": "or", "elements": [_text(text) for text in texts]}
            forms.append(_sequence(_BREAK, either, _BREAK, _text(_END)))
        elif said.keys() & {"minLength", "maxLength"}:
            lengths = {"min_chars": said.get("minLength", 0), "max_chars": said.get("maxLength")}
            free = {"type": "any_text", **lengths, "excludes": [_END]}
            forms.append(_sequence(_text("\n"), free, _text(f"\n{_END}")))
        else:
            return {"type": "tag", "begin": "", "content": _ANY_TEXT, "end": _END}
    if len(forms) < len([*_alternatives(schema, root)]):
        value = {"$ref": f"{root['$id']}#/{quote(place)}", "type": _JSON_TYPES, "$defs": {"arguments": root}}
        forms.append(_sequence(_BREAK, {"type": "json_schema", "json_schema": value}, _BREAK, _text(_END)))
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}


def _alternatives(schema: Any, root: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas of which one has to be met, behind references; none refers to another."""
    if schema is True or not isinstance(schema, dict):
        yield schema is not False
        return
    said = {key: value for key, value in schema.items() if not is_note(key)}
    parts = said.get("anyOf", said.get("oneOf"))
    if said.keys() <= {"$ref"} and said:
        target: Any = root
        for name in said["$ref"].removeprefix("#/").split("/"):
            target = target[name.replace("~1", "/").replace("~0", "~")]
        yield from _alternatives(target, root)
    elif parts is not None and len(said) == 1:
        for part in parts:
            yield from _alternatives(part, root)
    elif said.keys() == {"allOf"} and len(said["allOf"]) == 1:
        yield from _alternatives(said["allOf"][0], root)
    else:
        yield schema


def _text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}
