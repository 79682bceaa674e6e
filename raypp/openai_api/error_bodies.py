"""OpenAI's error shape, and which status and type each of raypp's errors has there."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from raypp.api.conversation import MAX_JSON_DEPTH
from raypp.config.http_settings import UnknownFields
from raypp.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    EncoderDiedError,
    EngineDeadError,
    FatalRequestError,
    NonFiniteLogitsError,
    QueueFullError,
    RayppError,
    RequestError,
    nearest_name,
)
from raypp.openai_api.foreign_fields import ForeignField
from raypp.openai_api.request_fields import PATTERNS_IN_WORDS, BodyModel, OpenAIModel

Body = TypeVar("Body", bound=OpenAIModel)

END_OF_TOKEN_IDS = 2**31  # they are int32

_MAX_PASSED_OVER = 16
"""Unknown fields of a body that are looked at: each is compared with all that there are."""
_LIKENESS_TO_FOREIGN = 0.9
"""From which an unknown field counts as a misspelt one of other servers: some that change nothing are near to these."""

_LISTS = {
    "content": 'a list of parts like {"type": "text", "text": "..."}',
    "input": 'a list of items like {"role": "user", "content": "..."}',
    "output": 'a list of parts like {"type": "input_text", "text": "..."}',
    "prompt": "a list of texts, of token ids, or of lists of token ids",
    "stop": "a list of texts",
}
"""What the lists hold that stand where a single value may stand, too."""


_ANSWERS: Mapping[type[Exception], tuple[int, str, str | None]] = {
    ContextLengthError: (400, "invalid_request_error", "context_length_exceeded"),
    FatalRequestError: (400, "invalid_request_error", "fatal_request"),  # clients would send it again after a 500
    RequestError: (400, "invalid_request_error", None),
    ConfigError: (400, "invalid_request_error", "unsupported"),
    QueueFullError: (429, "rate_limit_error", "queue_full"),
    NonFiniteLogitsError: (500, "server_error", "non_finite_logits"),
    EncoderDiedError: (503, "server_error", "encoder_dead"),
    EngineDeadError: (503, "server_error", "engine_dead"),
    DeadlineError: (504, "server_error", "timeout"),
    Exception: (500, "server_error", "internal_error"),
}
"""Status, `type` and `code` by the error; the first class that it is an instance of counts."""


class ErrorObject(OpenAIModel):
    """What went wrong."""

    message: str
    type: str
    """`invalid_request_error`, `server_error`, ...."""
    param: str | None = None
    """The field at fault."""
    code: str | None = None
    """A word for programs."""


class ErrorResponse(OpenAIModel):
    """The body of every response that is not a success."""

    error: ErrorObject


class BodyError(RequestError):
    """A body that does not have the shape that it should have."""


def decode_json(raw: bytes, what: str = "the body") -> Any:
    """Return the value that a text is, in JSON.

    Args:
        raw: The text; it may begin with a byte order mark.
        what: What errors call it.

    Raises:
        BodyError: it is none, or one that is too deep or has too long a number in it.
    """
    raw = raw.removeprefix(BOM_UTF8)
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise _not_json(raw, what, str(error)) from None


def parse_body(kind: type[Body], body: object, unknown_fields: UnknownFields = "refuse") -> Body:
    """Return a decoded JSON body as its shape.

    Args:
        kind: The shape.
        body: What was decoded.
        unknown_fields: Of a whole body: refuse fields that neither it nor `foreign_fields` has, or pass over those that
            are no misspelling of one that it has. `BodyModel.ignored` names what was passed over.

    Raises:
        BodyError: it does not have that shape.
    """
    passed_over: list[str] = []
    if isinstance(body, dict) and issubclass(kind, BodyModel):
        body, passed_over = _without_foreign(kind, body, passes_unknown=unknown_fields == "warn")
    try:
        parsed = kind.model_validate(body)
    except ValidationError as error:
        raise body_error(error.errors(include_url=False), body, kind) from None
    if isinstance(parsed, BodyModel):
        parsed.pass_over(passed_over)
    return parsed


def body_error(complaints: Sequence[Mapping[str, Any]], body: object, kind: type[BaseModel] | None = None) -> BodyError:
    """Return one of pydantic's complaints as an error that names the field, as a user would write it.

    Of a value that could be several things, it is the complaint of the one that got furthest.

    Args:
        complaints: `ValidationError.errors()`, or FastAPI's `RequestValidationError.errors()`.
        body: What was validated.
        kind: The shape that the body should have; an unknown field is answered with the nearest of its fields.
    """
    fields = [_field_path(complaint, body) for complaint in complaints]
    of_first = [(c, f) for c, f in zip(complaints, fields, strict=True) if f.startswith(fields[0])]
    first, where = max(of_first, key=lambda pair: pair[1].count("["))
    first, where = _misspelt(first, complaints, fields) or (first, where)
    of_field = [complaint for complaint, field in of_first if field == where]
    if first["type"] == "extra_forbidden":
        *before, name = first["loc"]
        of_body = kind if not before and kind is not None and issubclass(kind, BodyModel) else None
        if of_body is not None and (foreign := of_body.foreign.get(name)) is not None:
            return _unsupported(where, first.get("input"), foreign)
        nearest = _meant(of_body, str(name)) if of_body else nearest_name(str(name), _field_names(kind, before))
        refused = None if of_body is None else of_body.refused_fields().get(nearest or "")
        return BodyError(
            f"unknown field {where}",
            param=where,
            expected=nearest and f"did you mean {nearest}?",
            hint=None if refused is None else f"{nearest} is not supported: {_reason(refused)}",
        )
    if first["type"] == "union_tag_not_found":
        return BodyError(f"{where} has no type", param=where, got=repr(first.get("input"))[:200])
    if first["type"] == "missing":
        return BodyError(f"{where or 'the body'} is missing", param=where or None)
    if first["type"] == "union_tag_invalid":
        context = first["ctx"]
        return BodyError(
            f"{where} has an unsupported type",
            param=where,
            got=repr(context["tag"])[:200],
            expected=context["expected_tags"],
        )
    return BodyError(
        f"invalid value for {where or 'the body'}",
        param=where or None,
        got=(first.get("ctx") or {}).get("got") or repr(first.get("input"))[:200],
        expected=_expected_of_all(of_field, where),
    )


def describe_error(error: Exception) -> tuple[int, ErrorResponse]:
    """Return the HTTP status and the body for an error. Other errors than raypp's own are named by their class."""
    status, kind, code = next(answer for cls, answer in _ANSWERS.items() if isinstance(error, cls))
    param = error.param if isinstance(error, RequestError) else None
    message = str(error) if isinstance(error, RayppError) else f"internal error: {type(error).__name__}"
    return status, ErrorResponse(error=ErrorObject(message=message, type=kind, param=param, code=code))


def model_not_found(name: str, served: Sequence[str]) -> tuple[int, ErrorResponse]:
    """Return status and body for a model that is not served."""
    message = f"there is no model {name!r} here; served: {', '.join(served)}"
    error = ErrorObject(message=message, type="invalid_request_error", param="model", code="model_not_found")
    return 404, ErrorResponse(error=error)


def _without_foreign(
    kind: type[BodyModel], body: Mapping[str, Any], *, passes_unknown: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return a body without the unknown fields that change nothing, and the names of those that asked for something.

    Args:
        kind: The body's shape.
        body: It.
        passes_unknown: Pass over a field, too, that is in no table and is near to none that the body has.

    Raises:
        BodyError: there are more than are looked at.
    """
    known, dropped, told = kind.known_names(), set[str](), list[str]()
    unknown = [name for name, value in body.items() if value is not None and name not in known]
    for name in unknown[:_MAX_PASSED_OVER]:
        foreign = kind.foreign.get(name)
        if foreign is not None and foreign.asks_for_nothing(body[name]):
            dropped.add(name)
        elif not foreign.has_effect if foreign is not None else passes_unknown and _meant(kind, name) is None:
            dropped.add(name)
            told.append(name)
    if len(dropped) == _MAX_PASSED_OVER < len(unknown):  # else one of these is complained of
        raise BodyError(
            "too many unknown fields",
            got=f"{len(unknown)}, {unknown[_MAX_PASSED_OVER][:200]} for one",
            expected=f"at most {_MAX_PASSED_OVER} in a body",
            hint="leave out those that raypp does not have",
            param=unknown[_MAX_PASSED_OVER][:200],
        )
    return {name: value for name, value in body.items() if name not in dropped}, told


def _meant(kind: type[BodyModel], name: str) -> str | None:
    """Return the field that an unknown one probably is: a body's, or else one that is refused; None: near to none."""
    names = kind.known_names()
    of_chat = kind.chat_params.get(name, "")
    if of_chat.partition(".")[0] in names:
        return of_chat
    return nearest_name(name, names) or nearest_name(name, kind.refused_fields(), _LIKENESS_TO_FOREIGN)


def _reason(foreign: ForeignField) -> str:
    return foreign.reason.replace("`", "")


def _unsupported(name: str, value: object, foreign: ForeignField) -> BodyError:
    nothing = [f"{name} = {json.dumps(each)}, or without {name}" for each in foreign.nothing[:1]]
    return BodyError(
        f"{name} is not supported",
        got=repr(value)[:200],
        expected=nothing[0] if nothing else f"a body without {name}",
        hint=_reason(foreign),
        param=name,
    )


def _misspelt(
    missing: Mapping[str, Any], complaints: Sequence[Mapping[str, Any]], fields: Sequence[str]
) -> tuple[Mapping[str, Any], str] | None:
    """Return the complaint of an unknown field that stands where one is missing, and is nearly called so."""
    if missing["type"] != "missing":
        return None
    *before, name = missing["loc"]
    unknown = {
        str(complaint["loc"][-1]): (complaint, field)
        for complaint, field in zip(complaints, fields, strict=True)
        if complaint["type"] == "extra_forbidden" and [*complaint["loc"][:-1]] == before
    }
    near = nearest_name(str(name), unknown)
    return unknown[near] if near is not None else None


def _not_json(raw: bytes, what: str, complaint: str) -> BodyError:
    """Return the error for a text that the JSON parser does not take."""
    where = complaint[complaint.find("at line") :] if "at line" in complaint else None
    if not raw.strip():
        return BodyError(f"{what} is empty", expected="a JSON object")
    if "recursion" in complaint:
        return BodyError(f"the nesting of {what} is too deep", got=where, expected=f"at most {MAX_JSON_DEPTH} levels")
    if "number out of range" in complaint:
        return BodyError(f"{what} holds a number that is too long", got=where, expected="at most 4,300 digits")
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        got = f"the byte 0x{raw[error.start]:02x} at position {error.start}"
        return BodyError(f"{what} is not valid UTF-8", got=got, expected="JSON in UTF-8")
    if "escape" in complaint:
        expected = "escapes that are valid Unicode: no half of a surrogate pair alone"
        return BodyError(f"{what} holds an invalid escape in a string", got=complaint, expected=expected)
    return BodyError(f"{what} is not valid JSON", got=complaint, expected="a JSON object")


def _field_path(complaint: Mapping[str, Any], body: object) -> str:
    """Return where pydantic complains as a path in the body, as a user would write it.

    pydantic also names the members of unions that it tried. They are not in the body, and so not in the path.
    """
    path, value = "", body
    location = complaint["loc"]
    for index, part in enumerate(location):
        is_last = index == len(location) - 1
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            path, value = _joined(path, part), value[part]
        elif is_last and complaint["type"] == "missing":
            path = _joined(path, part)
    return path[:200]


def _expected_of_all(complaints: Sequence[Mapping[str, Any]], where: str) -> str:
    """Return what one field may be: one of several types, unless the value has one of them and is wrong otherwise."""
    of_value = [complaint for complaint in complaints if not complaint["type"].endswith(("_type", "literal_error"))]
    return " or ".join(dict.fromkeys(_expected(c, where) for c in of_value[:1] or complaints))


def _expected(complaint: Mapping[str, Any], where: str) -> str:
    """Return what pydantic would have taken, in words that name neither pydantic's types nor our classes."""
    context = complaint.get("ctx") or {}
    match complaint["type"]:
        case "model_type" | "model_attributes_type" | "dict_type":
            return "a JSON object"
        case "list_type":
            return _LISTS.get(where.rpartition(".")[2], "a list")
        case "too_short":
            return f"a list of at least {context['min_length']}"
        case "less_than" if context["lt"] == END_OF_TOKEN_IDS:
            return f"a token of the model's vocabulary, less than {END_OF_TOKEN_IDS}"
        case "less_than":  # pydantic's own words round a large limit
            return f"less than {context['lt']}"
        case "string_pattern_mismatch":
            return PATTERNS_IN_WORDS.get(context["pattern"]) or f"text that matches {context['pattern']}"
    message: str = complaint["msg"]
    return message.removeprefix("Input should be ").removeprefix("String should have ").removeprefix("a valid ")


def _field_names(kind: Any, location: Sequence[Any]) -> list[str]:
    """Return the names of the fields at a place in a shape."""
    for part in location:
        field = kind.model_fields.get(part) if kind is not None else None
        members = () if field is None else (field.annotation, *get_args(field.annotation))
        kind = next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), None)
    return [] if kind is None else [field.alias or name for name, field in kind.model_fields.items()]


def _joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
