"""`/reset_prefix_cache` and `/server_info`, for whoever runs the server: with the setting `control_routes` alone."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

import raypp
from raypp.openai_api.request_fields import OpenAIModel
from serve_app.context import AppContext
from serve_app.error_answers import documented


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
    """Return the routes for whoever runs the server."""
    router = APIRouter(tags=["control"])

    @router.post("/reset_prefix_cache", responses=documented(401, 500))
    async def reset_prefix_cache() -> CacheReset:
        """Let later requests find nothing in the prefix cache of what earlier ones computed, on all replicas."""
        return CacheReset(num_replicas=len(await context.siblings.ask("reset_prefix_cache")))

    @router.get("/server_info", responses=documented(401, 500))
    async def server_info() -> ServerInfo:
        """Return the version, the engine's configuration and its plan."""
        config = context.llm.config.model_dump(mode="json")
        return ServerInfo(version=raypp.__version__, config=config, plan=context.llm.plan())

    return router
