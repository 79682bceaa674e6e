"""OpenAI's error shape, and which status and type each of raypp's errors has there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from raypp.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    EncoderDiedError,
    EngineDeadError,
    QueueFullError,
    RayppError,
    RequestError,
)
from raypp.openai_api.request_fields import OpenAIModel

Body = TypeVar("Body", bound=OpenAIModel)

_MEMBER_NAMES = frozenset({"body", "str", "int", "float", "bool", "list", "dict"})


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
    """A body that does not have the shape that it should have.

    Args:
        message: What is wrong with it.
        param: The field at fault.
    """

    def __init__(self, message: str, *, param: str | None, got: object = None, expected: object = None) -> None:
        super().__init__(message, got=got, expected=expected)
        self.param = param


def parse_body(kind: type[Body], body: object) -> Body:
    """Return a decoded JSON body as its shape.

    Raises:
        BodyError: it does not have that shape.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise body_error(error.errors(include_url=False), kind.model_fields) from None


def body_error(complaints: Sequence[Mapping[str, Any]], field_names: Iterable[str] = ()) -> BodyError:
    """Return one of pydantic's complaints as an error that names the field, as a user would write it.

    Of a value that could be several things, it is the complaint of the one that got furthest.

    Args:
        complaints: `ValidationError.errors()`, or FastAPI's `RequestValidationError.errors()`.
        field_names: The fields there are; an unknown one is answered with the nearest of them.
    """
    fields = [_field_path(complaint["loc"]) for complaint in complaints]
    of_first = [c for c, field in zip(complaints, fields, strict=True) if field.startswith(fields[0])]
    first = max(of_first, key=lambda complaint: _field_path(complaint["loc"]).count("["))
    where = _field_path(first["loc"])
    if first["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(where, list(field_names), n=1)
        return BodyError(
            f"unknown field {where}", param=where, expected=f"did you mean {nearest[0]}?" if nearest else None
        )
    if first["type"] == "missing":
        return BodyError(f"{where or 'the body'} is missing", param=where or None)
    return BodyError(
        f"{where or 'the body'} has a value that it cannot have",
        param=where or None,
        got=repr(first.get("input"))[:200],
        expected=first["msg"].removeprefix("Input should be ").removeprefix("a valid "),
    )


def describe_error(error: Exception) -> tuple[int, ErrorResponse]:
    """Return the HTTP status and the body for an error. What is not raypp's own is not told in detail."""
    param = error.param if isinstance(error, BodyError) else None
    code: str | None
    match error:
        case ContextLengthError():
            status, kind, code = 400, "invalid_request_error", "context_length_exceeded"
        case RequestError():
            status, kind, code = 400, "invalid_request_error", None
        case ConfigError():
            status, kind, code = 400, "invalid_request_error", "unsupported"
        case QueueFullError():
            status, kind, code = 429, "rate_limit_error", "queue_full"
        case EncoderDiedError():
            status, kind, code = 503, "server_error", "encoder_dead"
        case EngineDeadError():
            status, kind, code = 503, "server_error", "engine_dead"
        case DeadlineError():
            status, kind, code = 504, "server_error", "timeout"
        case _:
            status, kind, code = 500, "server_error", "internal_error"
    message = str(error) if isinstance(error, RayppError) else f"internal error: {type(error).__name__}"
    return status, ErrorResponse(error=ErrorObject(message=message, type=kind, param=param, code=code))


def model_not_found(name: str, served: Sequence[str]) -> tuple[int, ErrorResponse]:
    """Return status and body for a model that is not served."""
    message = f"there is no model {name!r} here; served: {', '.join(served)}"
    error = ErrorObject(message=message, type="invalid_request_error", param="model", code="model_not_found")
    return 404, ErrorResponse(error=error)


def _field_path(location: Sequence[Any]) -> str:
    """Return pydantic's location as a path. The names of a union's members in it say nothing to a user."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _MEMBER_NAMES:
            path += f".{part}" if path else part
    return path
