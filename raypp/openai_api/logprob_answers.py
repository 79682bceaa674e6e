"""The engine's log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypp.openai_api.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)
from raypp.types import Logprob, Logprobs

_INCOMPLETE = "\ufffd"


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[Logprobs], num_top: int) -> ChatLogprobs:
    """Return the log-probabilities of a message, or of a part of it.

    Args:
        token_ids: Its tokens.
        logprobs: What the engine said at each.
        num_top: Alternatives that were asked for.
    """
    content = [
        TokenLogprob(
            token=token_text(token_id, at_position[token_id]),
            logprob=at_position[token_id].logprob,
            bytes=_utf8(at_position[token_id]),
            top_logprobs=[
                TopLogprob(token=token_text(other, entry), logprob=entry.logprob, bytes=_utf8(entry))
                for other, entry in _top(at_position, num_top)
            ],
        )
        for token_id, at_position in zip(token_ids, logprobs, strict=True)
    ]
    return ChatLogprobs(content=content)


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Logprobs | None], num_top: int, offset: int = 0, first_text: str = ""
) -> CompletionLogprobs:
    """Return the log-probabilities of a text, or of a part of it.

    Args:
        token_ids: Its tokens.
        logprobs: What the engine said at each; None for a prompt's first token, which nothing precedes.
        num_top: Alternatives that were asked for.
        offset: Characters of the text before the first of these tokens.
        first_text: The text of a prompt's first token.
    """
    tokens = [
        first_text if at_position is None else token_text(token_id, at_position[token_id])
        for token_id, at_position in zip(token_ids, logprobs, strict=True)
    ]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[
            None if at_position is None else at_position[token_id].logprob
            for token_id, at_position in zip(token_ids, logprobs, strict=True)
        ],
        top_logprobs=[
            None if at_position is None else _by_text(token_id, at_position, num_top)
            for token_id, at_position in zip(token_ids, logprobs, strict=True)
        ]
        if num_top
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


def token_text(token_id: int, entry: Logprob) -> str:
    """Return a token's text, or its number where there is no tokenizer."""
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def _top(at_position: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    ranked = sorted(at_position.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= num_top]


def _by_text(token_id: int, at_position: Mapping[int, Logprob], num_top: int) -> dict[str, float]:
    """Return the alternatives and the token itself. Of two that look alike the likelier one is kept."""
    entries = _top(at_position, num_top)
    entries += [(token_id, at_position[token_id])]
    by_text: dict[str, float] = {}
    for other, entry in entries:
        by_text.setdefault(token_text(other, entry), entry.logprob)
    return by_text


def _utf8(entry: Logprob) -> list[int] | None:
    """Return a token's bytes; None if it is a part of a character, whose bytes its text does not tell."""
    text = entry.decoded_token
    return None if text is None or _INCOMPLETE in text else list(text.encode())
