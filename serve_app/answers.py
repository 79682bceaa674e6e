"""Answers: errors as OpenAI's clients expect them, and streams of events that end with the client.

An error has one JSON shape and the right status, documented for every route. For a client that has disconnected nothing
more is computed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Self, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from raypp.errors import EncoderDiedError, EngineDeadError, QueueFullError, RayppError
from raypp.openai_api.anthropic_answer import message_error
from raypp.openai_api.error_bodies import ErrorObject, ErrorResponse, body_error, describe_error, model_not_found
from raypp.openai_api.request_fields import OpenAIModel

T = TypeVar("T")
Events = AsyncGenerator[str, None]
TellError = Callable[[RayppError], str]
"""Returns the event that tells an error and ends its stream."""

KEEP_ALIVE_S = 15.0
"""Proxies mostly cut a connection after 60 s of silence, some after 30."""

KEEP_ALIVE = ": waiting\n\n"
"""A comment: the format of server-sent events has clients ignore it."""

_REFUSAL_S = 1.0
"""For the engine to refuse what it is given. A later error is an event of the stream."""


_CLIENT_CLOSED_REQUEST = 499  # nginx's number; no client reads it
_MAX_ID_CHARS = 128


class ClientGoneError(Exception):
    """The client disconnected; what was computed for it has been cancelled."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result; cancel it as soon as the client disconnects.

    Args:
        receive: The request's ASGI channel; its body has been read.
        work: What to run.

    Raises:
        ClientGoneError: the client disconnected first.
    """
    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for future in (task, disconnected):
            future.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_event(error: RayppError) -> str:
    """Return the event that tells an error and ends its stream."""
    _, response = describe_error(error)
    return f"data: {response.model_dump_json()}\n\n"


def response_error_event(error: RayppError, sequence_number: int) -> str:
    """Return the event that tells an error and ends a stream of `/v1/responses`.

    Args:
        error: What went wrong.
        sequence_number: Of the event in its stream, from 0.
    """
    _, body = describe_error(error)
    told = body.error.model_dump(include={"code", "message", "param"})
    return typed_event({"type": "error", **told, "sequence_number": sequence_number})


def message_error_event(error: RayppError) -> str:
    """Return the event that tells an error and ends a stream of `/v1/messages`."""
    return typed_event(message_error(*describe_error(error)).model_dump())


def typed_event(event: Mapping[str, Any]) -> str:
    """Return an event that is named by its `type`."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events, from a generator that is closed as soon as the client disconnects.

    While there are none, comments go out: a proxy would take a silent connection for a dead one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events,
        first: asyncio.Future[str] | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        tell_error: TellError = error_event,
    ) -> None:
        """Begin to answer.

        Args:
            events: Complete events, each ended by an empty line.
            first: The first of them, if it was asked for already; its error becomes an event.
            keep_alive_s: The longest silence.
            tell_error: Makes an event of an error that came in place of the first one.
        """
        # A proxy between us and the client must not gather what is meant to be seen at once.
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._first = first
        self._keep_alive_s = keep_alive_s
        self._tell_error = tell_error
        self._last_sent_s = -math.inf if first is not None and not first.done() else time.monotonic()
        self._is_sending = False

    @classmethod
    async def opened(
        cls, receive: Receive, events: Events, keep_alive_s: float, tell_error: TellError = error_event
    ) -> Self:
        """Return the response once the request is not refused: a refusal has a status of its own.

        A request that only has to wait is not waited for: its stream begins without an event.

        Args:
            receive: The request's ASGI channel.
            events: Of the response; they are closed when this raises.
            keep_alive_s: The longest silence.
            tell_error: Makes an event of an error that comes later, in place of the first event.

        Raises:
            RayppError: the request is refused.
            ClientGoneError: the client disconnected.
        """
        first = asyncio.ensure_future(anext(events))
        try:
            await while_connected(receive, asyncio.wait((first,), timeout=min(_REFUSAL_S, keep_alive_s)))
            if first.done():
                first.result()
        except BaseException:
            await _close(events, first)
            raise
        return cls(events, first, keep_alive_s, tell_error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as the client stays for."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            return
        finally:
            await _close(self._events, self._first)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keeper = asyncio.create_task(self._keep_alive(send))
        try:
            await self._send_events(send)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        if self._first is not None:
            try:
                event = await self._first
            except RayppError as error:  # it was admitted, and something came up while it waited
                event = self._tell_error(error)
            await self._send_text(send, event)
        async for event in self._events:
            await self._send_text(send, event)

    async def _send_text(self, send: Send, text: str) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        self._is_sending, self._last_sent_s = False, time.monotonic()

    async def _keep_alive(self, send: Send) -> None:
        while True:
            left_s = self._last_sent_s + self._keep_alive_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            elif self._is_sending:  # the client is slow to read: there is no silence
                await asyncio.sleep(self._keep_alive_s)
            else:
                await self._send_text(send, KEEP_ALIVE)


async def _close(events: Events, first: asyncio.Future[str] | None) -> None:
    if first is not None:  # else the generator would still be running
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    await events.aclose()


def given_request_id(headers: Mapping[str, str]) -> str | None:
    """Return the X-Request-Id that a client or a proxy gave a request; None for one that is no plain, short text."""
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable() else None


def client_gone_response() -> Response:
    """Return the answer to a client that is gone."""
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


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


def unhealthy_answer(message: str, *, code: str = "unhealthy") -> AsciiJSONResponse:
    """Return the response of `/health` when the engine cannot serve, and of `/ready` when it cannot serve now."""
    return error_response(503, message, kind="server_error", code=code, headers=_RETRY_LATER)


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
