"""Answers that end with the client: whoever disconnects gets nothing more computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

_CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is left to read it
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


class EventStream(StreamingResponse):
    """Server-sent events, from a generator that is closed as soon as the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], first: str = "") -> None:
        """Begin to answer.

        Args:
            events: Complete events, each ended by an empty line.
            first: Events that were made already.
        """
        # A proxy between us and the client must not gather what is meant to be seen at once.
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as the client stays for."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            return
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._first:
            await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def given_request_id(headers: Mapping[str, str]) -> str | None:
    """Return the X-Request-Id that a client or a proxy gave a request; None for one that is no plain, short text."""
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable() else None


def client_gone_response() -> Response:
    """Return what is answered to nobody."""
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
