"""Errors as OpenAI's clients expect them: one JSON shape, the right status, documented for every route."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from raypp.errors import EncoderDiedError, EngineDeadError, QueueFullError, RayppError
from raypp.openai_api.anthropic_answer import message_error
from raypp.openai_api.error_bodies import ErrorObject, ErrorResponse, body_error, describe_error, model_not_found
from raypp.openai_api.request_fields import OpenAIModel

_RETRY_LATER = {"Retry-After": "3"}
"""When to ask again after the engine died: about what a small one takes to be replaced."""

logger = logging.getLogger(__name__)


class BodyTooLargeError(RayppError):
    """A body of more bytes than the server takes.

    Args:
        max_bytes: How many it takes.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__("the body is too large", expected=f"at most {max_bytes} bytes")


class UnknownModelError(RayppError):
    """A request for a model that is not served here.

    Args:
        name: The model that was asked for.
        served: The names there are.
    """

    def __init__(self, name: str, served: Sequence[str]) -> None:
        self.status, self.response = model_not_found(name, served)
        super().__init__(self.response.error.message)


class AsciiJSONResponse(JSONResponse):
    """JSON in ASCII: a message that quotes half a character of a request can be sent, too."""

    def render(self, content: Any) -> bytes:
        """Return the content's bytes."""
        return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


class ErrorAnswer(AsciiJSONResponse):
    """The response that tells an error, in the shape of the API whose path was asked for."""

    def __init__(self, status: int, body: ErrorResponse, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(body.model_dump(), status, headers=dict(headers or {}))
        self._error = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        if is_anthropic(scope["path"]):
            self.body = self.render(message_error(self.status_code, self._error).model_dump())
            self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def is_anthropic(path: str) -> bool:
    """Return whether a path, under whatever prefix, is one of Anthropic's API."""
    return path.endswith("/v1/messages") or "/v1/messages/" in path


def error_response(
    status: int, message: str, *, kind: str, code: str | None = None, headers: Mapping[str, str] | None = None
) -> AsciiJSONResponse:
    """Return a response of OpenAI's error shape.

    Args:
        status: HTTP status.
        message: What went wrong, for people.
        kind: OpenAI's `type`, e.g. `invalid_request_error`.
        code: A word for programs.
        headers: Further headers.
    """
    error = ErrorObject(message=message, type=kind, code=code)
    return ErrorAnswer(status, ErrorResponse(error=error), headers)


def add_error_handlers(app: FastAPI) -> None:
    """Let every error of the app become a response of OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(RayppError, _on_raypp_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


def unhealthy_answer(message: str) -> AsciiJSONResponse:
    """Return the response of `/health` when the engine cannot serve."""
    return error_response(503, message, kind="server_error", code="unhealthy", headers=_RETRY_LATER)


def recovering_answer() -> AsciiJSONResponse:
    """Return the response of `/ready` while the engine is started again."""
    message = "the engine is being started again; requests wait, and go on then"
    return error_response(503, message, kind="server_error", code="recovering", headers=_RETRY_LATER)


_DESCRIPTIONS = {
    400: "The request cannot be served as it is; the message says why",
    401: "No valid API key",
    404: "There is no such model or page",
    413: "The body is larger than this server takes",
    429: "Too many requests wait already; see Retry-After",
    500: "A fault of the server",
    503: "The engine is dead and is being replaced; of /ready also: it is being started again",
    504: "The engine did not answer in time",
}


def documented(*statuses: int, model: type[OpenAIModel] = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of these error statuses, for a route's `responses`."""
    return {status: {"model": model, "description": _DESCRIPTIONS[status]} for status in statuses}


def event_stream(data: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the OpenAPI content of server-sent events.

    Args:
        data: What each event's data is, as a schema; text by default.
    """
    payload = {"type": "string", **({"contentMediaType": "application/json", "contentSchema": data} if data else {})}
    return {"schema": {"type": "object", "properties": {"data": payload}, "required": ["data"]}}


async def _on_invalid_body(request: Request, error: Exception) -> AsciiJSONResponse:
    assert isinstance(error, RequestValidationError)
    given = {**request.path_params, **request.query_params}  # bodies are checked by JsonRoute
    return ErrorAnswer(*describe_error(body_error(error.errors(), given)))


async def _on_raypp_error(request: Request, error: Exception) -> AsciiJSONResponse:
    assert isinstance(error, RayppError)
    return error_answer(error)


def error_answer(error: RayppError) -> AsciiJSONResponse:
    """Return the response that tells an error."""
    if isinstance(error, QueueFullError):
        return ErrorAnswer(*describe_error(error), {"Retry-After": str(error.retry_after_s)})
    if isinstance(error, BodyTooLargeError):
        return error_response(413, str(error), kind="invalid_request_error", code="body_too_large")
    if isinstance(error, UnknownModelError):
        return ErrorAnswer(error.status, error.response)
    return ErrorAnswer(
        *describe_error(error), _RETRY_LATER if isinstance(error, EngineDeadError | EncoderDiedError) else {}
    )


async def _on_http_error(request: Request, error: Exception) -> AsciiJSONResponse:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    message = str(error.detail)
    if error.status_code == 404:
        there_is = "; ".join(_operations(request.app))
        message = f"there is nothing at {request.method} {request.url.path[:200]}; there is: {there_is}"
    elif error.status_code == 405:
        allowed = Headers(error.headers or {}).get("allow", "another method")
        message = f"{request.url.path[:200]} does not take {request.method}; expected: {allowed}"
    return error_response(error.status_code, message, kind=kind, code=code, headers=error.headers)


def _operations(app: FastAPI) -> list[str]:
    """Return what programs can ask for, the page's files apart."""
    described: dict[str, dict[str, dict[str, Any]]] = app.openapi()["paths"]
    return [
        f"{method.upper()} {path}"
        for path, methods in described.items()
        for method, operation in methods.items()
        if "page" not in operation.get("tags", ())
    ]


async def _on_bug(request: Request, error: Exception) -> AsciiJSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ErrorAnswer(*describe_error(error))
