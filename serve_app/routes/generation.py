"""`/v1/chat/completions`, `/v1/completions`, `/v1/responses` and `/v1/messages`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from raypp.openai_api.anthropic_answer import MessageAnswer, MessageErrorResponse, PreparedMessage, TokenCount
from raypp.openai_api.anthropic_request import MessagesFields, MessagesRequest
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.from_outputs import Prepared, ResponseHead
from raypp.openai_api.request_fields import RequestFields
from raypp.openai_api.response_answer import PreparedResponse, ResponseObject
from raypp.openai_api.response_request import ResponseRequest
from raypp.openai_api.responses import ChatCompletion, Completion
from serve_app.chunks import ChunkWriter, MessageEventWriter, ResponseEventWriter, TypedEventWriter
from serve_app.client_connection import (
    ClientGoneError,
    EventStream,
    client_gone_response,
    given_request_id,
    while_connected,
)
from serve_app.context import AppContext
from serve_app.error_answers import AsciiJSONResponse, documented, event_stream
from serve_app.middleware import json_route

_ERRORS = documented(400, 401, 404, 413, 429, 500, 503, 504)
_MESSAGE_ERRORS = documented(400, 401, 404, 413, 429, 500, 503, 504, model=MessageErrorResponse)
_CHUNKS = "with its chunks, ended by `[DONE]`"
_RESPONSE_EVENTS = "from `response.created` to `response.completed`, `response.incomplete` or `response.failed`"
_MESSAGE_EVENTS = "from `message_start` to `message_stop`"

Body = TypeVar("Body", bound=RequestFields)
PreparedBody = TypeVar("PreparedBody", Prepared, PreparedResponse, PreparedMessage)


def generation_routes(context: AppContext) -> APIRouter:
    """Return the routes that generate text."""
    router = APIRouter(tags=["generation"], route_class=json_route(context.settings.unknown_fields))
    preparer, check_tokens = context.preparer, context.admission.limits.check_tokens

    @router.post("/v1/chat/completions", responses={200: _ok(ChatCompletion), **_ERRORS})
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, at once or as a stream of server-sent events."""
        writer = partial(ChunkWriter, options=body.stream_options)
        return await _answer(context, body, request, "chatcmpl-", preparer.prepare, writer)

    @router.post("/v1/completions", responses={200: _ok(Completion), **_ERRORS})
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several, at once or as a stream of server-sent events."""
        prepare = partial(preparer.prepare, check_tokens=check_tokens)
        writer = partial(ChunkWriter, options=body.stream_options)
        return await _answer(context, body, request, "cmpl-", prepare, writer)

    @router.post("/v1/responses", responses={200: _ok(ResponseObject, _RESPONSE_EVENTS), **_ERRORS})
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation with the items of a response, at once or as a stream of server-sent events."""
        return await _answer(context, body, request, "resp_", preparer.response, ResponseEventWriter)

    @router.post("/v1/messages", responses={200: _ok(MessageAnswer, _MESSAGE_EVENTS), **_MESSAGE_ERRORS})
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation with the blocks of a message, at once or as a stream of server-sent events."""
        return await _answer(context, body, request, "msg_", preparer.message, MessageEventWriter)

    @router.post("/v1/messages/count_tokens", responses=_MESSAGE_ERRORS)
    async def count_message_tokens(body: MessagesFields) -> TokenCount:
        """Return how many tokens the prompt of a message has."""
        context.check_model(body.model)
        return TokenCount(input_tokens=await preparer.num_message_tokens(body))

    return router


async def _answer(
    context: AppContext,
    body: Body,
    request: Request,
    prefix: str,
    prepare: Callable[[Body], Awaitable[PreparedBody]],
    make_writer: Callable[[ResponseHead, PreparedBody], ChunkWriter | TypedEventWriter],
) -> Response:
    """Return the answer to a request, whole or as a stream.

    Args:
        context: What the routes share.
        body: The request's.
        request: It.
        prefix: What the answer's id begins with.
        prepare: Returns what the engine gets.
        make_writer: Returns what writes the stream of an answer of that name.
    """
    context.check_model(body.model)
    num_prompts = len(body.prompts()) if isinstance(body, CompletionRequest) else 1
    context.admission.check(num_prompts, body.num_continuations)
    prepared = await prepare(body)
    # The answer's name is the client's own, in the body or as X-Request-Id, else a new one.
    name = body.request_id or given_request_id(request.headers)
    head = ResponseHead.new(prefix, context.model_name, name)
    try:
        if body.stream:  # it begins when the request is admitted: what it is refused for is still told by a status
            writer = make_writer(head, prepared)
            events = writer.events(context.runner.run(body, prepared, head.id))
            keep_alive_s = context.settings.stream_keep_alive_s
            return await EventStream.opened(request.receive, events, keep_alive_s, writer.failure)
        outputs = await while_connected(request.receive, context.runner.complete(body, prepared, head.id))
    except ClientGoneError:
        return client_gone_response()
    return AsciiJSONResponse(prepared.response(head, outputs).model_dump())


def _ok(model: type[Any], events: str = _CHUNKS) -> dict[str, Any]:
    return {
        "model": model,
        "description": f"The answer; with `stream`, server-sent events {events}",
        "content": {"text/event-stream": event_stream()},
    }
