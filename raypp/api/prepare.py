"""From what users hand in to requests that can be sent: everything that can be wrong with one is found here."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from raypp.api.conversation import PLAIN_RENDERING, Rendering, plain_conversation
from raypp.api.picture_prompts import PROMPT_FORMS, EncodedPrompt, PicturePrompts, PromptForm, read_prompt
from raypp.api.running_request import COMPLETION_SEPARATOR, PreparedRequest
from raypp.api.tokenizer import ChatMessage, Tokenizer, check_context_length, context_length_error
from raypp.errors import RequestError
from raypp.messages import NO_INT32S, Int32s
from raypp.pictures.content import has_pictures
from raypp.pictures.reader import PictureReader
from raypp.request import Request
from raypp.sampling_params import MAX_BAD_WORD_SPELLINGS, MAX_BAD_WORD_TOKENS, MAX_END_TOKENS
from raypp.types import Prompt, SamplingParams

BadWords = tuple[tuple[int, ...], ...]


class ParamsChecker:
    """Checks parameters against one model."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, max_logprobs: int, eos_token_ids: Collection[int]
    ) -> None:
        """Check for one model.

        Args:
            tokenizer: None when prompts are token ids only.
            vocab_size: Token ids are below it.
            max_logprobs: The most log-probabilities that a request may ask for per token; -1: any number.
            eos_token_ids: The tokens that end a text.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_logprobs = vocab_size if max_logprobs == -1 else max_logprobs
        self._eos_token_ids = frozenset(eos_token_ids)

    def checked(self, request_id: str, params: SamplingParams) -> tuple[SamplingParams, BadWords]:
        """Return the parameters with every number said, and their bad words as tokens.

        Raises:
            RequestError: they do not fit the model.
        """
        self._check_text(request_id, params)
        self._check_token_ids(request_id, "stop_token_ids", params.stop_token_ids)
        self._check_counts(request_id, params)
        self._check_token_ids(request_id, "logit_bias", params.logit_bias)
        self._check_token_ids(request_id, "allowed_token_ids", params.allowed_token_ids or ())
        bad_words = self._bad_words(request_id, params)
        self._check_something_is_left(request_id, params, bad_words)
        logprobs = self._num_logprobs(request_id, "logprobs", params.logprobs)
        prompt_logprobs = self._num_logprobs(request_id, "prompt_logprobs", params.prompt_logprobs)
        if (logprobs, prompt_logprobs) != (params.logprobs, params.prompt_logprobs):
            params = replace(params, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        return params, bad_words

    def _check_text(self, request_id: str, params: SamplingParams) -> None:
        if self._tokenizer is not None:
            return
        for name, hint in (("stop", "use stop_token_ids"), ("bad_words", "use logit_bias")):
            if getattr(params, name):
                raise RequestError(
                    f"{name} needs a tokenizer, and the engine was started with skip_tokenizer_init",
                    request_id=request_id,
                    got=getattr(params, name),
                    expected="no strings",
                    hint=hint,
                    param=name,
                )

    def _check_token_ids(self, request_id: str, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise RequestError(
                    f"an entry of {name} is outside of the vocabulary",
                    request_id=request_id,
                    got=token_id,
                    expected=f"0 to {self._vocab_size - 1}",
                    hint="token ids are those of this model's tokenizer",
                    param=name,
                )

    def _check_counts(self, request_id: str, params: SamplingParams) -> None:
        num_allowed = len(params.allowed_token_ids or ())
        if num_allowed > self._vocab_size:
            raise RequestError(
                "SamplingParams.allowed_token_ids has too many entries",
                request_id=request_id,
                got=f"{num_allowed:,} entries",
                expected=f"at most {self._vocab_size:,}, the vocabulary",
                hint="name each token once",
                param="allowed_token_ids",
            )
        num_ends = len({*params.stop_token_ids} | (frozenset() if params.ignore_eos else self._eos_token_ids))
        if num_ends > MAX_END_TOKENS:
            raise RequestError(
                "SamplingParams.stop_token_ids has too many entries",
                request_id=request_id,
                got=f"{num_ends:,} tokens, the model's {len(self._eos_token_ids)} end-of-sequence tokens among them",
                expected=f"at most {MAX_END_TOKENS:,} together",
                hint="name fewer stop tokens",
                param="stop_token_ids",
            )

    def _num_logprobs(self, request_id: str, name: str, number: int | None) -> int | None:
        wanted = self._vocab_size if number == -1 else number
        if wanted is not None and wanted > self._max_logprobs:
            raise RequestError(
                f"SamplingParams.{name} asks for more than the engine gives",
                request_id=request_id,
                got=number,
                expected=f"at most max_logprobs = {self._max_logprobs}",
                hint="ask for fewer, or start the engine with a larger max_logprobs (-1: no limit)",
                param=name,
            )
        return None if wanted is None else min(wanted, self._vocab_size)

    def _bad_words(self, request_id: str, params: SamplingParams) -> BadWords:
        """Return how the tokenizer writes each word at the beginning of a text and after a space."""
        if not params.bad_words or self._tokenizer is None:
            return ()
        words = [word.strip(" ") for word in params.bad_words]
        texts = [text for word in words for text in (word, f" {word}")]
        spellings = [ids.tolist() for ids in self._tokenizer.encode(texts, add_special_tokens=False)]
        for word, token_ids in zip((word for word in words for _ in range(2)), spellings, strict=True):
            if len(token_ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    "an entry of bad_words is too long",
                    request_id=request_id,
                    got=f"{len(token_ids)} tokens: {word[:40]!r}...",
                    expected=f"at most {MAX_BAD_WORD_TOKENS} tokens",
                    hint="a part of it does, if that must not appear either",
                    param="bad_words",
                )
            self._check_token_ids(request_id, "bad_words", token_ids)
        distinct = tuple(dict.fromkeys(tuple(token_ids) for token_ids in spellings if token_ids))
        if len(distinct) > MAX_BAD_WORD_SPELLINGS:
            raise RequestError(
                "SamplingParams.bad_words has too many entries",
                request_id=request_id,
                got=f"{len(distinct):,} spellings of {len(words):,} words, each at the beginning and after a space",
                expected=f"at most {MAX_BAD_WORD_SPELLINGS:,} spellings",
                hint="logit_bias and allowed_token_ids ban tokens",
                param="bad_words",
            )
        return distinct

    def _check_something_is_left(self, request_id: str, params: SamplingParams, bad_words: BadWords) -> None:
        """Check that a text can begin: that bans leave a token of those that are allowed."""
        banned = {word[0] for word in bad_words if len(word) == 1}
        causes = ["bad_words"] if banned else []
        if params.min_tokens:
            ends = {*params.stop_token_ids} | (frozenset() if params.ignore_eos else self._eos_token_ids)
            banned |= ends
            causes += ["min_tokens"] if ends else []
        is_listed = params.allowed_token_ids is not None
        allowed = range(self._vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        num_allowed = len(set(allowed)) if is_listed else self._vocab_size
        if len(banned) < num_allowed or not banned.issuperset(allowed):
            return
        raise RequestError(
            "SamplingParams contradict each other: no token is left to begin with",
            request_id=request_id,
            got=f"{f'allowed_token_ids={list(allowed)[:20]}' if is_listed else 'the whole vocabulary'}, "
            f"all of them banned by {' and '.join(causes)}",
            expected="at least one allowed token that is not banned",
            hint="allow more tokens, or ban fewer; min_tokens bans stop_token_ids until it is reached",
            param="allowed_token_ids" if is_listed else causes[-1],
        )


Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int] | None

_NO_PRIORITY = "left out, it is 0"


def check_listed(given: object, expected: str) -> None:
    """Refuse what is not a list of things.

    Raises:
        RequestError: it is not.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(
            "not a list",
            got=f"{repr(given)[:80]} ({type(given).__name__})",
            expected=expected,
            hint="a single one goes into a list, too",
        )


def request_ids_of(given: Sequence[str] | None, num_requests: int) -> list[str]:
    """Return an id per request, made up when none are given.

    Raises:
        RequestError: they are not that many different names.
    """
    if given is None:
        return [f"req-{uuid.uuid4().hex}" for _ in range(num_requests)]
    check_listed(given, "a list of names")
    ids = list(given)
    for request_id in ids:
        if not isinstance(request_id, str) or not request_id or COMPLETION_SEPARATOR in request_id:
            raise RequestError(
                "a request_id is not a name",
                got=repr(request_id)[:80],
                expected="a non-empty str without NUL characters",
                hint="leave it out, and one is generated",
            )
    if len(ids) != num_requests or len(set(ids)) != num_requests:
        raise RequestError(
            "request_ids do not fit the prompts",
            got=repr(ids)[:80],
            expected=f"{num_requests} different ones",
            hint="leave them out, and they are generated",
        )
    return ids


def params_per_request(params: Params, num_requests: int, default: SamplingParams) -> list[SamplingParams]:
    """Return parameters per request, `default` when none are given.

    Raises:
        RequestError: they are of another kind, or not as many.
    """
    if params is None or isinstance(params, SamplingParams):
        params = [params or default] * num_requests
    result = list(params) if isinstance(params, Sequence) else [params]
    for param in result:
        if not isinstance(param, SamplingParams):
            raise RequestError(
                "sampling parameters of the wrong type",
                got=repr(param)[:80],
                expected="SamplingParams",
                hint="SamplingParams(**values) makes them of a dict",
            )
    if len(result) != num_requests:
        raise RequestError(
            "sampling parameters do not fit the prompts",
            got=f"{len(result)} for {num_requests} prompts",
            expected="one SamplingParams for all, or one per prompt",
            hint="a single SamplingParams, not in a list, serves all",
        )
    return result


def priorities(given: Priority, num_requests: int) -> list[int]:
    """Return a priority per request, 0 when none are given.

    Raises:
        RequestError: they are no numbers, or not as many.
    """
    expected = "an integer from -2**31 to 2**31 - 1 for all, or one per prompt; smaller is served first"
    listed = [given or 0] * num_requests if given is None or isinstance(given, int) else given
    if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) != num_requests:
        raise RequestError(
            "priorities do not fit the prompts", got=repr(given)[:80], expected=expected, hint=_NO_PRIORITY
        )
    for priority in listed:
        if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**31) <= priority < 2**31:
            raise RequestError(
                "a priority is not a number", got=repr(priority)[:80], expected=expected, hint=_NO_PRIORITY
            )
    return list(listed)


T = TypeVar("T")

_CONVERSATION_FORM = 'a list of messages like {"role": "user", "content": "..."}'
_ONE_MESSAGE = "a conversation has at least one message; generate() takes prompts"


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
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._seed = seed
        self._seeds = random.Random(seed)
        self._num_resets = 0

    def draw_seeds_as(self, name: str) -> None:
        """Draw the seeds of requests that bring none from another stream: engines side by side have the same seed."""
        self._seeds = random.Random(f"{self._seed}:{name}")

    def reset_prefix_cache(self) -> None:
        """Let later requests find nothing in the prefix cache of what earlier ones computed.

        They get a salt of their own; what is cached under others is overwritten first, as least recently used.
        """
        self._num_resets += 1

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
        check_listed(prompts, f"a list of prompts, each {PROMPT_FORMS}")
        ids = request_ids_of(request_ids, len(prompts))
        all_params = params_per_request(params, len(prompts), self._default_params)
        named_forms = [
            (request_id, prompt if isinstance(prompt, EncodedPrompt) else read_prompt(prompt, request_id))
            for prompt, request_id in zip(prompts, ids, strict=True)
        ]
        texts = [(name, form.text) for name, form in named_forms if _is_plain_text(form) and form.text is not None]
        encoded = iter(self._encode(texts, add_special_tokens=True))
        prepared = []
        for name, form in named_forms:
            if isinstance(form, EncodedPrompt):
                prepared.append(replace(form, token_ids=self._checked_token_ids(form.token_ids, name)))
                continue
            prompt = EncodedPrompt(next(encoded), text=form.text) if _is_plain_text(form) else self._encoded(form, name)
            prepared.append(replace(prompt, cache_salt=form.cache_salt))
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
        ids = request_ids_of(request_ids, len(conversations))
        all_params = params_per_request(params, len(conversations), self._default_params)
        for conversation in conversations:
            _check_conversation(conversation)
        conversations = [plain_conversation(conversation) for conversation in conversations]
        tokenizer = self._needed_tokenizer("a conversation")
        if any(has_pictures(conversation) for conversation in conversations):
            pictures = PicturePrompts(tokenizer, self._pictures)
            pictures.needed_reader()
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
            for request_id, text in texts:  # to find the one at fault
                _of_request(request_id, partial(encode, [text]))
            raise

    def _needed_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and the engine was started with skip_tokenizer_init",
                got=what,
                expected='{"prompt_token_ids": [...]}',
                hint="start the engine without skip_tokenizer_init",
            )
        return self._tokenizer

    def _encoded(self, form: PromptForm, request_id: str) -> EncodedPrompt:
        """Return a prompt that is no plain text."""
        token_ids = None if form.text is not None else self._checked_token_ids(form.token_ids, request_id)
        if form.images is None:
            assert token_ids is not None
            return EncodedPrompt(token_ids)
        prompts = PicturePrompts(self._needed_tokenizer("an image"), self._pictures)
        if token_ids is not None:
            return _of_request(request_id, partial(prompts.tokens, token_ids, form.images))
        return _of_request(request_id, partial(prompts.text, form.text or "", form.images))

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
            request = Request(
                request_id,
                ids,
                checked,
                seed=0,
                eos_token_ids=self._eos_token_ids,
                bad_word_token_ids=bad_words,
                priority=priority,
                items=prompt.items,
                cache_salt=f"{self._num_resets}:{prompt.cache_salt!r}" if self._num_resets else prompt.cache_salt,
            )
            prepared.append(PreparedRequest(request, prompt.text, prompt.make_stop_scope))
        for one in prepared:  # only now: refused requests draw none
            seed = one.request.params.seed
            one.request.seed = self._seeds.getrandbits(63) if seed is None else seed
        return prepared

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


def _is_plain_text(form: PromptForm | EncodedPrompt) -> bool:
    return isinstance(form, PromptForm) and form.text is not None and form.images is None


def _check_conversation(conversation: object) -> None:
    expected = _CONVERSATION_FORM
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise RequestError("not a conversation", got=repr(conversation)[:80], expected=expected, hint=_ONE_MESSAGE)
    for message in conversation:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                "a conversation with something else in it", got=repr(message)[:80], expected=expected, hint=_ONE_MESSAGE
            )
