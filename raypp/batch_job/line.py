"""One line of the input: its `custom_id` and its request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raypp.errors import RequestError
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.error_bodies import decode_json, parse_body
from raypp.openai_api.response_request import ResponseRequest

Body = ChatRequest | CompletionRequest | ResponseRequest

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
RESPONSES_URL = "/v1/responses"

MAX_LINE_BYTES = 64 << 20
"""A longer line is refused, and never held. Its newline does not count."""

_BODIES: Mapping[str, type[Body]] = {
    CHAT_URL: ChatRequest,
    COMPLETIONS_URL: CompletionRequest,
    RESPONSES_URL: ResponseRequest,
}
_MAX_ID_CHARACTERS = 512
_FORMS = (
    'an object like {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}} '
    'or {"custom_id": "a", "prompt": "..."}'
)


class BadLineError(RequestError):
    """A line that asks for nothing that could be run.

    Args:
        custom_id: The line's, if that much can be read of it.
    """

    def __init__(
        self,
        message: str,
        *,
        custom_id: str | None = None,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, got=got, expected=expected, hint=hint, param=param)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Line:
    """A line that can be run, unless its body is refused."""

    index: int  # of the physical line, 0-based
    custom_id: str
    url: str
    body: Mapping[str, Any]
    num_bytes: int


def is_too_long(raw: bytes) -> bool:
    """Return whether a line, or the beginning of one, is longer than a line may be."""
    return len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n")


def read_line(raw: bytes, index: int) -> Line:
    """Decode a line.

    Args:
        raw: The line; of one that is too long, its beginning.
        index: Of the physical line, 0-based.

    Raises:
        BadLineError: it is too long, no JSON object with a `custom_id`, or what it asks for is not there.
    """
    if is_too_long(raw):
        raise BadLineError(
            "the line is too long", got=f"more than {MAX_LINE_BYTES} bytes", expected=f"at most {MAX_LINE_BYTES} bytes"
        )
    try:
        fields = decode_json(raw.rstrip(b"\r\n"), what="the line")
    except RequestError as error:
        got = error.got and str(error.got).replace("at line 1 column", "at column")  # the file's lines are others
        raise BadLineError(error.message, got=got, expected=error.expected) from None
    if not isinstance(fields, dict):
        raise BadLineError("the line is not a JSON object", got=repr(fields)[:80], expected=_FORMS)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARACTERS:
        raise BadLineError(
            "the line has no valid custom_id",
            got=repr(custom_id)[:80],
            expected=f"text of 1 to {_MAX_ID_CHARACTERS} characters under custom_id",
            param="custom_id",
        )
    try:
        body = _body_of(fields)
        return Line(index, custom_id, _url_of(fields, body), body, len(raw))
    except BadLineError as error:
        error.custom_id = custom_id
        raise


def request_of(line: Line, defaults: Mapping[str, Any]) -> Body:
    """Return what a line asks for.

    Args:
        line: The line.
        defaults: Sampling parameters, by the names of `/v1/completions`, that hold where the line says nothing.

    Raises:
        RequestError: a body that has not the shape of its URL's.
    """
    given = {name: value for name, value in line.body.items() if value is not None}
    body = {**_defaults_of(line.url, defaults, given), **given}
    request = parse_body(_BODIES[line.url], body)
    if request.stream:
        raise RequestError(
            "a line of a batch cannot be streamed", got="stream=true", hint="leave stream out", param="stream"
        )
    return request


def _body_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    if not fields.keys() & {"method", "url", "body"}:
        return {name: value for name, value in fields.items() if name != "custom_id"}
    if (method := fields.get("method", "POST")) != "POST":
        raise BadLineError(
            "the line has a method that no URL takes", got=repr(method)[:80], expected="POST", param="method"
        )
    body = fields.get("body")
    if not isinstance(body, dict):
        raise BadLineError(
            "the body of the line is no object", got=repr(body)[:80], expected="a JSON object", param="body"
        )
    return body


def _url_of(fields: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    url = fields.get("url")
    if url is None:
        return CHAT_URL if "messages" in body else RESPONSES_URL if "input" in body else COMPLETIONS_URL
    if not isinstance(url, str) or url not in _BODIES:
        raise BadLineError(
            "the line has a URL that a batch does not serve",
            got=repr(url)[:80],
            expected=", ".join(_BODIES),
            param="url",
        )
    return url


def _defaults_of(url: str, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults by a URL's own names. What it has no field for is left out."""
    if url == COMPLETIONS_URL:
        return dict(defaults)
    fields = {name: value for name, value in defaults.items() if name != "logprobs"}
    if "logprobs" in defaults and not given.keys() & {"logprobs", "top_logprobs"}:
        fields["top_logprobs"] = defaults["logprobs"]
        if url == CHAT_URL:
            fields["logprobs"] = True
    if url == RESPONSES_URL and "max_tokens" in fields:
        fields["max_output_tokens"] = fields.pop("max_tokens")
    return {name: value for name, value in fields.items() if name in _BODIES[url].model_fields}
