"""What a body becomes: prompts and parameters for the engine, and how its outputs become the response.

HTTP and batches both go this way: the same body has the same prompt, parameters and response behind either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raypp.api.picture_prompts import EncodedPrompt
from raypp.openai_api.from_outputs import ResponseHead, chat_completion, completion, usage_of
from raypp.openai_api.logprob_answers import TEXTS_ALONE, TokenNames
from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.responses import ChatCompletion, Completion, Usage
from raypp.types import CompletionOutput, RequestOutput, SamplingParams


@dataclass(frozen=True)
class PreparedChat:
    """A conversation to be answered."""

    prompt: EncodedPrompt
    params: SamplingParams
    make_parser: Callable[[], MessageParser]
    """Of a parser for each answer."""
    num_reasoning: Callable[[CompletionOutput], int] = lambda _: 0
    """Returns how many of an answer's tokens are thoughts."""
    names: TokenNames = TEXTS_ALONE
    """How log-probabilities name tokens."""
    return_token_ids: bool = False
    """Whether the response holds the tokens."""

    @property
    def prompts(self) -> list[EncodedPrompt]:
        """The prompt, in a list."""
        return [self.prompt]

    def shown(self, output: RequestOutput) -> RequestOutput:
        """Return what of the engine's output belongs into the response: all of it."""
        return output

    def response(self, head: ResponseHead, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """Return the response of the finished output."""
        [output] = outputs
        return chat_completion(
            head,
            output,
            self.params,
            self.make_parser,
            self.num_reasoning,
            names=self.names,
            return_token_ids=self.return_token_ids,
        )

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """Return how many tokens the answers have so far."""
        return usage_of(outputs, self.num_reasoning)


@dataclass(frozen=True)
class RetoldChat:
    """A chat whose answer is told in another API's words."""

    chat: PreparedChat

    @property
    def prompts(self) -> list[EncodedPrompt]:
        """The prompt, in a list."""
        return self.chat.prompts

    @property
    def params(self) -> SamplingParams:
        """How to sample."""
        return self.chat.params


@dataclass(frozen=True)
class PreparedCompletion:
    """Prompts to be continued."""

    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    names: TokenNames = TEXTS_ALONE
    """How log-probabilities name tokens."""
    echo: bool = False
    """Whether texts begin with their prompts."""
    is_scoring: bool = False
    """Whether the one token that the engine generates is left out."""
    return_token_ids: bool = False
    """Whether the response holds the tokens."""

    def shown(self, output: RequestOutput) -> RequestOutput:
        """Return what of the engine's output belongs into the response."""
        if not self.is_scoring:
            return output
        outputs = [
            replace(
                one,
                text="",
                token_ids=[],
                logprobs=None if one.logprobs is None else [],
                finish_reason=one.finish_reason and "length",
                stop_reason=None,
            )
            for one in output.outputs
        ]
        return replace(output, outputs=outputs)

    def response(self, head: ResponseHead, outputs: Sequence[RequestOutput]) -> Completion:
        """Return the response of the finished outputs, one per prompt."""
        shown = [self.shown(output) for output in outputs]
        return completion(
            head, shown, self.params, names=self.names, echo=self.echo, return_token_ids=self.return_token_ids
        )

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """Return how many tokens the continuations have so far."""
        return usage_of(outputs)


Prepared = PreparedChat | PreparedCompletion
AnyPrepared = Prepared | RetoldChat
