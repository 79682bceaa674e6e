"""What users hand in and get back: sampling parameters and request outputs.

Names and shapes are those that users of `vllm.LLM` know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypedDict

from raypp.sampling_params import SamplingParams as SamplingParams

FinishReasonName = Literal["stop", "length", "abort", "error"]


class FinishReason(IntEnum):
    """Why a request ended; `NONE` while it runs."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class PromptDetails(TypedDict, total=False):
    """What may stand beside a prompt."""

    multi_modal_data: dict[str, Any]
    """`{"image": image}` or `{"image": [image, ...]}`: PIL images, paths, bytes or arrays. The text holds one of the
    model's marks for each, or the tokens one placeholder for each."""
    cache_salt: str
    """Prompts share what is cached of their beginnings only with those of the same salt."""


class TextPrompt(PromptDetails):
    """A prompt that is text."""

    prompt: str


class TokensPrompt(PromptDetails):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]


Prompt = str | list[int] | TextPrompt | TokensPrompt


@dataclass(kw_only=True, slots=True)
class RequestMetrics:
    """When things happened to one request. Times ending in `_time_s` are seconds since the epoch."""

    arrival_time_s: float
    first_token_time_s: float | None = None
    finish_time_s: float | None = None
    ttft_s: float | None = None
    """Arrival to first token, seconds."""
    tpot_s: float | None = None
    """Mean time per output token after the first, seconds."""
    queue_s: float | None = None
    """Arrival at the driver to the first row, seconds."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """Drafts that were verified. Misses, in whose place any token is verified, are none."""
    num_accepted_tokens: int = 0
    """Of these, those that the model would have chosen itself."""
    drafted_by_position: list[int] = field(default_factory=list)
    """`num_draft_tokens` by their place behind the last token that was known."""
    accepted_by_position: list[int] = field(default_factory=list)
    """`num_accepted_tokens` likewise."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of those that were verified, 0..1; 0 without any."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def acceptance_length(self) -> float:
        """Tokens per step that verified drafts, at least 1."""
        num_steps = self.drafted_by_position[0] if self.drafted_by_position else 0
        return 1 + self.num_accepted_tokens / max(num_steps, 1)


class Logprob(NamedTuple):
    """What the model said of one token at one position, before bias, penalties and temperature."""

    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None
    """The token's text alone; None when there is no tokenizer."""


Logprobs = dict[int, Logprob]
"""Of one position, by token id: the token that is there first, then the most likely ones."""


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One generated continuation."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """The sum of its tokens' log-probabilities; None when `logprobs` were not asked for."""
    logprobs: list[Logprobs] | None = None
    """For every one of `token_ids`; None when they were not asked for."""
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for EOS or length."""


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """A request and what has been generated for it so far (cumulative)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """The continuations, `SamplingParams.n` of them, by index."""
    finished: bool
    metrics: RequestMetrics
    """Of the first continuation's start and the last one's end, where they differ."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """For every one of `prompt_token_ids`, None for the first; None when they were not asked for. While the prompt is
    still being computed, as far as that has come."""
