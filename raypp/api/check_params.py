"""What can be wrong with sampling parameters only when the model is known: its vocabulary, tokenizer and limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from raypp.api.tokenizer import Tokenizer
from raypp.errors import RequestError
from raypp.request_limits import MAX_BAD_WORD_SPELLINGS, MAX_BAD_WORD_TOKENS, MAX_END_TOKENS
from raypp.types import SamplingParams

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
