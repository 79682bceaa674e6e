"""`/v1/models`."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path

from raypp.openai_api.request_fields import OpenAIModel
from serve_app.context import AppContext
from serve_app.error_answers import documented


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
            max_model_len=context.max_model_len,
            takes_images=context.takes_images,
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
