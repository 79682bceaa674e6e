"""The body of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import BeforeValidator, Field

from raypp.errors import RequestError
from raypp.openai_api.error_bodies import END_OF_TOKEN_IDS, BodyError
from raypp.openai_api.foreign_fields import OF_COMPLETIONS, ForeignField
from raypp.openai_api.request_fields import NO_DEFAULTS, CompletionFields, Entries, Integer, make_sampling_params
from raypp.types import SamplingParams

_DEFAULT_MAX_TOKENS = 16

TokenId = Annotated[int, Field(ge=0, lt=END_OF_TOKEN_IDS)]

# That a prompt is empty is said later, in better words; the app's description says it beforehand.
T = TypeVar("T")
_Listed = Annotated[Entries[T], Field(json_schema_extra={"minItems": 1})]

_KINDS = {str: "text", int: "a token id", list: "a list of token ids"}


def _of_one_kind(prompt: Any) -> Any:
    """Refuse a list of prompts of several kinds: pydantic would name an entry that another kind of list does not have.

    Raises:
        BodyError: names the first entry that is not of the first one's kind.
    """
    if not isinstance(prompt, list) or len(set(map(type, prompt))) < 2 or type(prompt[0]) not in _KINDS:
        return prompt
    index = next(i for i, one in enumerate(prompt) if type(one) is not type(prompt[0]))
    where = f"prompt[{index}]"
    raise BodyError(
        "the entries of prompt are of several kinds",
        got=f"{where} = {repr(prompt[index])[:80]}",
        expected=f"{_KINDS[type(prompt[0])]}, as prompt[0] is: all have to be of one kind",
        hint="send token ids and texts in requests of their own",
        param=where,
    )


class CompletionRequest(CompletionFields):
    """The body of `/v1/completions`."""

    foreign: ClassVar[Mapping[str, ForeignField]] = OF_COMPLETIONS

    prompt: Annotated[str | _Listed[TokenId] | _Listed[str] | _Listed[_Listed[TokenId]], BeforeValidator(_of_one_kind)]
    """What to continue: text or token ids, one or several."""
    max_tokens: Integer | None = Field(default=None, ge=0)
    """The most tokens to generate; 0 only with `echo`, for the log-probabilities of the prompt."""
    logprobs: Integer | None = Field(default=None, ge=0, le=20)
    """Return log-probabilities of the generated tokens, and of this many alternatives at each position."""
    echo: bool | None = None
    """Begin the text with the prompt."""
    best_of: Integer | None = Field(default=None, ge=1)
    """Only the value of `n`: nothing is generated to be thrown away."""

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids; the choices follow their order.

        Raises:
            RequestError: there is none.
        """
        given = self.prompt
        if not given and not isinstance(given, str):
            raise RequestError("there is no prompt", got=given, expected="at least one", param="prompt")
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return cast("list[str | list[int]]", [given] if is_one else given)

    @property
    def is_scoring(self) -> bool:
        """Whether nothing is to be generated: what is asked for are the prompts' log-probabilities."""
        return self.max_tokens == 0

    def sampling_params(self, max_model_len: int, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """Return how to sample; without a limit, here or among the defaults, OpenAI's 16 tokens.

        Args:
            max_model_len: The most tokens of a request, prompt and output together.
            defaults: Fields of `SamplingParams` that hold where the body says nothing.

        Raises:
            RequestError: a value that makes no sense, or one that this engine cannot serve.
        """
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                "best_of differs from n",
                got=self.best_of,
                expected=f"n = {self.n or 1}, or nothing",
                param="best_of",
            )
        if self.is_scoring and not self.echo:
            raise RequestError(
                "max_tokens is 0, and there is no echo: the answer would be empty",
                got=self.max_tokens,
                expected="at least 1, or echo=true beside it",
                param="max_tokens",
            )
        given = self.given_params(defaults)
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
            if self.echo:
                given["prompt_logprobs"] = self.logprobs
        given.setdefault("max_tokens", _DEFAULT_MAX_TOKENS)
        if self.is_scoring:
            given["max_tokens"] = 1  # the least that the engine computes; the answer leaves it out
        return make_sampling_params(given, max_model_len)
