"""What users hand in and get back: sampling parameters and request outputs.

Names and shapes are those that users of `vllm.LLM` know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, TypedDict

from raypp.errors import RequestError

_MAX_NUMBER = 1e30  # what float32 holds with room to spare

FinishReasonName = Literal["stop", "length", "abort", "error"]


class FinishReason(IntEnum):
    """Why a request ended; `NONE` while it runs."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Raises RequestError on a value that makes no sense.
    """

    max_tokens: int = 16
    """The most tokens to generate."""
    temperature: float = 1.0
    """Divides the logits; 0 means greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 (or -1) keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    seed: int | None = None
    """The text depends on the prompt, the parameters and this seed alone; None draws one,
    from a stream that begins with the engine's own seed."""
    stop: tuple[str, ...] | list[str] | str = ()
    """The text ends before the first of these strings. Kept as a tuple; None is none."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """The request ends with the first of these tokens. Kept as a tuple; None is none."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _check("max_tokens", self.max_tokens, "an integer of at least 1", _is_int(self.max_tokens, 1))
        _check("temperature", self.temperature, "a number from 0 to 1e30", _is_number(self.temperature, 0.0, math.inf))
        _check("top_p", self.top_p, "0 < top_p <= 1", _is_number(self.top_p, 0.0, 1.0) and self.top_p > 0)
        _check("top_k", self.top_k, "an integer of at least 1, or 0 (or -1) for all", _is_int(self.top_k, 0))
        _check("min_p", self.min_p, "0 <= min_p <= 1", _is_number(self.min_p, 0.0, 1.0))
        _check(
            "seed",
            self.seed,
            "an integer from -2**63 to 2**63 - 1, or None",
            self.seed is None or (_is_int(self.seed, -(2**63)) and self.seed < 2**63),
        )
        _check("stop", self.stop, "non-empty strings", all(isinstance(s, str) and s for s in self.stop))
        _check("stop_token_ids", self.stop_token_ids, "token ids", all(_is_int(t, 0) for t in self.stop_token_ids))


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise RequestError(f"SamplingParams.{name} is not a list", got=repr(value), expected="a list or a tuple")
    return tuple(value)


def _is_int(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_number(value: object, low: float, high: float) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (isinstance(value, int) or math.isfinite(value))
        and low <= value <= high
        and value <= _MAX_NUMBER
    )


def _check(name: str, value: object, expected: str, ok: bool) -> None:
    if not ok:
        raise RequestError(f"SamplingParams.{name} is out of range", got=repr(value), expected=expected)


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
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One generated continuation."""

    index: int
    text: str
    token_ids: list[int]
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
    finished: bool
    metrics: RequestMetrics
