"""From what the engine returns to OpenAI's responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from raypp.openai_api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    PromptTokensDetails,
    Usage,
)
from raypp.types import RequestOutput


@dataclass(frozen=True)
class ResponseHead:
    """What all chunks of a response have in common."""

    id: str
    created: int  # seconds since the epoch
    model: str

    @classmethod
    def new(cls, kind: str, model: str) -> ResponseHead:
        """Make one up.

        Args:
            kind: `chatcmpl` or `cmpl`.
            model: The served model's name.
        """
        return cls(f"{kind}-{uuid.uuid4().hex}", int(time.time()), model)


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Return how many tokens the requests had, together."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    num_cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
    )


def chat_completion(head: ResponseHead, output: RequestOutput) -> ChatCompletion:
    """Return a finished conversation's answers."""
    choices = [
        ChatChoice(
            index=completion.index,
            message=AssistantMessage(content=completion.text),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        for completion in output.outputs
    ]
    return ChatCompletion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage_of([output]))


def completion(head: ResponseHead, outputs: Sequence[RequestOutput], *, echo: bool = False) -> Completion:
    """Return finished prompts' continuations: the first prompt's, then the second's.

    Args:
        head: The response's name.
        outputs: One per prompt.
        echo: Begin each text with its prompt. A prompt that came as token ids has no text.
    """
    choices = [
        CompletionChoice(
            index=prompt_index * len(output.outputs) + continued.index,
            text=(output.prompt or "") + continued.text if echo else continued.text,
            finish_reason=continued.finish_reason,
            stop_reason=continued.stop_reason,
        )
        for prompt_index, output in enumerate(outputs)
        for continued in output.outputs
    ]
    return Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage_of(outputs))
