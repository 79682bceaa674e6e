"""From what users hand in to requests that can be sent: everything that can be wrong with one is found here."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from raypp.api.check_params import BadWords, ParamsChecker
from raypp.api.context_length import check_context_length, context_length_error
from raypp.api.conversation import plain_conversation
from raypp.api.per_request import Params, Priority, check_listed, params_per_request, priorities
from raypp.api.per_request import request_ids as ids_per_request
from raypp.api.picture_prompts import EncodedPrompt, PicturePrompts
from raypp.api.rendering import PLAIN_RENDERING, Rendering
from raypp.api.running_request import PreparedRequest
from raypp.api.tokenizer import ChatMessage, Tokenizer
from raypp.errors import RequestError
from raypp.messages import NO_INT32S, Int32s
from raypp.pictures.content import has_pictures
from raypp.pictures.reader import PictureReader
from raypp.types import Prompt, SamplingParams

T = TypeVar("T")

_CONVERSATION_FORM = 'a list of messages like {"role": "user", "content": "..."}'
_ONE_MESSAGE = "a conversation has at least one message; generate() takes prompts"
_PROMPT_FORMS = 'a str or {"prompt_token_ids": [...]}'
_PICTURES = "multi_modal_data"


class RequestPreparer:
    """Validates, renders and tokenizes. May be used from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        max_logprobs: int = 20,
        eos_token_ids: Collection[int] = (),
        pictures: PictureReader | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare requests for one model.

        Args:
            tokenizer: None takes prompts as token ids only.
            vocab_size: Token ids are below it.
            max_model_len: The most tokens of a request, prompt and output together.
            seed: Of the seeds drawn for requests that bring none.
            max_logprobs: The most log-probabilities that a request may ask for per token; -1: any number.
            eos_token_ids: The tokens that end a text.
            pictures: Reads those of the model; None for one that takes text alone.
            sampling_defaults: Fields of `SamplingParams` for requests that come without one; None has none.
        """
        self._default_params = SamplingParams(**sampling_defaults or {})
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._params_checker = ParamsChecker(
            tokenizer, vocab_size=vocab_size, max_logprobs=max_logprobs, eos_token_ids=eos_token_ids
        )
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._seed = seed
        self._seeds = random.Random(seed)

    def draw_seeds_as(self, name: str) -> None:
        """Draw the seeds of requests that bring none from another stream: engines side by side have the same seed."""
        self._seeds = random.Random(f"{self._seed}:{name}")

    def prompts(
        self,
        prompts: Sequence[Prompt | EncodedPrompt],
        params: Params = None,
        request_ids: Sequence[str] | None = None,
        priority: Priority = None,
    ) -> list[PreparedRequest]:
        """Return requests that continue prompts; all are checked before any is returned.

        Raises:
            RequestError: the first that cannot be run.
        """
        check_listed(prompts, f"a list of prompts, each {_PROMPT_FORMS}")
        ids = ids_per_request(request_ids, len(prompts))
        all_params = params_per_request(params, len(prompts), self._default_params)
        texts = [_text_of(prompt, request_id) for prompt, request_id in zip(prompts, ids, strict=True)]
        named = [(request_id, text) for request_id, text in zip(ids, texts, strict=True) if text is not None]
        encoded = iter(self._encode(named, add_special_tokens=True))
        prepared = [
            EncodedPrompt(next(encoded), text=text) if text is not None else self._encoded(prompt, request_id)
            for prompt, text, request_id in zip(prompts, texts, ids, strict=True)
        ]
        return self._finish(ids, prepared, all_params, priorities(priority, len(ids)))

    def chats(
        self,
        conversations: Sequence[Sequence[ChatMessage]],
        params: Params = None,
        request_ids: Sequence[str] | None = None,
        rendering: Rendering = PLAIN_RENDERING,
        priority: Priority = None,
    ) -> list[PreparedRequest]:
        """Return requests that answer conversations; all are checked before any is returned.

        Raises:
            RequestError: the first that cannot be run.
        """
        check_listed(conversations, _CONVERSATION_FORM)
        ids = ids_per_request(request_ids, len(conversations))
        all_params = params_per_request(params, len(conversations), self._default_params)
        for conversation in conversations:
            _check_conversation(conversation)
        conversations = [plain_conversation(conversation) for conversation in conversations]
        tokenizer = self._needed_tokenizer("a conversation")
        if any(has_pictures(conversation) for conversation in conversations):
            pictures = PicturePrompts(tokenizer, self._pictures)
            encoded = [
                _of_request(request_id, partial(pictures.chat, conversation, rendering))
                for conversation, request_id in zip(conversations, ids, strict=True)
            ]
        else:
            named = [
                (request_id, _of_request(request_id, partial(tokenizer.render_chat, conversation, rendering)))
                for conversation, request_id in zip(conversations, ids, strict=True)
            ]
            token_ids = self._encode(named, add_special_tokens=rendering.add_special_tokens)
            encoded = [EncodedPrompt(t, text=text) for t, (_, text) in zip(token_ids, named, strict=True)]
        return self._finish(ids, encoded, all_params, priorities(priority, len(ids)))

    def _encode(self, texts: Sequence[tuple[str, str]], *, add_special_tokens: bool) -> list[Int32s]:
        """Return the tokens of texts that come with the ids of their requests."""
        if not texts:
            return []
        encode = partial(self._needed_tokenizer("a prompt that is text").encode, add_special_tokens=add_special_tokens)
        try:
            return encode([text for _, text in texts])
        except RequestError:
            for request_id, text in texts:  # whose it was; encoding all at once does not tell
                _of_request(request_id, partial(encode, [text]))
            raise

    def _needed_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and the engine was made with skip_tokenizer_init",
                got=what,
                expected='{"prompt_token_ids": [...]}',
                hint="make the engine without skip_tokenizer_init",
            )
        return self._tokenizer

    def _encoded(self, prompt: Any, request_id: str) -> EncodedPrompt:
        """Return a prompt that is no plain text."""
        if isinstance(prompt, EncodedPrompt):
            return EncodedPrompt(self._checked_token_ids(prompt.token_ids, request_id), prompt.items, prompt.text)
        token_ids = None
        if "prompt_token_ids" in prompt:
            token_ids = self._checked_token_ids(prompt["prompt_token_ids"], request_id)
        if _PICTURES not in prompt:
            assert token_ids is not None
            return EncodedPrompt(token_ids)
        prompts, images = PicturePrompts(self._needed_tokenizer("a picture"), self._pictures), _images_of(prompt)
        if token_ids is not None:
            return _of_request(request_id, partial(prompts.tokens, token_ids, images))
        return _of_request(request_id, partial(prompts.text, prompt["prompt"], images))

    def _checked_token_ids(self, given: object, request_id: str) -> Int32s:
        expected = f"a flat list of integers from 0 to {self._vocab_size - 1}"
        try:
            token_ids = np.asarray(given)
        except (ValueError, TypeError):
            token_ids = np.empty((0, 0), object)
        if token_ids.size == 0 and token_ids.ndim == 1:
            return NO_INT32S
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise RequestError(
                "prompt_token_ids are not token ids",
                request_id=request_id,
                got=repr(given)[:80],
                expected=expected,
                hint="each prompt is a dict of its own",
                param="prompt",
            )
        bad = np.flatnonzero((token_ids < 0) | (token_ids >= self._vocab_size))
        if bad.size:
            raise RequestError(
                "a prompt token is outside of the vocabulary",
                request_id=request_id,
                got=f"{token_ids[bad[0]]} at position {bad[0]}",
                expected=expected,
                hint="token ids are those of this model's tokenizer",
                param="prompt",
            )
        return token_ids.astype(np.int32)  # a copy: an array that was given stays its owner's

    def _finish(
        self,
        request_ids: list[str],
        prompts: Sequence[EncodedPrompt],
        params: list[SamplingParams],
        priorities: list[int],
    ) -> list[PreparedRequest]:
        prepared = []
        known: dict[int, tuple[SamplingParams, BadWords]] = {}  # mostly all requests have the same parameters
        for request_id, prompt, given, priority in zip(request_ids, prompts, params, priorities, strict=True):
            ids = prompt.token_ids
            self._check_prompt(request_id, ids)
            if id(given) not in known:
                known[id(given)] = self._params_checker.checked(request_id, given)
            checked, bad_words = known[id(given)]
            self._check_room(request_id, ids, checked)
            prepared.append(
                PreparedRequest(request_id, prompt.text, ids, checked, bad_words, priority, items=prompt.items)
            )
        return [self._with_seed(request) for request in prepared]  # only now: refused requests draw none

    def _with_seed(self, request: PreparedRequest) -> PreparedRequest:
        seed = request.params.seed
        return replace(request, seed=self._seeds.getrandbits(63) if seed is None else seed)

    def _check_room(self, request_id: str, token_ids: Int32s, params: SamplingParams) -> None:
        room = self._max_model_len - len(token_ids)
        if params.min_tokens > room:
            raise context_length_error(
                "a prompt leaves no room for min_tokens",
                self._max_model_len,
                request_id=request_id,
                got=f"{len(token_ids)} prompt tokens and min_tokens={params.min_tokens}",
                expected=f"at most max_model_len = {self._max_model_len} together",
                hint="shorten the prompt, lower min_tokens or raise max_model_len",
                param="min_tokens",
            )

    def _check_prompt(self, request_id: str, token_ids: Int32s) -> None:
        if not len(token_ids):
            raise RequestError(
                "a prompt has no tokens",
                request_id=request_id,
                got="0 tokens",
                expected="at least one token",
                hint="to begin from nothing, give the token that texts of this model begin with",
                param="prompt",
            )
        check_context_length(len(token_ids), self._max_model_len, request_id=request_id)
        if (largest := int(token_ids.max())) >= self._vocab_size:
            raise RequestError(
                "the tokenizer makes a token that the model has no embedding for",
                request_id=request_id,
                got=largest,
                expected=f"0 to {self._vocab_size - 1}",
                hint="the tokenizer does not belong to this model",
            )


def _of_request(request_id: str, encode: Callable[[], T]) -> T:
    """Return what `encode` does; its errors name the request."""
    try:
        return encode()
    except RequestError as error:
        error.request_id = request_id
        raise


def _images_of(prompt: Mapping[str, Any]) -> Any:
    data = prompt[_PICTURES]
    if not isinstance(data, Mapping) or set(data) != {"image"}:
        raise RequestError(
            f"{_PICTURES} of a prompt holds images",
            got=repr(data)[:80],
            expected='{"image": image} or {"image": [image, ...]}',
            hint="chat() takes videos too",
        )
    return data["image"]


def _text_of(prompt: object, request_id: str) -> str | None:
    """Return the prompt if it is text alone, else None."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, EncodedPrompt):
        return None
    if not isinstance(prompt, Mapping):
        raise RequestError(
            "a prompt of the wrong type",
            request_id=request_id,
            got=f"{repr(prompt)[:80]} ({type(prompt).__name__})",
            expected=_PROMPT_FORMS,
            hint='{"prompt_token_ids": [...]} is how token ids are given, chat() takes conversations',
        )
    if set(prompt) == {"prompt", _PICTURES} and isinstance(prompt["prompt"], str):
        return None
    if set(prompt) not in ({"prompt_token_ids"}, {"prompt_token_ids", _PICTURES}):
        raise RequestError(
            "a prompt with the wrong keys",
            request_id=request_id,
            got=sorted(map(str, prompt)),
            expected=_PROMPT_FORMS,
            hint='text goes in as it is; with images as {"prompt": ..., "multi_modal_data": {"image": ...}}',
        )
    return None


def _check_conversation(conversation: object) -> None:
    expected = _CONVERSATION_FORM
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise RequestError("not a conversation", got=repr(conversation)[:80], expected=expected, hint=_ONE_MESSAGE)
    for message in conversation:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                "a conversation with something else in it", got=repr(message)[:80], expected=expected, hint=_ONE_MESSAGE
            )
