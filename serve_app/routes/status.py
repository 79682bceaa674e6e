"""Routes beside those that take prompts: status and metrics, the models, control, the page and what it reads."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response, StreamingResponse

import raypp
from raypp.errors import RayppError
from raypp.openai_api.request_fields import OpenAIModel
from serve_app.answers import EventStream, documented, event_stream, unhealthy_answer
from serve_app.metrics import merge
from serve_app.runner import AppContext


class Health(OpenAIModel):
    """The engine can serve, or will soon: while it is started again its requests wait, and new ones with them."""

    status: Literal["ok", "recovering"] = "ok"


class Readiness(OpenAIModel):
    """The engine can serve now."""

    status: Literal["ready"] = "ready"


class Load(OpenAIModel):
    """How much there is to do, as vLLM's server says it."""

    server_load: int
    """Requests that run or wait, each of `n` continuations one, over all replicas."""


class Version(OpenAIModel):
    """What runs."""

    version: str


def status_routes(context: AppContext) -> APIRouter:
    """Return the routes for orchestrators and monitors."""
    router = APIRouter(tags=["status"])

    @router.post("/ping", include_in_schema=False)  # as vLLM's server has it
    @router.get("/ping", responses=documented(500, 503), response_model=Health)
    @router.get("/health", responses=documented(500, 503), response_model=Health)
    async def health() -> Any:
        """Return whether the engine can serve: the driver answers, and hears from every stage; or is started again."""
        try:
            await context.llm.check_health()
        except RayppError as error:
            return unhealthy_answer(str(error))
        return Health(status="recovering" if context.llm.is_recovering else "ok")

    @router.get("/ready", responses=documented(500, 503), response_model=Readiness)
    async def ready() -> Any:
        """Return whether the engine can serve now; a new request would only wait while it is started again."""
        try:
            await context.llm.check_health()
        except RayppError as error:
            return unhealthy_answer(str(error))
        if context.llm.is_recovering:
            message = "the engine is being started again; requests wait, and go on then"
            return unhealthy_answer(message, code="recovering")
        return Readiness()

    @router.get("/load", responses=documented(500))
    async def load() -> Load:
        """Return how many requests run or wait, over all replicas."""
        return Load(server_load=sum(await context.ask_all("load")))

    @router.get("/version", responses=documented(500))
    async def version() -> Version:
        """Return raypp's version."""
        return Version(version=raypp.__version__)

    @router.get(
        "/metrics",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented(500)},
        response_class=PlainTextResponse,
    )
    async def metrics() -> PlainTextResponse:
        """Return all replicas' metrics in Prometheus's text format."""
        text = merge(await context.ask_all("exposition"))
        return PlainTextResponse(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    @router.get("/openapi.json", responses=documented(500))
    async def openapi(request: Request) -> dict[str, Any]:
        """Return this description."""
        description: dict[str, Any] = request.app.openapi()
        return description

    return router


class CacheReset(OpenAIModel):
    """Later requests find nothing in the prefix cache."""

    num_replicas: int
    """How many did so."""


class ServerInfo(OpenAIModel):
    """What runs."""

    version: str
    config: dict[str, Any]
    """The engine's configuration, by section."""
    plan: dict[str, Any]
    """What became of it: layers, bytes and blocks per stage."""


def control_routes(context: AppContext) -> APIRouter:
    """Return the routes for operators of the server."""
    router = APIRouter(tags=["control"])

    @router.post("/reset_prefix_cache", responses=documented(401, 500))
    async def reset_prefix_cache() -> CacheReset:
        """Let later requests find nothing in the prefix cache of what earlier ones computed, on all replicas."""
        return CacheReset(num_replicas=len(await context.ask_all("reset_prefix_cache")))

    @router.get("/server_info", responses=documented(401, 500))
    async def server_info() -> ServerInfo:
        """Return the version, the engine's configuration and its plan."""
        config = context.llm.config.model_dump(mode="json")
        return ServerInfo(version=raypp.__version__, config=config, plan=context.llm.plan())

    return router


class ModelCard(OpenAIModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """When its engine was started, seconds since the epoch."""
    owned_by: str = "raypp"
    root: str
    """The model behind the name."""
    max_model_len: int
    """The most tokens of a request, prompt and output together (vLLM)."""
    takes_images: bool
    """Whether messages may hold images."""


class ModelList(OpenAIModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_routes(context: AppContext) -> APIRouter:
    """Return the routes that say which models there are. A dead engine has none to offer: they answer 503."""
    router = APIRouter(tags=["models"])

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=context.created_s,
            root=context.llm.config.model.model,
            max_model_len=context.llm.max_model_len,
            takes_images=context.llm.takes_images,
        )

    @router.get("/v1/models", responses=documented(401, 500, 503, 504))
    async def list_models() -> ModelList:
        """Return the names of the served model."""
        await context.llm.check_health()
        return ModelList(data=[card(name) for name in context.model_names])

    @router.get("/v1/models/{model:path}", responses=documented(400, 401, 404, 500, 503, 504))
    async def retrieve_model(model: Annotated[str, Path(min_length=1)]) -> ModelCard:
        """Return one of them."""
        context.check_model(model)
        await context.llm.check_health()
        return card(model)

    return router


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
