"""Routes that generate, and those of vLLM that show what the model reads: `/tokenize` and the like."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from raypp.errors import RequestError
from raypp.openai_api.anthropic_answer import MessageAnswer, MessageErrorResponse, PreparedMessage, TokenCount
from raypp.openai_api.anthropic_request import MessagesFields, MessagesRequest
from raypp.openai_api.chat_messages import Message
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.from_outputs import Prepared, ResponseHead
from raypp.openai_api.request_fields import BodyModel, Entries, OpenAIModel, RequestFields
from raypp.openai_api.response_answer import PreparedResponse, ResponseObject
from raypp.openai_api.response_request import ResponseRequest
from raypp.openai_api.responses import ChatCompletion, Completion
from raypp.openai_api.tools import Tool
from serve_app.answers import (
    AsciiJSONResponse,
    ClientGoneError,
    EventStream,
    client_gone_response,
    documented,
    event_stream,
    given_request_id,
    while_connected,
)
from serve_app.chunks import ChunkWriter, MessageEventWriter, ResponseEventWriter, TypedEventWriter
from serve_app.middleware import json_route
from serve_app.runner import AppContext

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
    make_writer: Callable[[ResponseHead, PreparedBody], ChunkWriter | TypedEventWriter[Any]],
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
    head = ResponseHead.new(prefix, context.model_names[0], name)
    try:
        if body.stream:  # it begins when the request is admitted: what it is refused for is still told by a status
            writer = make_writer(head, prepared)
            events = writer.events(context.run(body, prepared, head.id))
            keep_alive_s = context.settings.stream_keep_alive_s
            return await EventStream.opened(request.receive, events, keep_alive_s, writer.failure)
        outputs = await while_connected(request.receive, context.complete(body, prepared, head.id))
    except ClientGoneError:
        return client_gone_response()
    return AsciiJSONResponse(prepared.response(head, outputs).model_dump())


def _ok(model: type[Any], events: str = _CHUNKS) -> dict[str, Any]:
    return {
        "model": model,
        "description": f"The answer; with `stream`, server-sent events {events}",
        "content": {"text/event-stream": event_stream()},
    }


_TOKEN_ERRORS = documented(400, 401, 404, 413, 429, 500, 503)


class TokenizeRequest(BodyModel):
    """A text or a conversation."""

    model: str | None = Field(default=None, min_length=1)
    """The name of the served model; by default the one there is."""
    prompt: str | None = None
    """A text."""
    messages: Entries[Message] | None = Field(default=None, min_length=1)
    """Or a conversation."""
    add_special_tokens: bool | None = None
    """Put the tokens around it that the model expects around texts. By default around a text, but not around a
    conversation: its template writes them."""
    add_generation_prompt: bool | None = None
    """As of `/v1/chat/completions`."""
    continue_final_message: bool | None = None
    """As of `/v1/chat/completions`."""
    tools: Entries[Tool] | None = None
    """Functions that the model may call, as its chat template shows them."""
    reasoning_effort: str | None = None
    """As of `/v1/chat/completions`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further values that the model's chat template reads."""
    return_token_strs: bool | None = None
    """Return each token's text, too."""


class TokenizeResponse(OpenAIModel):
    """The token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BodyModel):
    """Token ids."""

    model: str | None = Field(default=None, min_length=1)
    """The name of the served model; by default the one there is."""
    tokens: Entries[Annotated[int, Field(ge=0)]]
    """What to make text of."""


class DetokenizeResponse(OpenAIModel):
    """Their text."""

    prompt: str


class AddedToken(OpenAIModel):
    """A token that the tokenizer finds in a text before it looks at the rest."""

    content: str
    special: bool
    """Whether it is left out of texts, unless a request says `skip_special_tokens: false`."""


class TokenizerInfo(OpenAIModel):
    """The model's tokenizer: what of its tokenizer_config.json clients that render conversations themselves need."""

    tokenizer_class: str
    vocab_size: int
    """Tokens, added ones included."""
    model_max_length: int
    """The most tokens of a request, prompt and output together."""
    chat_template: str | None
    """In Jinja."""
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    added_tokens_decoder: dict[str, AddedToken]
    """By token id."""


def token_routes(context: AppContext) -> APIRouter:
    """Return the routes that show what the model reads."""
    router = APIRouter(tags=["tokens"], route_class=json_route(context.settings.unknown_fields))

    @router.post("/tokenize", responses=_TOKEN_ERRORS)
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """Return the token ids of a text, or of a conversation as the chat template renders it."""
        context.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("not one thing to tokenize", expected="either prompt or messages", param="prompt")
        if body.prompt is not None:
            with_special = body.add_special_tokens is not False
            [token_ids] = await context.preparer.texts([body.prompt], add_special_tokens=with_special)
        else:
            chat = ChatRequest(
                messages=body.messages or [],
                tools=body.tools,
                reasoning_effort=body.reasoning_effort,
                chat_template_kwargs=body.chat_template_kwargs,
                add_special_tokens=body.add_special_tokens,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            )
            token_ids = (await context.preparer.conversation(chat)).token_ids
        tokens = token_ids.tolist()
        texts = context.preparer.tokenizer.token_texts(tokens) if body.return_token_strs else None
        return TokenizeResponse(
            count=len(tokens), max_model_len=context.llm.max_model_len, tokens=tokens, token_strs=texts
        )

    @router.get("/tokenizer_info", responses=documented(400, 401, 500))
    async def tokenizer_info() -> TokenizerInfo:
        """Return what the model's tokenizer is, and the chat template."""
        described = context.preparer.tokenizer.description()
        return TokenizerInfo(model_max_length=context.llm.max_model_len, **described)

    @router.post("/detokenize", responses=_TOKEN_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Return the text of token ids, special tokens among it."""
        context.check_model(body.model)
        vocab_size = int(context.llm.model_info["vocab_size"])
        unknown = next((token for token in body.tokens if token >= vocab_size), None)
        if unknown is not None:
            raise RequestError(
                "a token is outside of the vocabulary", got=unknown, expected=f"0 to {vocab_size - 1}", param="tokens"
            )
        return DetokenizeResponse(prompt=await context.preparer.decode(body.tokens, skip_special_tokens=False))

    return router
