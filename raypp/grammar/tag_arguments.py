"""The arguments of a call as Qwen3-Coder writes them, as a form of structural tags.

That is `<parameter=NAME>` VALUE `</parameter>` of each. A text is written as it is, other values as JSON; a line
break may stand around each.
"""

from __future__ import annotations

from typing import Any

Form = dict[str, Any]
_END = "</parameter>"
_BREAK: Form = {"type": "regex", "pattern": "\\n?"}
_BINDING = {"const", "enum", "minLength", "maxLength", "pattern"}


def arguments_of(schema: Any) -> Form:
    """Return the form of the arguments that a schema of an object asks for, in the order of its properties.

    Raises:
        ValueError: it asks for something that has no such form.
    """
    if schema is True:
        schema = {"additionalProperties": True}
    if schema.get("type", "object") != "object":
        raise ValueError("arguments that are no object")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if missing := [name for name in required if name not in properties]:
        raise ValueError(f"required {missing[0]!r} is no property")
    elements: list[Form] = []
    for name, of_value in properties.items():
        part = _parameter({"type": "const_string", "value": name}, _value(of_value, shared))
        elements.append(part if name in required else {"type": "optional", "content": part})
    rest = schema.get("additionalProperties", False)
    if rest is not False:
        names = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_.-]*"}
        elements.append({"type": "star", "content": _parameter(names, _value(rest, shared))})
    return {"type": "sequence", "elements": elements}


def _parameter(name: Form, value: Form) -> Form:
    begin = {"type": "const_string", "value": "<parameter="}
    close = {"type": "const_string", "value": ">"}
    content = {"type": "tag", "begin": "", "content": value, "end": _END}
    return {"type": "sequence", "elements": [begin, name, close, content, _BREAK]}


def _value(schema: Any, shared: dict[str, Any]) -> Form:
    if schema is True or schema == {} or _may_be_text(schema, shared):
        return _text(schema)
    value = {"type": "json_schema", "json_schema": {**schema, **shared}}
    return {"type": "sequence", "elements": [_BREAK, value, _BREAK]}


def _text(schema: Any) -> Form:
    binding = {} if schema is True else {key: schema[key] for key in _BINDING & schema.keys()}
    if not binding:
        return {"type": "any_text"}
    texts = binding.get("enum", [binding.get("const")])
    if binding.keys() <= {"const", "enum"} and all(isinstance(text, str) for text in texts):
        either = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
        return {"type": "sequence", "elements": [_BREAK, either, _BREAK]}
    raise ValueError(f"{sorted(binding)} of a text that is no JSON")


def _may_be_text(schema: Any, shared: dict[str, Any]) -> bool:
    """Return whether a schema may accept a text: then its values are not written as JSON."""
    if not isinstance(schema, dict):
        return schema is True
    if isinstance(schema.get("$ref"), str):
        _, _, rest = schema["$ref"].partition("#/")
        target: Any = shared
        for name in rest.split("/"):
            target = target[name]
        return _may_be_text(target, shared)
    if "enum" in schema or "const" in schema:
        return any(isinstance(value, str) for value in schema.get("enum", [schema.get("const")]))
    if "type" in schema:
        return bool("string" in schema["type"])
    parts = schema.get("anyOf", schema.get("oneOf"))
    return parts is None or any(_may_be_text(part, shared) for part in parts)
