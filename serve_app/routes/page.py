"""The page at `/` and the live picture that it shows."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse

from serve_app.client_connection import EventStream
from serve_app.context import AppContext
from serve_app.error_answers import documented, event_stream

_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}": (name, "text/javascript") for name in ("events.js", "chat.js", "live.js", "page.js")},
}
PAGE_PATHS = frozenset(_FILES)
_HEADERS = {
    "Cache-Control": "no-cache",
    # Everything comes from here, and nothing that a model writes can become part of the page's program.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}


def page_routes(context: AppContext) -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(tags=["page"])
    folder = files("serve_app") / "page"

    def add(path: str, name: str, media_type: str) -> None:
        content = (folder / name).read_bytes()

        async def page_file() -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

        router.add_api_route(
            path,
            page_file,
            name=name,
            summary=f"A file of the page: {name}",
            response_class=Response,
            responses={200: _described(media_type), **documented(500)},
        )

    for path, (name, media_type) in _FILES.items():
        add(path, name, media_type)

    @router.get(
        "/live",
        responses={200: {"content": {"text/event-stream": event_stream()}}, **documented(400, 401, 500)},
        response_class=StreamingResponse,
    )
    async def live(frames: Annotated[int | None, Query(ge=1, le=1_000_000)] = None) -> Response:
        """Stream the live picture of the pipeline as server-sent events, without end or as many as `frames`."""
        return EventStream(context.live.events(frames))

    return router


def _described(media_type: str) -> dict[str, Any]:
    return {"content": {media_type: {"schema": {"type": "string"}}}}
