"""One line of the input: whose it is, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from raypp.errors import RequestError
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.errors import parse_body

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_MAX_ID_CHARACTERS = 512
_FORMS = (
    'an object like {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}} '
    'or {"custom_id": "a", "prompt": "..."}'
)


class BadLineError(RequestError):
    """A line of which not even the `custom_id` can be told, so that no line of the output could answer it."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that has a name. What it asks for may still turn out to be nonsense: then it is answered so."""

    index: int  # of the physical line, 0-based
    custom_id: str
    fields: Mapping[str, Any]
    num_bytes: int


def read_line(raw: bytes, index: int) -> Line:
    """Decode a line.

    Raises:
        BadLineError: it is no JSON object with a `custom_id`.
    """
    try:
        fields = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise BadLineError("not JSON", got=_excerpt(raw), expected=_FORMS, hint=str(error)) from None
    if not isinstance(fields, dict):
        raise BadLineError("not a JSON object", got=_excerpt(raw), expected=_FORMS)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARACTERS:
        raise BadLineError(
            "no usable custom_id",
            got=repr(custom_id)[:80],
            expected=f"text of 1 to {_MAX_ID_CHARACTERS} characters under custom_id",
        )
    return Line(index, custom_id, fields, len(raw))


def request_of(line: Line, defaults: Mapping[str, Any]) -> ChatRequest | CompletionRequest:
    """Return what a line asks for.

    Args:
        line: The line.
        defaults: Fields of the body that hold where the line says nothing.

    Raises:
        RequestError: an endpoint that is not served, or a body that has not the endpoint's shape.
    """
    fields = line.fields
    if "body" in fields or "url" in fields or "method" in fields:
        _check_envelope(fields)
        is_chat, body = fields["url"] == CHAT_URL, fields["body"]
    else:
        is_chat = "messages" in fields
        body = {name: value for name, value in fields.items() if name != "custom_id"}
    body = {**defaults, **body}
    request = parse_body(ChatRequest, body) if is_chat else parse_body(CompletionRequest, body)
    if request.stream:
        raise RequestError("a line of a batch cannot be streamed", got="stream=true", hint="leave stream out")
    return request


def _check_envelope(fields: Mapping[str, Any]) -> None:
    if fields.get("method", "POST") != "POST":
        raise RequestError("the method of a line", got=repr(fields["method"])[:80], expected="POST")
    if fields.get("url") not in (CHAT_URL, COMPLETIONS_URL):
        raise RequestError(
            "an endpoint that a batch cannot ask for",
            got=repr(fields.get("url"))[:80],
            expected=f"{CHAT_URL} or {COMPLETIONS_URL}",
        )
    if not isinstance(fields.get("body"), dict):
        raise RequestError("the body of a line is no object", got=repr(fields.get("body"))[:80], expected="an object")


def _excerpt(raw: bytes) -> str:
    return repr(raw[:80].decode(errors="replace"))
