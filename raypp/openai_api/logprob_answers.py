"""The engine's log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypp.api.detokenizer import Decoder, Detokenizer, TokenPlaces, prompt_places
from raypp.openai_api.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
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
