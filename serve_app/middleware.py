"""What a request passes before any route sees it: its key, its size, the count of what became of it, and its JSON.

Bodies are read here, not by FastAPI: what is wrong with one is said in the words that batches have for it, too.

Plain ASGI: Starlette's own base class would put a task and a queue between the route and the client.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterable
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raypp.config.http_settings import UnknownFields
from raypp.openai_api.error_bodies import BodyError, decode_json, parse_body
from raypp.openai_api.request_fields import BodyModel
from serve_app.answers import BodyTooLargeError, client_gone_response, error_answer, error_response

IGNORED_HEADER = "X-Raypp-Ignored-Fields"
"""Names the fields of a body that had no effect, percent-encoded."""
_MAX_NAMES = 16
_MAX_NAME_CHARS = 64

_MAX_INLINE_BYTES = 1 << 18
"""At worst some tens of milliseconds of parsing. A body of many megabytes takes seconds and would hold up every stream
of the replica. In a thread what needs no Python still does, since it holds Python's lock: decoding JSON, long lists."""


def json_route(unknown_fields: UnknownFields) -> type[APIRoute]:
    """Return the class of routes whose body, if they take one, is JSON.

    Args:
        unknown_fields: As of `parse_body`. What was ignored of a body is named in a header of its answer.
    """

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """Return the handler: it parses the body, then leaves the rest to FastAPI."""
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            kind: Any = self.body_field.field_info.annotation  # the model's class

            async def parse_and_handle(request: Request) -> Response:
                _check_headers(request)
                try:
                    raw = await request.body()
                except ClientDisconnect:  # it sent half a body and left, which is no error of ours
                    return client_gone_response()
                parse = partial(_parsed, kind, raw, unknown_fields)
                parsed = await asyncio.to_thread(parse) if len(raw) > _MAX_INLINE_BYTES else parse()
                response = await handle(_ParsedRequest(request, raw, parsed))
                if ignored := parsed.ignored():
                    names = [quote(name[:_MAX_NAME_CHARS], safe="=") for name in ignored[:_MAX_NAMES]]
                    response.headers[IGNORED_HEADER] = ", ".join(names)
                return response

            return parse_and_handle

    return JsonRoute


class _ParsedRequest(Request):
    """A request whose body has been parsed."""

    def __init__(self, request: Request, raw: bytes, parsed: object) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._parsed = parsed

    async def body(self) -> bytes:
        """Return what was sent."""
        return self._raw

    async def json(self) -> Any:
        """Return the body's shape. FastAPI takes it as it is."""
        return self._parsed


def _parsed(kind: type[BodyModel], raw: bytes, unknown_fields: UnknownFields) -> BodyModel:
    return parse_body(kind, decode_json(raw), unknown_fields)


def _check_headers(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise BodyError("the body is compressed", got=f"Content-Encoding: {encoding[:80]}", expected="plain JSON")
    content_type = request.headers.get("content-type")
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise BodyError(
            "the body's Content-Type is not JSON",
            got="no Content-Type" if content_type is None else f"Content-Type: {content_type[:80]}",
            expected="the header Content-Type: application/json",
        )


class _HttpLayer(ABC):
    """What stands around an app, for HTTP alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is not HTTP, and answer the rest."""
        await (self._answer if scope["type"] == "http" else self._app)(scope, receive, send)

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""


class ApiKeys(_HttpLayer):
    """Refuses requests that bring no valid key."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Collection[str]) -> None:
        """Guard an app.

        Args:
            app: What is behind this.
            keys: Of which a request must bring one.
            open_paths: What needs none.
        """
        super().__init__(app)
        self._open_paths = open_paths
        # Digests of equal length: comparing them takes the same time whatever was sent.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["method"] == "OPTIONS" or _path(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [key.strip()] if scheme.lower() == "bearer" else []
        if any(map(self._knows, [*given, *headers.getlist("x-api-key")])):
            await self._app(scope, receive, send)
            return
        response = error_response(
            401,
            "no valid API key; expected: the header Authorization: Bearer KEY, or X-API-Key: KEY",
            kind="invalid_request_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    def _knows(self, key: str) -> bool:
        given = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        found = False
        for digest in self._digests:  # all of them: the first match must not end the comparison sooner
            found |= hmac.compare_digest(digest, given)
        return found


class BodyLimit(_HttpLayer):
    """Refuses bodies that are too large, whether they say so beforehand or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        super().__init__(app)
        self._max_bytes = max_bytes

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 413."""
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await error_answer(BodyTooLargeError(self._max_bytes))(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise BodyTooLargeError(self._max_bytes)
            return message

        await self._app(scope, counted, send)


class HeadsOfGets(_HttpLayer):
    """Answers HEAD with the status and the headers that GET has."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and end the answer behind its headers."""
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, without_body)


class RequestCounter(_HttpLayer):
    """Counts responses by route and status."""

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]) -> None:
        super().__init__(app)
        self._count = count

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count how it was answered."""

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(_route(scope), message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:  # it becomes a 500 further out
            self._count(_route(scope), 500)
            raise


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "other")  # a path without a route is not a label


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"
