"""`/health`, `/ping`, `/ready`, `/load`, `/version`, `/metrics`, and the OpenAPI description itself."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse

import raypp
from raypp.errors import RayppError
from raypp.openai_api.request_fields import OpenAIModel
from serve_app.context import AppContext
from serve_app.error_answers import documented, recovering_answer, unhealthy_answer
from serve_app.metrics import merge


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
            return recovering_answer()
        return Readiness()

    @router.get("/load", responses=documented(500))
    async def load() -> Load:
        """Return how many requests run or wait, over all replicas."""
        return Load(server_load=sum(await context.siblings.ask("load")))

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
        text = merge(await context.siblings.ask("exposition"))
        return PlainTextResponse(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    @router.get("/openapi.json", responses=documented(500))
    async def openapi(request: Request) -> dict[str, Any]:
        """Return this description."""
        description: dict[str, Any] = request.app.openapi()
        return description

    return router
