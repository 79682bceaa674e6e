"""Beam search, built on requests for one token each: of all continuations so far, the likeliest are continued.

The engine knows nothing of it. The prefix cache spares it what a beam has in common with the beam that it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from raypp.api.picture_prompts import EncodedPrompt
from raypp.errors import RequestError, refusing_unknown
from raypp.types import Logprobs, RequestOutput, SamplingParams


@refusing_unknown
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search. Raises RequestError on a value that makes no sense."""

    beam_width: int
    """Continuations that are kept at each length, and returned."""
    max_tokens: int
    """The most tokens to generate."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""
    length_penalty: float = 1.0
    """Continuations are compared by their log-probability over their number of tokens to this power: above 0, longer
    ones are preferred to what 0 prefers."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(
                    f"BeamSearchParams.{name} is out of range",
                    got=repr(value)[:80],
                    expected="an integer of at least 1",
                    hint=f"{name}: 4 and 64 are usual values"
                    if name == "beam_width"
                    else "the most tokens to generate",
                    param=name,
                )


@dataclass(kw_only=True, slots=True)
class BeamSearchSequence:
    """One continuation."""

    tokens: list[int]
    """The prompt and the continuation, without the end-of-sequence token."""
    logprobs: list[Logprobs] = field(default_factory=list)
    """For every token of the continuation, that of the end-of-sequence token too."""
    cum_logprob: float = 0.0
    """The sum of the log-probabilities of its tokens."""
    text: str | None = None
    """The text of `tokens`; None without a tokenizer."""
    finish_reason: Literal["stop", "length"] | None = None


@dataclass(kw_only=True, slots=True)
class BeamSearchOutput:
    """What was found for one prompt."""

    sequences: list[BeamSearchSequence]
    """At most `beam_width`, the best first."""


Run = Callable[[list[EncodedPrompt], SamplingParams], list[RequestOutput]]


class _Search:
    """The search for one prompt."""

    def __init__(
        self, prompt: EncodedPrompt, params: BeamSearchParams, eos: Collection[int], max_model_len: int
    ) -> None:
        self.prompt = prompt
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos)
        self._num_prompt = len(prompt.token_ids)
        self._num_left = min(params.max_tokens, max_model_len - self._num_prompt)
        self._ended: list[BeamSearchSequence] = []
        self.beams = [BeamSearchSequence(tokens=prompt.token_ids.tolist())]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Take in the likeliest next tokens of each beam, and keep the likeliest beams of all."""
        longer = list[BeamSearchSequence]()
        for beam, output in zip(self.beams, outputs, strict=True):
            [of_next] = output.outputs[0].logprobs or []
            for token, entry in of_next.items():
                is_end = token in self._eos
                grown = BeamSearchSequence(
                    tokens=beam.tokens if is_end else [*beam.tokens, token],
                    logprobs=[*beam.logprobs, of_next],
                    cum_logprob=beam.cum_logprob + entry.logprob,
                    finish_reason="stop" if is_end else None,
                )
                (self._ended if is_end else longer).append(grown)
        self.beams = sorted(longer, key=lambda beam: -beam.cum_logprob)[: self._params.beam_width]
        self._num_left -= 1
        if self._num_left == 0:
            for beam in self.beams:
                beam.finish_reason = "length"
            self._ended += self.beams
            self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """Return the best continuations."""
        return sorted(self._ended, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        num_tokens = max(len(beam.tokens) - self._num_prompt, 1)
        score: float = beam.cum_logprob / num_tokens**self._params.length_penalty
        return score


def search_beams(
    prompts: Sequence[EncodedPrompt], params: BeamSearchParams, run: Run, *, eos: Collection[int], max_model_len: int
) -> list[BeamSearchOutput]:
    """Return the best continuations of each prompt. The beams of all prompts go to the engine together.

    Args:
        prompts: What to continue.
        params: How to search.
        run: Runs requests to their end.
        eos: The tokens that end a text.
        max_model_len: The most tokens of a prompt and its continuation.
    """
    one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, detokenize=False)
    searches = [_Search(prompt, params, eos, max_model_len) for prompt in prompts]
    while active := [search for search in searches if search.beams]:
        beams = [(search.prompt, beam) for search in active for beam in search.beams]
        asked = [EncodedPrompt(np.array(beam.tokens, np.int32), cache_salt=prompt.cache_salt) for prompt, beam in beams]
        outputs = iter(run(asked, one))
        for search in active:
            search.advance([next(outputs) for _ in search.beams])
    return [BeamSearchOutput(sequences=search.best()) for search in searches]
