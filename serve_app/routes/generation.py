"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.from_outputs import ResponseHead
from raypp.openai_api.request_fields import RequestFields
from raypp.openai_api.responses import ChatCompletion, Completion
from serve_app.chunks import ChunkWriter
from serve_app.client_connection import (
    ClientGoneError,
    EventStream,
    client_gone_response,
    given_request_id,
    while_connected,
)
from serve_app.context import AppContext
from serve_app.errors import AsciiJSONResponse, documented, event_stream
from serve_app.json_route import JsonRoute
from serve_app.runner import Job

_ERRORS = documented(400, 401, 404, 413, 429, 500, 503, 504)


def generation_routes(context: AppContext) -> APIRouter:
    """Return the routes that generate text."""
    router = APIRouter(tags=["generation"], route_class=JsonRoute)

    @router.post("/v1/chat/completions", responses={200: _ok(ChatCompletion), **_ERRORS})
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, at once or as a stream of server-sent events."""
        return await _answer(context, body, request, "chatcmpl")

    @router.post("/v1/completions", responses={200: _ok(Completion), **_ERRORS})
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several, at once or as a stream of server-sent events."""
        return await _answer(context, body, request, "cmpl")

    return router


async def _answer(context: AppContext, body: ChatRequest | CompletionRequest, request: Request, kind: str) -> Response:
    context.check_model(body.model)
    num_prompts = 1 if isinstance(body, ChatRequest) else len(body.prompts())
    context.admission.check(num_prompts, body.n or 1)
    prepared = await context.preparer.prepare(body, context.admission.limits.check_tokens)
    head = _head(kind, body, request, context)
    job = Job(head.id, prepared.prompts, prepared.params, body.priority or 0, body.form_param)
    if body.stream:
        return await _stream(context, request, job, ChunkWriter(head, prepared, body.stream_options))
    try:
        outputs = await while_connected(request.receive, context.runner.complete(job))
    except ClientGoneError:
        return client_gone_response()
    return AsciiJSONResponse(prepared.response(head, outputs).model_dump())


async def _stream(context: AppContext, request: Request, job: Job, writer: ChunkWriter) -> Response:
    """Return a stream that begins when the request is admitted: what it is refused for is still told by a status."""
    events = writer.events(context.runner.run(job))
    try:
        return await EventStream.opened(request.receive, events, context.settings.stream_keep_alive_s)
    except ClientGoneError:
        return client_gone_response()


def _head(kind: str, body: RequestFields, request: Request, context: AppContext) -> ResponseHead:
    """Return the answer's name: the client's own, in the body or as X-Request-Id, else a new one."""
    head = ResponseHead.new(kind, context.model_name)
    request_id = body.request_id or given_request_id(request.headers)
    return head if request_id is None else ResponseHead(f"{kind}-{request_id}", head.created, head.model)


def _ok(model: type[Any]) -> dict[str, Any]:
    return {
        "model": model,
        "description": "The answer; with `stream`, server-sent events with its chunks, ended by `[DONE]`",
        "content": {"text/event-stream": event_stream()},
    }
