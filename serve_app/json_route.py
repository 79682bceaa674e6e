"""Bodies are read here, not by FastAPI: what is wrong with one is said in the words that batches have for it, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from raypp.config.http_settings import UnknownFields
from raypp.openai_api.error_bodies import BodyError, decode_json, parse_body
from raypp.openai_api.request_fields import BodyModel
from serve_app.client_connection import client_gone_response

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
