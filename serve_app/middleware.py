"""What a request passes before any route sees it: its key, its size, and the count of what became of it.

Plain ASGI: Starlette's own base class would put a task and a queue between the route and the client.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.error_answers import BodyTooLargeError, error_answer, error_response


class ApiKeys:
    """Refuses requests that bring no valid key."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Collection[str]) -> None:
        """Guard an app.

        Args:
            app: What is behind this.
            keys: Of which a request must bring one.
            open_paths: What needs none.
        """
        self._app = app
        self._open_paths = open_paths
        # Digests of equal length: comparing them takes the same time whatever was sent.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or _path(scope) in self._open_paths:
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


class BodyLimit:
    """Refuses bodies that are too large, whether they say so beforehand or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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


class HeadsOfGets:
    """Answers HEAD with the status and the headers that GET has."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and end the answer behind its headers."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, without_body)


class RequestCounter:
    """Counts responses by route and status."""

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count how it was answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

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
    return getattr(scope.get("route"), "path", "other")  # a path that nobody knows is not a label


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"
