"""From bodies to what the engine gets: texts and conversations are tokenized here, long ones beside the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from raypp.api.picture_prompts import EncodedPrompt, PicturePrompts
from raypp.api.tokenizer import ChatMessage, Tokenizer, check_context_length
from raypp.errors import RequestError, page
from raypp.messages import Int32s
from raypp.openai_api.anthropic_answer import PreparedMessage
from raypp.openai_api.anthropic_request import MessagesFields, MessagesRequest
from raypp.openai_api.chat_messages import shown_messages
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.from_outputs import Prepared, PreparedChat, PreparedCompletion, TokenNames
from raypp.openai_api.request_fields import NO_DEFAULTS, BodyModel, renaming
from raypp.openai_api.response_answer import PreparedResponse
from raypp.openai_api.response_request import ResponseRequest
from raypp.openai_api.syntax import begun_in, num_thought_tokens
from raypp.openai_api.syntaxes import message_syntax
from raypp.pictures.content import has_pictures
from raypp.pictures.reader import PictureReader

T = TypeVar("T")

_MAX_TOLD = 1000
"""Fields without effect that the log names: clients may invent others without end."""

_LOG = logging.getLogger(__name__)

_MAX_INLINE_CHARS = 16_384
"""About a millisecond of tokenizing. More would hold up every stream of the replica."""


class BodyPreparer:
    """Prepares bodies for one model, and reads its images."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        pictures: PictureReader | None,
        *,
        max_model_len: int,
        sampling_defaults: Mapping[str, Any] = NO_DEFAULTS,
        reading: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """Prepare for one model.

        Args:
            tokenizer: The model's; None takes prompts as token ids only.
            pictures: Reads the model's images; None for one that takes text alone.
            max_model_len: The most tokens of a request, prompt and output together.
            sampling_defaults: Fields of `SamplingParams` that hold where a body says nothing.
            reading: Entered while a request's images are read, to bound how many are; by default nothing does.
            tool_call_parser: The engine's setting: how the model writes tool calls.
            reasoning_parser: Likewise, thoughts.

        Raises:
            ConfigError: a syntax that is not known.
        """
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._max_model_len = max_model_len
        self._sampling_defaults = sampling_defaults
        self._reading = reading
        self._ignored_before = set[str]()
        self.syntax = message_syntax(tokenizer, tool_call_parser, reasoning_parser)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: the engine has none.
        """
        if self._tokenizer is None:
            raise RequestError(
                "this needs a tokenizer, and the engine was started with skip_tokenizer_init",
                expected="a prompt of token ids",
            )
        return self._tokenizer

    async def prepare(
        self,
        request: ChatRequest | CompletionRequest,
        check_tokens: Callable[[int, int], None] = lambda *_: None,
    ) -> Prepared:
        """Return what a body becomes.

        Args:
            request: The body.
            check_tokens: Called with the number of prompts and of their tokens so far; raises when they are too many.

        Raises:
            RequestError: it cannot be run. What only the engine knows comes when it is run.
        """
        self._warn_of_ignored(request)
        if isinstance(request, ChatRequest):
            return await self._chat(request)
        return await self._completion(request, check_tokens)

    async def conversation(self, request: ChatRequest) -> EncodedPrompt:
        """Return a conversation, up to where the assistant's message begins.

        Raises:
            RequestError: the model's template refuses it, there is no template or tokenizer, or an image is at fault.
            QueueFullError: too many others have images, or these wait for too long.
        """
        prompts = PicturePrompts(self.tokenizer, self._pictures)
        rendering, max_kept = request.rendering(self.syntax), request.max_kept(self._max_model_len)
        messages = shown_messages(request.conversation(takes_images=self._pictures is not None), self.syntax)

        def encode(messages: Sequence[ChatMessage]) -> EncodedPrompt:
            return prompts.chat(messages, rendering, max_kept=max_kept)

        with renaming(lambda named: named or "messages"):
            if self._pictures is not None and has_pictures(messages):
                async with self._reading():
                    return await self._pictures.beside.messages(messages, encode)
            num_chars = sum(len(str(message["content"])) for message in messages)
            return await _beside_if_long(num_chars, lambda: encode(messages))

    async def texts(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_kept: int | None = None,
        check_tokens: Callable[[int], None] = lambda _: None,
    ) -> list[Int32s]:
        """Return the token ids of each text, int32 [T].

        Many are tokenized a slice at a time: other requests wait for a slice at most.

        Args:
            texts: What to tokenize.
            add_special_tokens: Put those around each text that the model expects there.
            max_kept: As of `Tokenizer.encode`.
            check_tokens: Called with the number of tokens so far; raises when they are too many.

        Raises:
            ContextLengthError: a text that is longer than the model's context.
            RequestError: a text that is not valid Unicode, or an engine without a tokenizer.
        """
        tokenizer, num_tokens = self.tokenizer, 0
        token_ids: list[Int32s] = []
        is_long = sum(map(len, texts)) > _MAX_INLINE_CHARS
        for piece in _slices(texts, _MAX_INLINE_CHARS):
            encode = partial(tokenizer.encode, piece, add_special_tokens=add_special_tokens, max_kept=max_kept)
            with renaming(lambda named: named or "prompt"):
                encoded = await asyncio.to_thread(encode) if is_long else encode()
            num_tokens += sum(map(len, encoded))
            check_tokens(num_tokens)
            token_ids += encoded
        return token_ids

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        tokenizer = self.tokenizer
        return await _beside_if_long(
            len(token_ids), lambda: tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    async def response(self, request: ResponseRequest) -> PreparedResponse:
        """Return what a body of `/v1/responses` becomes: the chat that it asks for, prepared.

        Raises:
            RequestError: it cannot be run. What only the engine knows comes when it is run.
        """
        self._warn_of_ignored(request)
        chat = await _beside_if_long(len(request.input), request.chat)  # items, or characters of a single text
        with chat.naming():
            return PreparedResponse(await self._chat(chat.request), request)

    async def message(self, request: MessagesRequest) -> PreparedMessage:
        """Return what a body of `/v1/messages` becomes: likewise.

        Raises:
            RequestError: it cannot be run. What only the engine knows comes when it is run.
        """
        self._warn_of_ignored(request)
        chat = await _beside_if_long(len(request.messages), request.chat)
        with chat.naming():
            return PreparedMessage(await self._chat(chat.request))

    async def num_message_tokens(self, request: MessagesFields) -> int:
        """Return how many tokens the prompt of a body of `/v1/messages` has.

        Raises:
            RequestError, QueueFullError: as of `conversation`.
        """
        self._warn_of_ignored(request)
        chat = await _beside_if_long(len(request.messages), request.chat)
        with chat.naming():
            return len((await self.conversation(chat.request)).token_ids)

    def _warn_of_ignored(self, request: BodyModel) -> None:
        """Say once of each field that it has no effect: clients send it with every request."""
        for name in set(request.ignored()) - self._ignored_before:
            if len(self._ignored_before) < _MAX_TOLD:
                self._ignored_before.add(name)
                _LOG.warning(
                    "requests have the field %r, which is ignored; %s lists all fields", name[:200], page("http_api")
                )

    async def _chat(self, request: ChatRequest) -> PreparedChat:
        prompt = await self.conversation(request)
        check_context_length(len(prompt.token_ids), self._max_model_len, param="messages")
        # The text as it was rendered: tokens that are special have none any more when it is decoded.
        thoughts = self.syntax.thoughts
        begun = begun_in(prompt.text or "", thoughts, request.continued_text)
        params = request.sampling_params(
            self._max_model_len, self.syntax, begun=begun, defaults=self._sampling_defaults
        )
        make_parser = partial(request.parser, self.syntax, begun=begun)
        return PreparedChat(
            [replace(prompt, cache_salt=request.cache_salt or "", make_stop_scope=make_parser)],
            params,
            make_parser,
            num_reasoning=partial(num_thought_tokens, self.tokenizer, thoughts, begun=begun),
            names=TokenNames(self.tokenizer, bool(request.return_tokens_as_token_ids)),
            return_token_ids=bool(request.return_token_ids),
        )

    async def _completion(
        self, request: CompletionRequest, check_tokens: Callable[[int, int], None]
    ) -> PreparedCompletion:
        params = request.sampling_params(self._max_model_len, self._sampling_defaults)
        given = request.prompts()
        check = partial(check_tokens, len(given))
        max_kept = request.max_kept(self._max_model_len)
        kept = slice(None if max_kept is None else -max_kept, None)
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        ids = [np.asarray(prompt)[kept] for prompt in given if not isinstance(prompt, str)]
        check(sum(map(len, ids)))
        encode = partial(self.texts, add_special_tokens=request.add_special_tokens is not False, max_kept=max_kept)
        encoded, from_ids = iter(await encode(texts, check_tokens=check) if texts else ()), iter(ids)
        prompts = [
            _of_text(prompt, next(encoded), max_kept) if isinstance(prompt, str) else EncodedPrompt(next(from_ids))
            for prompt in given
        ]
        for prompt in prompts:
            check_context_length(len(prompt.token_ids), self._max_model_len, param="prompt")
        if request.echo:
            prompts = await self._with_texts(prompts)
        prompts = [replace(prompt, cache_salt=request.cache_salt or "") for prompt in prompts]
        names = TokenNames(self._tokenizer, bool(request.return_tokens_as_token_ids))
        return PreparedCompletion(
            prompts, params, names, bool(request.echo), request.is_scoring, bool(request.return_token_ids)
        )

    async def _with_texts(self, prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
        """Return the prompts with their texts; those of token ids have no special tokens in them."""
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts if prompt.text is None)

        def with_text(prompt: EncodedPrompt) -> EncodedPrompt:
            if prompt.text is not None:
                return prompt
            known = prompt.token_ids[prompt.token_ids < self.tokenizer.vocab_size]  # the engine will refuse others
            return replace(prompt, text=self.tokenizer.decode(known.tolist()))

        return await _beside_if_long(num_tokens, lambda: [with_text(prompt) for prompt in prompts])


def _of_text(text: str, token_ids: Int32s, max_kept: int | None) -> EncodedPrompt:
    may_be_cut = max_kept is not None and len(token_ids) >= max_kept
    return EncodedPrompt(token_ids, text=None if may_be_cut else text)


def _slices(texts: Sequence[str], max_chars: int) -> Iterator[list[str]]:
    """Yield the texts in order, in lists of about so many characters. A text counts as one more: it is work, too."""
    piece: list[str] = []
    num_chars = 0
    for text in texts:
        piece.append(text)
        num_chars += len(text) + 1
        if num_chars >= max_chars:
            yield piece
            piece, num_chars = [], 0
    if piece:
        yield piece


async def _beside_if_long(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= _MAX_INLINE_CHARS else await asyncio.to_thread(work)
