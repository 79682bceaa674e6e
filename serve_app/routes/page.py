"""The page at `/` and the live image that it shows."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePath
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from serve_app.client_connection import EventStream
from serve_app.context import AppContext
from serve_app.error_answers import documented, event_stream

_FOLDER = files("serve_app") / "page"
_MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript"}
_PAGE = (_FOLDER / "index.html").read_bytes()
_FILES = {  # what the page reads: name -> content and media type
    file.name: (file.read_bytes(), media_type)
    for file in _FOLDER.iterdir()
    if (media_type := _MEDIA_TYPES.get(PurePath(file.name).suffix))
}
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES)})
_HEADERS = {
    "Cache-Control": "no-cache",
    # Everything comes from here, nothing that a model writes can become part of the page's program, and an image in an
    # answer is not fetched from elsewhere: its address could carry the conversation away.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes(context: AppContext) -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(tags=["page"])

    @router.get("/", responses={200: _described("text/html"), **documented(500)}, response_class=Response)
    async def page() -> Response:
        """Return the page: a chat, and the live image of the pipeline."""
        return Response(_PAGE, media_type="text/html", headers=_HEADERS)

    @router.get(
        "/page/{name}",
        responses={200: _described("text/css", "text/javascript"), **documented(401, 404, 500)},
        response_class=Response,
    )
    async def page_file(name: str) -> Response:
        """Return a file that the page reads."""
        if name not in _FILES:
            raise HTTPException(404)
        content, media_type = _FILES[name]
        return Response(content, media_type=media_type, headers=_HEADERS)

    @router.get(
        "/live",
        responses={200: {"content": {"text/event-stream": event_stream()}}, **documented(400, 401, 500)},
        response_class=StreamingResponse,
    )
    async def live(frames: Annotated[int | None, Query(ge=1, le=1_000_000)] = None) -> Response:
        """Stream the live image of the pipeline as server-sent events, without end or as many as `frames`."""
        return EventStream(context.live.events(frames))

    return router


def _described(*media_types: str) -> dict[str, Any]:
    return {"content": {media_type: {"schema": {"type": "string"}} for media_type in media_types}}
