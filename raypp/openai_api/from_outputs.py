"""What a body becomes: prompts and parameters for the engine, and how its outputs become OpenAI's response.

HTTP and batches both go this way: the same body has the same prompt, parameters and response behind either.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from raypp.api.picture_prompts import EncodedPrompt
from raypp.api.request_text import Decoder, Detokenizer, TokenPlaces, prompt_places
from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    FinishReason,
    PromptLogprob,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from raypp.types import CompletionOutput, Logprob, Logprobs, RequestOutput, SamplingParams


@dataclass(frozen=True)
class TokenNames:
    """How log-probabilities name tokens."""

    decoder: Decoder | None = None
    """The model's tokenizer, if it has one: tells the tokens' bytes, and where in the text they are."""
    are_ids: bool = False
    """Whether all tokens go by their numbers (vLLM), not only those without a text."""

    def name(self, token_id: int, entry: Logprob) -> str:
        """Return a token's text, or its number where that is asked for or there is no tokenizer."""
        return f"token_id:{token_id}" if self.are_ids or entry.decoded_token is None else entry.decoded_token

    def name_of_first(self, token_id: int) -> str:
        """Return the name of a prompt's first token, which nothing precedes."""
        text = None if self.decoder is None else self.decoder.token_text(token_id)
        return self.name(token_id, Logprob(0.0, 0, text))

    def utf8(self, token_id: int) -> list[int] | None:
        """Return a token's bytes; None where there is no tokenizer."""
        return None if self.decoder is None else list(self.decoder.token_bytes(token_id))


TEXTS_ALONE = TokenNames()
"""For log-probabilities that have the tokens' texts, without a tokenizer."""


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Logprobs], num_top: int, names: TokenNames
) -> ChatLogprobs:
    """Return the log-probabilities of a message, or of a part of it.

    Args:
        token_ids: Its tokens.
        logprobs: What the engine said at each.
        num_top: Alternatives that were asked for.
        names: How to name tokens.
    """
    content = [
        TokenLogprob(
            token=names.name(token_id, at_position[token_id]),
            logprob=at_position[token_id].logprob,
            bytes=names.utf8(token_id),
            top_logprobs=[
                TopLogprob(token=names.name(other, entry), logprob=entry.logprob, bytes=names.utf8(other))
                for other, entry in _top(at_position, num_top)
            ],
        )
        for token_id, at_position in zip(token_ids, logprobs, strict=True)
    ]
    return ChatLogprobs(content=content)


class TextLogprobs:
    """The log-probabilities of one choice's text while it grows; with an echo, those of its prompt come first."""

    def __init__(self, params: SamplingParams, names: TokenNames, output: RequestOutput, *, echo: bool) -> None:
        """Begin before the first token.

        Args:
            params: How it is sampled.
            names: How to name tokens, and where in the text they are; without a decoder there is no text.
            output: The choice's.
            echo: Whether the text begins with the prompt.
        """
        self._num_top = params.logprobs or 0
        self._names = names
        self._decoder = decoder = names.decoder
        self._places = TokenPlaces(len(output.prompt or "") if echo else 0)
        self._detokenizer = (
            None if decoder is None else Detokenizer.of_continuation(decoder, params, output.prompt_token_ids)
        )
        self._num_told = 0
        self._echoed = output if echo and output.prompt_logprobs is not None else None

    def new_in(self, completion: CompletionOutput) -> CompletionLogprobs | None:
        """Return those of the tokens that are new since the last call; None if none were asked for."""
        if completion.logprobs is None:
            return None
        token_ids = completion.token_ids[self._num_told :]
        logprobs: list[Logprobs | None] = [*completion.logprobs[self._num_told :]]
        offsets = [self._places.add(self._detokenizer.piece(t) if self._detokenizer else b"") for t in token_ids]
        self._num_told = len(completion.token_ids)
        if self._echoed is not None:
            prompt, prompt_ids = self._echoed.prompt or "", self._echoed.prompt_token_ids
            of_prompt = prompt_places(self._decoder, prompt, prompt_ids) if self._decoder else [0] * len(prompt_ids)
            offsets = of_prompt + offsets
            token_ids, logprobs = prompt_ids + token_ids, [*(self._echoed.prompt_logprobs or ()), *logprobs]
            self._echoed = None
        positions = list(zip(token_ids, logprobs, strict=True))
        return CompletionLogprobs(
            tokens=[
                self._names.name(token_id, at[token_id]) if at else self._names.name_of_first(token_id)
                for token_id, at in positions
            ],
            token_logprobs=[at[token_id].logprob if at else None for token_id, at in positions],
            top_logprobs=[
                _by_name(token_id, at, self._num_top, self._names) if at else None for token_id, at in positions
            ]
            if self._num_top
            else None,
            text_offset=offsets,
        )


def prompt_logprobs(logprobs: Sequence[Logprobs | None]) -> list[dict[str, PromptLogprob] | None]:
    """Return a prompt's log-probabilities by token id, in vLLM's shape."""
    return [
        None
        if at_position is None
        else {
            str(token_id): PromptLogprob(logprob=entry.logprob, rank=entry.rank, decoded_token=entry.decoded_token)
            for token_id, entry in at_position.items()
        }
        for at_position in logprobs
    ]


def _top(at_position: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    ranked = sorted(at_position.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= num_top]


def _by_name(token_id: int, at_position: Mapping[int, Logprob], num_top: int, names: TokenNames) -> dict[str, float]:
    """Return the alternatives and the token itself. Of two that look alike the likelier one is kept."""
    entries = _top(at_position, num_top)
    entries += [(token_id, at_position[token_id])]
    by_name: dict[str, float] = {}
    for other, entry in entries:
        by_name.setdefault(names.name(other, entry), entry.logprob)
    return by_name


@dataclass(frozen=True)
class ResponseHead:
    """What all chunks of a response have in common."""

    id: str
    created: int  # seconds since the epoch
    model: str

    @classmethod
    def new(cls, prefix: str, model: str, name: str | None = None) -> ResponseHead:
        """Name a response.

        Args:
            prefix: What its id begins with: `chatcmpl-`, `cmpl-` or `resp_`.
            model: The served model's name.
            name: What follows; by default something random.
        """
        return cls(f"{prefix}{name or uuid.uuid4().hex}", int(time.time()), model)


def usage_of(outputs: Sequence[RequestOutput], num_reasoning: Callable[[CompletionOutput], int] | None = None) -> Usage:
    """Return how many tokens the requests had, together.

    Args:
        outputs: The engine's.
        num_reasoning: Returns how many of a continuation's tokens are thoughts; None: the usage does not say.
    """
    texts = [completion for output in outputs for completion in output.outputs]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(text.token_ids) for text in texts)
    num_cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        completion_tokens_details=None
        if num_reasoning is None
        else CompletionTokensDetails(reasoning_tokens=sum(map(num_reasoning, texts))),
    )


def _parsed(completion: CompletionOutput, parser: MessageParser) -> tuple[AssistantMessage, FinishReason | None]:
    """Return the message that an answer's text is, and why it ended."""
    delta = parser.feed(completion.text, is_last=True)
    plain = delta.plain(as_function_call=parser.as_function_call)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in plain.get("tool_calls", ())]
    message = AssistantMessage(
        content=delta.content or (None if delta.calls else ""),
        reasoning_content=plain.get("reasoning_content"),
        reasoning=plain.get("reasoning"),
        tool_calls=calls or None,
        function_call=plain.get("function_call"),
    )
    return message, reason_of(completion, parser)


def reason_of(completion: CompletionOutput, parser: MessageParser) -> FinishReason | None:
    """Return why an answer ended; `tool_calls` (or `function_call`) when it ended by itself and its calls are whole."""
    reason = completion.finish_reason
    if reason != "stop" or not parser.has_whole_calls:
        return reason
    return "function_call" if parser.as_function_call else "tool_calls"


@dataclass(frozen=True)
class PreparedChat:
    """A conversation to be answered."""

    prompts: Sequence[EncodedPrompt]
    """One."""
    params: SamplingParams
    make_parser: Callable[[], MessageParser] = lambda: MessageParser(thoughts=None, calls=None)
    """Of a parser for each answer."""
    num_reasoning: Callable[[CompletionOutput], int] = lambda _: 0
    """Returns how many of an answer's tokens are thoughts."""
    names: TokenNames = TEXTS_ALONE
    """How log-probabilities name tokens."""
    return_token_ids: bool = False
    """Whether the response holds the tokens."""

    def shown(self, output: RequestOutput) -> RequestOutput:
        """Return what of the engine's output belongs into the response: all of it."""
        return output

    def response(self, head: ResponseHead, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """Return the response of the finished output."""
        [output] = outputs
        parsed = [_parsed(completion, self.make_parser()) for completion in output.outputs]
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[
                ChatChoice(
                    index=completion.index,
                    message=message,
                    logprobs=None
                    if completion.logprobs is None
                    else chat_logprobs(
                        completion.token_ids, completion.logprobs, self.params.logprobs or 0, self.names
                    ),
                    finish_reason=finish_reason,
                    stop_reason=completion.stop_reason,
                    token_ids=completion.token_ids if self.return_token_ids else None,
                )
                for completion, (message, finish_reason) in zip(output.outputs, parsed, strict=True)
            ],
            usage=self.usage(outputs),
            prompt_logprobs=None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if self.return_token_ids else None,
        )

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """Return how many tokens the answers have so far."""
        return usage_of(outputs, self.num_reasoning)


@dataclass(frozen=True)
class RetoldChat:
    """A chat whose answer has another API's shape."""

    chat: PreparedChat

    @property
    def prompts(self) -> Sequence[EncodedPrompt]:
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
    """Whether texts begin with their prompts. A prompt that came as token ids has no text."""
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
        """Return the response of the finished outputs, one per prompt: the first prompt's texts, then the second's."""
        shown, echo = [self.shown(output) for output in outputs], self.echo
        choices = [
            CompletionChoice(
                index=prompt_index * len(output.outputs) + one.index,
                text=(output.prompt or "") + one.text if echo else one.text,
                logprobs=TextLogprobs(self.params, self.names, output, echo=echo).new_in(one),
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
                prompt_logprobs=None
                if output.prompt_logprobs is None or echo
                else prompt_logprobs(output.prompt_logprobs),
                token_ids=one.token_ids if self.return_token_ids else None,
                prompt_token_ids=output.prompt_token_ids if self.return_token_ids else None,
            )
            for prompt_index, output in enumerate(shown)
            for one in output.outputs
        ]
        return Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage_of(shown))

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """Return how many tokens the continuations have so far."""
        return usage_of(outputs)


Prepared = PreparedChat | PreparedCompletion
AnyPrepared = Prepared | RetoldChat
