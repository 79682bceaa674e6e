"""From what the engine returns to OpenAI's responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raypp.openai_api.logprob_answers import TEXTS_ALONE, TextLogprobs, TokenNames, chat_logprobs, prompt_logprobs
from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionTokensDetails,
    FinishReason,
    PromptTokensDetails,
    Usage,
)
from raypp.types import CompletionOutput, RequestOutput, SamplingParams


def _plain_parser() -> MessageParser:
    return MessageParser(thoughts=None, calls=None)


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
        num_reasoning: Returns how many of a continuation's tokens are thoughts; None: nobody asks.
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


def chat_completion(
    head: ResponseHead,
    output: RequestOutput,
    params: SamplingParams,
    make_parser: Callable[[], MessageParser] = _plain_parser,
    num_reasoning: Callable[[CompletionOutput], int] | None = None,
    *,
    names: TokenNames = TEXTS_ALONE,
    return_token_ids: bool = False,
) -> ChatCompletion:
    """Return a finished conversation's answers.

    Args:
        head: The response's name.
        output: The engine's.
        params: How it was sampled.
        make_parser: Of a parser for each answer.
        num_reasoning: As of `usage_of`.
        names: How log-probabilities name tokens.
        return_token_ids: Whether to hold the tokens.
    """
    parsed = [_parsed(completion, make_parser()) for completion in output.outputs]
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
                else chat_logprobs(completion.token_ids, completion.logprobs, params.logprobs or 0, names),
                finish_reason=finish_reason,
                stop_reason=completion.stop_reason,
                token_ids=completion.token_ids if return_token_ids else None,
            )
            for completion, (message, finish_reason) in zip(output.outputs, parsed, strict=True)
        ],
        usage=usage_of([output], num_reasoning),
        prompt_logprobs=None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if return_token_ids else None,
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


def completion(
    head: ResponseHead,
    outputs: Sequence[RequestOutput],
    params: SamplingParams,
    *,
    names: TokenNames = TEXTS_ALONE,
    echo: bool = False,
    return_token_ids: bool = False,
) -> Completion:
    """Return finished prompts' continuations: the first prompt's, then the second's.

    Args:
        head: The response's name.
        outputs: One per prompt.
        params: How they were sampled.
        names: How log-probabilities name tokens.
        echo: Begin each text with its prompt. A prompt that came as token ids has no text.
        return_token_ids: Whether to hold the tokens.
    """
    choices = [
        CompletionChoice(
            index=prompt_index * len(output.outputs) + continued.index,
            text=(output.prompt or "") + continued.text if echo else continued.text,
            logprobs=TextLogprobs(params, names, output, echo=echo).new_in(continued),
            finish_reason=continued.finish_reason,
            stop_reason=continued.stop_reason,
            prompt_logprobs=None if output.prompt_logprobs is None or echo else prompt_logprobs(output.prompt_logprobs),
            token_ids=continued.token_ids if return_token_ids else None,
            prompt_token_ids=output.prompt_token_ids if return_token_ids else None,
        )
        for prompt_index, output in enumerate(outputs)
        for continued in output.outputs
    ]
    return Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage_of(outputs))
