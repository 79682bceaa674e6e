"""Bodies are read here, not by FastAPI: what is wrong with one is said in the words that batches have for it, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from raypp.openai_api.error_bodies import BodyError, decode_json, parse_body
from serve_app.client_connection import client_gone_response

_MAX_INLINE_BYTES = 1 << 18
"""At worst some tens of milliseconds of parsing. A body of many megabytes takes seconds and would hold up every stream
of the replica. In a thread what needs no Python still does, since it holds Python's lock: decoding JSON, long lists."""


class JsonRoute(APIRoute):
    """A route whose body, if it takes one, is JSON."""

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
            is_large = len(raw) > _MAX_INLINE_BYTES
            parsed = await asyncio.to_thread(_parsed, kind, raw) if is_large else _parsed(kind, raw)
            return await handle(_ParsedRequest(request, raw, parsed))

        return parse_and_handle


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


def _parsed(kind: Any, raw: bytes) -> Any:
    return parse_body(kind, decode_json(raw))


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
