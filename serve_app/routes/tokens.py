"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM's server has them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from raypp.errors import RequestError
from raypp.openai_api.chat_messages import Message
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.request_fields import BodyModel, Entries, OpenAIModel
from raypp.openai_api.tools import Tool
from serve_app.context import AppContext
from serve_app.error_answers import documented
from serve_app.middleware import json_route

_ERRORS = documented(400, 401, 404, 413, 429, 500, 503)


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

    @router.post("/tokenize", responses=_ERRORS)
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
        return TokenizeResponse(count=len(tokens), max_model_len=context.max_model_len, tokens=tokens, token_strs=texts)

    @router.get("/tokenizer_info", responses=documented(400, 401, 500))
    async def tokenizer_info() -> TokenizerInfo:
        """Return what the model's tokenizer is, and the chat template."""
        described = context.preparer.tokenizer.description()
        return TokenizerInfo(model_max_length=context.max_model_len, **described)

    @router.post("/detokenize", responses=_ERRORS)
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
