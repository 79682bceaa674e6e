"""What Ray Serve's proxy answers while no replica does: its own answer is a plain 500, a cut stream, or none for long.

Plain ASGI middleware around the proxy, which finds it by `ENVIRONMENT`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raypp.errors import EngineDeadError, RayppError
from serve_app.answers import (
    EventStream,
    error_answer,
    error_event,
    is_anthropic,
    message_error_event,
    response_error_event,
    unhealthy_answer,
)
from serve_app.prefix_keys import PrefixKeys

ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.proxy_answers:middlewares"}
"""What Serve's proxies must find in their environment when they start."""

HEALTH_TIMEOUT_S = 1.0
"""For a replica to answer `/health`. Probes wait for a few seconds at most; those of Kubernetes for one by default."""
_NUMBER = b'"sequence_number":'
"""Stands before the last value of a response's event. Texts in it have their quotes escaped."""


def middlewares() -> list[Middleware]:
    """Return what Serve's proxy puts around itself."""
    return [Middleware(ProxyAnswers), Middleware(PrefixKeys)]


class ProxyAnswers:
    """Answers for a replica that does not.

    `/health`, `/ping` and `/ready` under any prefix are 503 when nothing has answered after `HEALTH_TIMEOUT_S`; other
    requests wait for the next replica. A request whose replica died gets a 503, a stream an event that tells the error
    in its route's form. While Serve has no application, since the only one starts or stops, every request gets a 503:
    Serve's own answer is a 404, which clients and load balancers do not try again.
    """

    def __init__(self, app: ASGIApp, health_timeout_s: float = HEALTH_TIMEOUT_S) -> None:
        self._app = app
        self._health_timeout_s = health_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and complete its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, scope["path"], partial(_has_applications, self._app, scope, receive))
        try:
            async with asyncio.timeout(self._health_timeout_s if _asks_for_health(scope) else None) as limit:
                answer.limit = limit
                await self._app(scope, receive, answer.send)
        except TimeoutError:
            if not limit.expired():
                raise
        if limit.expired():  # Serve's proxy takes the cancellation for a client that left, and returns
            message = f"no replica answered within {self._health_timeout_s:g} s: it is being replaced, or overloaded"
            await unhealthy_answer(message)(scope, receive, send)
        elif not answer.has_started:
            await error_answer(_broken(is_served=answer.is_served))(scope, receive, send)
        elif answer.is_unfinished_stream:
            body = answer.last_event(_broken()).encode()
            await send({"type": "http.response.body", "body": body, "more_body": False})


class _Answer:
    """What has been sent of an answer."""

    def __init__(self, send: Send, path: str, has_applications: Callable[[], Awaitable[bool]]) -> None:
        """Nothing has been.

        Args:
            send: Sends a message.
            path: What was asked for.
            has_applications: Returns whether Serve has any.
        """
        self.limit: asyncio.Timeout | None = None
        self.has_started = False
        self.is_served = True
        self._has_applications = has_applications
        self.is_unfinished_stream = False
        self._send = send
        self._is_response = path.endswith("/v1/responses")
        self._is_anthropic = is_anthropic(path)
        self._last_numbered = b""  # the last piece of a response's stream that has events

    def last_event(self, error: RayppError) -> str:
        """Return the event that tells an error and ends the stream."""
        if not self._is_response:
            return message_error_event(error) if self._is_anthropic else error_event(error)
        _, _, number = self._last_numbered.rpartition(_NUMBER)
        return response_error_event(error, int(number.partition(b"}")[0]) + 1 if number else 0)

    async def send(self, message: Message) -> None:
        """Take note of a message, and send it, unless it is of Serve's own answer without an application."""
        if message["type"] == "http.response.start":
            self.is_served = message["status"] != 404 or await self._has_applications()
        if not self.is_served:
            return
        if message["type"] == "http.response.start":
            self.has_started = True
            self.is_unfinished_stream = _is_event_stream(message)
            if self.limit is not None:
                self.limit.reschedule(None)
        elif not message.get("more_body", False):
            self.is_unfinished_stream = False
        elif self._is_response and self.is_unfinished_stream and _NUMBER in message.get("body", b""):
            self._last_numbered = message["body"]
        await self._send(message)


def _broken(*, is_served: bool = True) -> EngineDeadError:
    ended = "the replica ended before its answer did" if is_served else "no application is served: it starts or stops"
    return EngineDeadError(ended, hint="send the request again; /health tells when")


async def _has_applications(app: ASGIApp, scope: Scope, receive: Receive) -> bool:
    """Return whether Serve's list of routes has any; a proxy without one answers with a plain text."""
    body = bytearray()

    async def read(message: Message) -> None:
        body.extend(message.get("body", b""))

    path = f"{scope.get('root_path', '')}/-/routes"
    await app({**scope, "method": "GET", "path": path, "raw_path": path.encode()}, receive, read)
    return body.startswith(b'{"')


def _asks_for_health(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] in ("GET", "HEAD") and path.endswith(("/health", "/ping", "/ready"))


def _is_event_stream(start: Message) -> bool:
    kinds = [value for name, value in start.get("headers", ()) if name.lower() == b"content-type"]
    return any(kind.startswith(EventStream.media_type.encode()) for kind in kinds)
