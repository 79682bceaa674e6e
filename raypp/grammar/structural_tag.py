"""Structural tags, in the format that vLLM and SGLang have too, as a grammar of llguidance (its Lark).

llguidance's lexer takes the longest text of a terminal, so `/[a-z]+/ "abc"` would never come to `abc`. Parts that are
regular are therefore put together into one terminal, and free text that ends at a mark is a lazy one, which ends at
the first. What follows free text otherwise must be a special token: texts do not write those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from raypp.errors import RequestError, page
from raypp.grammar.lark import json_rule, lark_of_grammar, literal, one_of, regex
from raypp.grammar.schema_check import is_note

_ANY = "/(?s:.*)/"
_PLACE = "\0"  # no constant of a schema holds it
_ENDLESS = ("triggered_tags", "token_triggered_tags", "dispatch", "token_dispatch")


@dataclass(frozen=True)
class _Piece:
    text: str  # an expression of Lark, "" for nothing
    is_regular: bool = True  # it can be part of a terminal
    is_open: bool = False  # it ends with free text that nothing ends
    is_token: bool = False  # it begins with a special token


@dataclass(frozen=True)
class _End:
    """What a form is followed by: one of some texts, or a token."""

    texts: tuple[str, ...] = ()
    token: str = ""

    def piece(self) -> _Piece:
        if self.token:
            return _Piece(self.token, is_regular=False, is_token=True)
        return _Piece(one_of(map(literal, self.texts)))


def lark_of_structural_tag(tag: Any) -> str:
    """Return the rules of a structural tag.

    Args:
        tag: `{"type": "structural_tag", "format": {...}}`.

    Raises:
        RequestError: it is none, or has something that llguidance cannot express; says what.
    """
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        raise _refused(tag, "it is not a dict with type structural_tag and a format")
    writer = _Writer()
    piece = writer.form(tag["format"], None)
    start = writer.rule_of(piece)
    return "\n".join([f"start: {start}", *writer.rules])


@dataclass
class _Writer:
    """Writes a form as an expression, and what it needs as rules."""

    rules: list[str] = field(default_factory=list)

    def form(self, form: Any, end: _End | None) -> _Piece:
        """Return a form, and behind it what it is followed by."""
        kind = form.get("type") if isinstance(form, dict) else None
        try:
            match kind:
                case "any_text":
                    return self._free(form, end)
                case "sequence":
                    return self._sequence(form["elements"], end)
                case "or":
                    return self._choice([self.form(part, end) for part in _with_one_json(form["elements"])])
                case "tag":
                    return self._tag(form, end)
                case "triggered_tags" | "token_triggered_tags" | "dispatch" | "token_dispatch":
                    return self._dispatch(form, end)
                case _:
                    return self._joined([self._closed(kind, form), *([end.piece()] if end else [])])
        except KeyError as error:
            raise _refused(form, f"{kind} without {error}") from None
        except (AttributeError, TypeError) as error:
            raise _refused(form, f"{kind} with a part of a wrong type: {error}") from None
        except ValueError as error:
            raise _refused(form, f"{kind}: {error}") from None

    def _closed(self, kind: Any, form: Any) -> _Piece:
        """Return a form that ends by itself."""
        match kind:
            case "const_string":
                return _Piece(literal(form["value"]) if form["value"] else "")
            case "regex":
                return _Piece(regex(form["pattern"]))
            case "json_schema":
                return self._json(form)
            case "qwen_xml_parameter":
                return self._json({**form, "style": "qwen_xml"})
            case "grammar":
                return self._rule(f"%lark {{\n{lark_of_grammar(form['grammar'])}\n}}")
            case "token":
                return _Piece(self._token(form["token"]), is_regular=False, is_token=True)
            case "exclude_token":
                return self._any_token(form.get("exclude_tokens", []), "")
            case "any_tokens":
                most = form.get("max_tokens")
                return self._any_token(form.get("exclude_tokens", []), "*" if most is None else f"{{0,{int(most)}}}")
            case "optional":
                return self._repeated(form, "?")
            case "plus":
                return self._repeated(form, "+")
            case "star":
                return self._repeated(form, "*")
            case "repeat":
                most = "" if form["max"] == -1 else int(form["max"])
                return self._repeated(form, f"{{{int(form['min'])},{most}}}")
            case "tags_with_separator":
                return self._separated(form)
            case _:
                raise _refused(form, f"a form of type {kind!r} is not supported")

    def _free(self, form: Any, end: _End | None) -> _Piece:
        least, most = form.get("min_chars", 0), form.get("max_chars")
        text = _ANY if not least and most is None else f"/(?s:.{{{int(least)},{'' if most is None else int(most)}}})/"
        terminal = self._terminal(_without(_excludes(form), text))
        if form.get("max_tokens") is not None:
            if end and end.texts:
                raise _refused(form, "max_tokens of any_text that ends at a text is not supported")
            limited = self._rule(terminal, f"[max_tokens={int(form['max_tokens'])}]")
            return self._joined([limited, *([end.piece()] if end else [])])
        if end is None or (not any(end.texts) and not end.token):
            return _Piece(terminal, is_open=True)
        if end.token:
            return self._joined([_Piece(terminal, is_open=True), end.piece()])
        return self._rule(f"{terminal} {end.piece().text}", "[lazy]")

    def _sequence(self, elements: list[Any], end: _End | None) -> _Piece:
        if not elements:
            return end.piece() if end else _Piece("")
        pieces = list[_Piece]()
        for place, part in enumerate(elements):
            behind = elements[place + 1] if place + 1 < len(elements) else None
            if behind is None:
                pieces.append(self.form(part, end))
            elif part.get("type") in _ENDLESS and behind.get("type") == "const_string":
                pieces.append(self.form(part, _End(texts=(behind["value"],))))
                rest = elements[place + 2 :]
                return self._joined([*pieces, self._sequence(rest, end)])
            else:
                pieces.append(self.form(part, None))
        return self._joined(pieces)

    def _tag(self, form: Any, end: _End | None, *, without: str = "") -> _Piece:
        """Return a tag, without what is written of it already."""
        begin, own_end = form["begin"], form["end"]
        if isinstance(begin, dict):
            opening = _Piece("" if without else self._token(begin["token"]), is_regular=bool(without), is_token=True)
        else:
            opening = self.form({"type": "const_string", "value": begin.removeprefix(without)}, None)
        if isinstance(own_end, dict):
            closing = _End(token=self._token(own_end["token"]))
        else:
            closing = _End(texts=(own_end,) if isinstance(own_end, str) else tuple(own_end))
            if "" in closing.texts:
                return self._joined([opening, self.form(form["content"], end)])
        return self._joined([opening, self.form(form["content"], closing), *([end.piece()] if end else [])])

    def _dispatch(self, form: Any, end: _End | None) -> _Piece:
        """Return free text in which certain texts or tokens begin something."""
        by_token = form["type"].startswith("token_")
        at_least_one = bool(form.get("at_least_one"))
        if "rules" in form:
            loops = form.get("loop", True)
            begun = [(trigger, [self.form(content, None)]) for trigger, content in form["rules"]]
            tags = []
        else:
            loops = not form.get("stop_after_first")
            tags = form["tags"]
            triggers = form["trigger_tokens" if by_token else "triggers"]
            if others := [tag for tag in tags if not any(self._begins(tag, t) for t in triggers)]:
                raise _refused(others[0], "a tag that begins with no trigger, so that nothing would hold a text to it")
            begun = [
                (t, [self._tag(tag, None, without=str(t)) for tag in tags if self._begins(tag, t)]) for t in triggers
            ]
        if any(piece.is_open for _, pieces in begun for piece in pieces) and (loops or end):
            raise _refused(form, "free text at the end of a tag that nothing ends is not supported")
        begun = [(trigger, pieces) for trigger, pieces in begun if pieces]
        marks = [trigger for trigger, _ in begun]
        if by_token:
            text = self._any_token([*marks, *form.get("exclude_tokens", [])], "*").text
            heads = [_Piece(f"{text} {self._token(mark)}", is_regular=False) for mark in marks]
        else:
            text = self._terminal(_without([*marks, *_excludes(form)], _ANY))
            heads = [self._rule(f"{text} {literal(mark)}", "[lazy]") for mark in marks]
        parts = [self._joined([head, self._choice(pieces)]) for head, (_, pieces) in zip(heads, begun, strict=True)]
        one = self._choice(parts)
        if by_token:
            tail = self._joined([_Piece(text, is_regular=False), *([end.piece()] if end else [])])
        else:
            tail = self._free({"excludes": [*marks, *_excludes(form)]}, end)
        if loops:
            first = [self._choice([self._tag(tag, None) for tag in tags])] if at_least_one else []
            return self._joined([*first, _Piece(f"({one.text})*", is_regular=False), tail])
        if at_least_one:
            one = self._choice([self._tag(tag, None) for tag in tags])
        with_end = self._joined([one, *([end.piece()] if end else [])])
        return with_end if at_least_one else self._choice([with_end, tail])

    @staticmethod
    def _begins(tag: Any, trigger: Any) -> bool:
        begin = tag["begin"]
        return bool(begin["token"] == trigger if isinstance(begin, dict) else begin.startswith(trigger))

    def _separated(self, form: Any) -> _Piece:
        tag = self._choice([self._tag(tag, None) for tag in form["tags"]])
        if form.get("stop_after_first"):
            return tag if form.get("at_least_one") else _again(tag, "?")
        more = _again(self._joined([_Piece(literal(form["separator"]) if form["separator"] else ""), tag]), "*")
        several = self._joined([tag, more])
        return several if form.get("at_least_one") else _again(several, "?")

    def _repeated(self, form: Any, times: str) -> _Piece:
        inner = self.form(form["content"], None)
        if inner.is_open and not inner.is_regular and not inner.is_token:
            raise _refused(form, f"{form['type']} of something that ends with free text is not supported")
        return _again(inner, times)

    def _json(self, form: Any) -> _Piece:
        style, schema = form.get("style", "json"), form["json_schema"]
        if form.get("any_order") or form.get("excludes"):
            raise _refused(form, "any_order and excludes of json_schema are not supported")
        if style == "json":
            # Its keyword takes no rule's name in front of it, so that it is a rule of its own.
            return self._rule(json_rule(schema))
        if style not in PARAMETER_MARKS:
            raise _refused(form, f"json_schema of style {style!r} is not supported")
        return self.form(arguments_of(schema, style), None)

    def _any_token(self, excluded: list[Any], times: str) -> _Piece:
        numbers = ",".join(self._token(token)[2:-2] for token in excluded)
        return _Piece((f"<[^{numbers}]>" if numbers else "<[*]>") + times, is_regular=False, is_open=bool(times))

    def _token(self, token: Any) -> str:
        if not isinstance(token, int):
            raise _refused(token, f"the token {token!r}, which is not given by its number, is not supported")
        return f"<[{token}]>"

    def _joined(self, pieces: Iterable[_Piece]) -> _Piece:
        """Return parts one after the other; those in a row that are regular as one terminal."""
        runs = list[_Piece]()
        for piece in pieces:
            if not piece.text:
                continue
            last = runs[-1] if runs else None
            if last and last.is_regular and piece.is_regular:
                runs[-1] = _Piece(f"{last.text} {piece.text}", is_open=piece.is_open)
                continue
            if last and last.is_open and not piece.is_token:
                raise _refused(piece.text, "free text in front of something that is no text is not supported")
            runs.append(piece)
        if len(runs) == 1:
            return runs[0]
        text = " ".join(map(self.rule_of, runs))
        is_open, is_token = bool(runs) and runs[-1].is_open, bool(runs) and runs[0].is_token
        return _Piece(text, is_regular=not runs, is_open=is_open, is_token=is_token)

    def _choice(self, pieces: list[_Piece]) -> _Piece:
        if not pieces:
            raise ValueError("nothing to choose from: a list is empty")
        if len(pieces) == 1:
            return pieces[0]
        is_regular = all(piece.is_regular for piece in pieces)
        texts = [piece.text or literal("") if is_regular else self.rule_of(piece) for piece in pieces]
        is_open = any(piece.is_open for piece in pieces)
        return _Piece(one_of(texts), is_regular, is_open, all(piece.is_token for piece in pieces))

    def rule_of(self, piece: _Piece) -> str:
        """Return a piece as a part of a rule."""
        return self._terminal(piece.text or literal("")) if piece.is_regular else piece.text

    def _terminal(self, text: str) -> str:
        return self._named("T", text)

    def _rule(self, text: str, attributes: str = "") -> _Piece:
        return _Piece(self._named("r", text, attributes), is_regular=False)

    def _named(self, letter: str, text: str, attributes: str = "") -> str:
        if text[:1] == letter and text[1:].isdigit():
            return text
        name = f"{letter}{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {text}")
        return name


def _with_one_json(forms: list[Any]) -> list[Any]:
    """Return alternatives with all that are JSON as one: to the lexer `{"name": "f"` and `{` are two beginnings."""
    flat = [*_alternatives(forms)]
    schemas = {index: schema for index, form in enumerate(flat) if (schema := _schema_of(form)) is not None}
    if len(schemas) < 2:
        return flat
    named = {str(index): _as_resource(schema, index) for index, schema in schemas.items()}
    choice = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in named], "$defs": named}
    return [{"type": "json_schema", "json_schema": choice}, *(f for i, f in enumerate(flat) if i not in schemas)]


def _alternatives(forms: list[Any]) -> Iterator[Any]:
    for form in forms:
        if form.get("type") == "or":
            yield from _alternatives(form["elements"])
        else:
            yield form


def _schema_of(form: Any) -> Any:
    """Return the schema of a form that is JSON, maybe with a part that another schema is for; None if it is not."""
    if form.get("type") == "json_schema" and form.keys() <= {"type", "json_schema"}:
        return form["json_schema"]
    parts = form.get("elements", []) if form.get("type") == "sequence" else []
    if [part.get("type") for part in parts] != ["const_string", "json_schema", "const_string"]:
        return None
    schema = _schema_of(parts[1])
    text = parts[0]["value"] + json.dumps(_PLACE) + parts[2]["value"]
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return None if schema is None or json.dumps(value) != text else _schema_around(value, _as_resource(schema, "part"))


def _as_resource(schema: Any, name: object) -> Any:
    """Return a schema for a place in another one: its references are to its own parts."""
    return {**schema, "$id": f"urn:{name}"} if isinstance(schema, dict) else schema


def _schema_around(value: Any, schema: Any) -> Any:
    """Return the schema of a value in which another schema is for one place."""
    if value == _PLACE:
        return schema
    if not isinstance(value, dict):
        return {"const": value}
    properties = {name: _schema_around(part, schema) for name, part in value.items()}
    return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}


def _again(piece: _Piece, times: str) -> _Piece:
    return _Piece(f"({piece.text}){times}", piece.is_regular, piece.is_open, piece.is_token) if piece.text else piece


def _excludes(form: Any) -> list[str]:
    texts: list[str] = form.get("excludes", [])
    if not isinstance(texts, list) or "" in texts:
        raise ValueError(f"excludes is {str(texts)[:40]!r}, and has to be a list of texts, none of them empty")
    return texts


def _without(excluded: list[str], text: str) -> str:
    """Return a text without certain texts in it."""
    if not excluded:
        return text
    return f"({text} & ~({_ANY} {one_of(map(literal, excluded))} {_ANY}))"


def _refused(form: Any, reason: str) -> RequestError:
    return RequestError(
        "structured_outputs: this structural_tag cannot be compiled",
        got=f"{reason}: {str(form)[:80]}",
        expected=f"a form that {page('structured_outputs')} lists",
        param="structured_outputs",
    )


@dataclass(frozen=True)
class ParameterMarks:
    """What stands around the names and values of arguments that are not written as JSON."""

    name: str
    """In front of a name."""
    value: tuple[str, ...]
    """Between name and value, with white space between these."""
    end: str
    """Behind a value."""
    has_lines: bool = False
    """Whether a value has a line break on both sides, which is not its own."""


PARAMETER_MARKS = {
    "qwen_xml": ParameterMarks("<parameter=", (">",), "</parameter>", has_lines=True),
    "minimax_xml": ParameterMarks('<parameter name="', ('">',), "</parameter>"),
    "glm_xml": ParameterMarks("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"),
}
"""By `style` of a `json_schema`."""

Form = dict[str, Any]
_BREAK: Form = {"type": "regex", "pattern": "\\n?"}
_JSON_TYPES = ["object", "array", "number", "boolean", "null"]
_ANY_TEXT: Form = {"type": "any_text"}


def arguments_of(schema: Any, style: str) -> Form:
    """Return the form of the arguments that a schema of an object asks for, in the order of its properties.

    Args:
        schema: Of the object.
        style: One of `PARAMETER_MARKS`.

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
    elements, marks = list[Form](), PARAMETER_MARKS[style]
    behind_name = [part for mark in marks.value for part in (_BREAK, _text(mark))][1:]
    for name, of_value in properties.items():
        content = _content(of_value, f"properties/{name.replace('~', '~0').replace('/', '~1')}", root, marks)
        part = _sequence(_BREAK, _text(marks.name + name), *behind_name, content)
        elements.append(part if name in required else {"type": "optional", "content": part})
    rest = schema.get("additionalProperties", False)
    if rest is not False:
        names = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_.-]*"}
        content = _content(rest, "additionalProperties", root, marks)
        part = _sequence(_BREAK, _text(marks.name), names, *behind_name, content)
        elements.append({"type": "star", "content": part})
    return _sequence(*elements)


def _content(schema: Any, place: str, root: dict[str, Any], marks: ParameterMarks) -> Form:
    """Return the form of a value and its end."""
    forms, end = list[Form](), marks.end
    around, line = ([_BREAK], "\n") if marks.has_lines else ([], "")
    for part in _argument_forms(schema, root):
        said = {key: value for key, value in part.items() if not is_note(key)} if isinstance(part, dict) else {}
        has_values = bool(said.keys() & {"enum", "const"})
        texts = [value for value in said.get("enum", [said.get("const")]) if isinstance(value, str)]
        if part is False or "string" not in said.get("type", "string") or (has_values and not texts):
            continue  # it is JSON
        if beside := sorted(said.keys() - {"type", "enum", "const", "minLength", "maxLength", "format"}):
            raise ValueError(f"{beside[0]} of a value that may be a text, which is not written as JSON")
        if texts:
            either = {"type": "or", "elements": [_text(text) for text in texts]}
            forms.append(_sequence(*around, either, *around, _text(end)))
        elif said.keys() & {"minLength", "maxLength"}:
            lengths = {"min_chars": said.get("minLength", 0), "max_chars": said.get("maxLength")}
            free = {"type": "any_text", **lengths, "excludes": [end]}
            forms.append(_sequence(_text(line), free, _text(line + end)))
        else:
            return {"type": "tag", "begin": "", "content": _ANY_TEXT, "end": end}
    if len(forms) < len([*_argument_forms(schema, root)]):
        value = {"$ref": f"{root['$id']}#/{quote(place)}", "type": _JSON_TYPES, "$defs": {"arguments": root}}
        forms.append(_sequence(*around, {"type": "json_schema", "json_schema": value}, *around, _text(end)))
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}


def _argument_forms(schema: Any, root: dict[str, Any]) -> Iterator[Any]:
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
        yield from _argument_forms(target, root)
    elif parts is not None and len(said) == 1:
        for part in parts:
            yield from _argument_forms(part, root)
    elif said.keys() == {"allOf"} and len(said["allOf"]) == 1:
        yield from _argument_forms(said["allOf"][0], root)
    else:
        yield schema


def _text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}
