"""The HTTP app around one engine: routes, errors, keys, limits. Knows nothing of Ray.

    client --HTTP--> Serve's proxy --> replica: this app --AsyncLLM, zmq--> driver --> stages
                     proxy_answers.py    middleware.py                   count, key, size of the body
                                         routes/                         one file per group of routes
                                         runner.py                       admission, prompts merged, metrics
                                         chunks.py                       new outputs as server-sent events
                                         answers.py                      errors; ends the work when the client leaves

Tests run it on uvicorn, around an engine in threads.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import APIKeyHeader, HTTPBearer

import raypp
from raypp.api.async_llm import AsyncLLM
from raypp.config.http_settings import HttpSettings
from raypp.openai_api.body_preparer import BodyPreparer
from raypp.prompt_items import EncoderItem
from serve_app.answers import AsciiJSONResponse, add_error_handlers
from serve_app.metrics import EngineMetrics, LiveFeed
from serve_app.middleware import IGNORED_HEADER, ApiKeys, BodyLimit, HeadsOfGets, RequestCounter
from serve_app.routes.generation import generation_routes, token_routes
from serve_app.routes.status import PAGE_PATHS, control_routes, model_routes, page_routes, status_routes
from serve_app.runner import (
    Admission,
    AdmissionLimits,
    AppContext,
    Question,
    ReadingGate,
)

OPEN_PATHS = PAGE_PATHS | {"/health", "/ping", "/ready", "/version", "/metrics", "/load", "/openapi.json"}
"""What needs no key: the page, and what orchestrators and monitors ask for."""


async def own_answer(llm: AsyncLLM, metrics: EngineMetrics, question: Question) -> Any:
    """Return one replica's metrics, or the number of its requests that run or wait; or reset its prefix cache."""
    match question:
        case "exposition":  # of a dead engine only what happened before
            return metrics.exposition(await stats_if_alive(llm))
        case "load":
            stats = await stats_if_alive(llm)
            return stats.get("num_running", 0) + stats.get("num_waiting", 0)
        case "reset_prefix_cache":
            return llm.reset_prefix_cache()


async def stats_if_alive(llm: AsyncLLM) -> dict[str, Any]:
    """Return the engine's figures of this moment; none of a dead engine."""
    try:
        return await llm.stats()
    except raypp.RayppError:
        return {}


def make_context(
    llm: AsyncLLM,
    settings: HttpSettings,
    *,
    metrics: EngineMetrics,
    ask_all: Callable[[Question], Awaitable[list[Any]]] | None = None,
    encode_ahead: Callable[[Sequence[EncoderItem]], Awaitable[None]] | None = None,
) -> AppContext:
    """Return what the routes share.

    Args:
        llm: The engine.
        settings: Of HTTP.
        metrics: This replica's.
        ask_all: As of `AppContext`; by default there is only this replica.
        encode_ahead: As of `AppContext`.
    """

    async def ask_this(question: Question) -> list[Any]:
        return [await own_answer(llm, metrics, question)]

    llm.draw_seeds_as(metrics.replica)
    admission = Admission(
        AdmissionLimits(
            max_running=llm.config.scheduler.max_num_seqs,
            max_queued=settings.max_queued_requests,
            max_unfinished_tokens=settings.max_unfinished_tokens,
            max_body_sequences=settings.max_sequences_per_request,
            max_body_tokens=settings.max_tokens_per_request,
        )
    )
    max_reading = settings.max_encodes + settings.max_encodes_waiting
    gate = ReadingGate(max_reading, llm.config.images.image_wait_timeout_s)
    return AppContext(
        llm=llm,
        settings=settings,
        metrics=metrics,
        admission=admission,
        preparer=BodyPreparer(
            llm.tokenizer,
            llm.pictures,
            max_model_len=llm.max_model_len,
            sampling_defaults=llm.sampling_defaults,
            reading=gate.entered,
            tool_call_parser=llm.config.model.tool_call_parser,
            reasoning_parser=llm.config.model.reasoning_parser,
        ),
        live=LiveFeed(llm, settings.live_period_s),
        ask_all=ask_all or ask_this,
        model_names=model_names(llm.config.model.model, settings),
        created_s=int(time.time()),
        encode_ahead=encode_ahead,
    )


def model_names(model: str, settings: HttpSettings) -> tuple[str, ...]:
    """Return the names that requests may call the model by; the first is the one in answers."""
    return tuple(settings.served_model_name) or (model,)


def make_http_app(context: AppContext) -> FastAPI:
    """Return the ASGI app.

    Raises:
        ConfigError: the API keys cannot be read.
    """
    settings, keys = context.settings, context.settings.keys()
    app = FastAPI(
        title="raypp",
        version=raypp.__version__,
        description="OpenAI-compatible inference on a pipeline of Ray actors.",
        openapi_url=None,  # it is a route like any other, and described like any other
        docs_url=None,  # its scripts come from elsewhere: it would not work offline
        redoc_url=None,
        default_response_class=AsciiJSONResponse,
    )
    add_error_handlers(app)
    ways = (HTTPBearer(auto_error=False), APIKeyHeader(name="X-API-Key", auto_error=False))
    guarded = [Depends(way) for way in ways] if keys else []  # describes what the middleware checks
    routers = [generation_routes(context), token_routes(context), model_routes(context)]
    if settings.control_routes:
        routers.append(control_routes(context))
    for router in routers:
        app.include_router(router, dependencies=guarded)
    app.include_router(status_routes(context))
    app.include_router(page_routes(context))
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if keys:
        app.add_middleware(ApiKeys, keys=keys, open_paths=OPEN_PATHS)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER],
        )
    app.add_middleware(RequestCounter, count=context.metrics.count_response)
    app.add_middleware(HeadsOfGets)
    return app
