"""`SamplingParams`: how the tokens of one request are chosen, and when it ends. Names are those of vllm's.

    logits -> bias -> penalties -> bans -> temperature -> top-k, top-p, min-p -> draw
       +----> logprobs, of what the model itself said

Everything that can be wrong with the parameters alone is found here; what depends on the model (its vocabulary, its
tokenizer) is found by `raypp.api.prepare`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raypp import request_limits as limits
from raypp.errors import RequestError
from raypp.nearest_name import refusing_unknown
from raypp.structured_outputs import as_structured_outputs

_MAX_NUMBER = 1e30  # what float32 holds with room to spare
_TOKEN_ID = re.compile(r"[0-9]{1,18}")  # as a key of JSON
_MAX_BIAS = 1e6
"""More than any logit, and far less than what a ban takes away: a bias may decide a draw, but not undo a ban."""

TokenIds = tuple[int, ...] | list[int]
Strings = tuple[str, ...] | list[str]


@refusing_unknown
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Raises RequestError on a value that makes no sense, and on values that contradict each other.
    """

    n: int = 1
    """Continuations of the prompt. They share the KV of the prompt, and each has a seed of its own."""
    max_tokens: int = 16
    """The most tokens to generate, per continuation."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is drawn, and no stop string looked for, before this many tokens."""

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
    from a stream that begins with the engine's own seed. The first of n continuations has this seed itself."""

    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that was generated already."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for every time that it was generated."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in the prompt or the output are divided by it, negative ones multiplied."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens. Keys may be str, as JSON has them; None is none."""
    allowed_token_ids: TokenIds | None = None
    """No other token is drawn. None: all are."""
    bad_words: Strings = ()
    """Words that the output does not hold: a token that would complete one, counted over prompt and output, is not
    drawn. A word counts as the tokenizer writes it alone and after a space. None is none."""

    logprobs: int | None = None
    """Log-probabilities to return per output token: of the token itself and of this many most likely ones, before bias,
    penalties, bans and temperature. 0 is the token's alone, -1 the whole vocabulary, None none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt; the prompt is then computed as a whole, none of it found in the cache."""

    structured_outputs: Mapping[str, Any] | None = field(default=None, hash=False)
    """What the text has to be, `{"json_schema": ...}` for instance; see `raypp.structured_outputs`. The grammar goes
    before everything else: of tokens that it allows, bans and allowed_token_ids leave at least one. None: anything."""

    stop: Strings | str = ()
    """The text ends before the first of these strings. Kept as a tuple; None is none."""
    stop_token_ids: TokenIds = ()
    """The request ends with the first of these tokens. Kept as a tuple; None is none."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""
    include_stop_str_in_output: bool = False
    """The text holds the stop string, or the text of the stop token, that ended it."""
    skip_special_tokens: bool = True
    """Special tokens have no text."""
    shown_special_tokens: TokenIds = ()
    """These have text all the same. Kept as a tuple; None is none."""
    detokenize: bool = True
    """Make text. Without it texts are empty and there can be no stop strings."""

    def __post_init__(self) -> None:
        """Bring values into their kept form, and check them."""
        self._set("stop", _as_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        self._set("bad_words", _as_tuple("bad_words", self.bad_words))
        self._set("stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        self._set("shown_special_tokens", _as_tuple("shown_special_tokens", self.shown_special_tokens))
        self._set("logit_bias", _as_bias(self.logit_bias))
        self._set("structured_outputs", as_structured_outputs(self.structured_outputs))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        if self.top_k == -1:
            self._set("top_k", 0)
        self._check_values()
        self._check_lengths()
        self._check_together()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_values(self) -> None:
        for rule in _RULES:
            for name in rule.names:
                value = getattr(self, name)
                if not rule.holds(value):
                    raise _out_of_range(name, value, rule.expected, rule.hint)

    def _check_lengths(self) -> None:
        for name, most in (("stop", limits.MAX_STOP_STRING_CHARS), ("bad_words", limits.MAX_BAD_WORD_CHARS)):
            longest = max(map(len, getattr(self, name)), default=0)
            if longest > most:
                raise RequestError(
                    f"an entry of SamplingParams.{name} is too long",
                    got=f"{longest:,} characters",
                    expected=f"at most {most:,} characters",
                    hint="a shorter part of it has the same effect earlier",
                    param=name,
                )

    def _check_together(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                "SamplingParams contradict each other",
                got=f"min_tokens={self.min_tokens} and max_tokens={self.max_tokens}",
                expected="min_tokens <= max_tokens",
                hint="raise max_tokens or lower min_tokens",
                param="min_tokens",
            )
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                "SamplingParams contradict each other",
                got=f"n={self.n} and temperature=0",
                expected="n=1 for greedy sampling",
                hint="all continuations would be the same; raise the temperature",
                param="n",
            )
        if self.structured_outputs and self.ignore_eos:
            raise RequestError(
                "SamplingParams contradict each other",
                got="structured_outputs and ignore_eos=True",
                expected="ignore_eos=False",
                hint="a text that follows a grammar ends where the grammar does",
                param="ignore_eos",
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                "SamplingParams contradict each other",
                got="stop strings and detokenize=False",
                expected="detokenize=True",
                hint="stop strings are found in the text; stop_token_ids need none",
                param="stop",
            )


class _Rule(NamedTuple):
    """What some of the fields may hold."""

    names: tuple[str, ...]
    expected: str
    holds: Callable[[Any], bool]
    hint: str


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise RequestError(
            f"SamplingParams.{name} is not a list",
            got=_excerpt(value),
            expected="a list or a tuple",
            hint="a single one goes into a list, too",
            param=name,
        )
    _check_count(name, value)
    return tuple(value)


_MOST_ENTRIES = {
    "stop": (limits.MAX_STOP_STRINGS, "look for further ones in the text that comes back"),
    "bad_words": (limits.MAX_BAD_WORDS, "logit_bias and allowed_token_ids keep single tokens from being drawn"),
    "stop_token_ids": (limits.MAX_END_TOKENS, "look for further ones among the tokens that come back"),
    "logit_bias": (limits.MAX_BIASED_TOKENS, "allowed_token_ids takes any number of tokens out of the choice"),
}
"""And what else to do. The vocabulary limits `allowed_token_ids`, see `raypp.api.check_params`."""


def _check_count(name: str, value: Collection[object]) -> None:
    most, hint = _MOST_ENTRIES.get(name, (len(value), ""))
    if len(value) > most:
        raise RequestError(
            f"SamplingParams.{name} has too many entries",
            got=f"{len(value):,} entries",
            expected=f"at most {most:,}",
            hint=hint,
            param=name,
        )


def _as_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    expected = f"a dict from token ids to numbers from -{_MAX_BIAS:g} to {_MAX_BIAS:g}"
    hint = "allowed_token_ids and bad_words take tokens out of the choice altogether"
    if not isinstance(value, Mapping):
        raise _out_of_range("logit_bias", value, expected, hint)
    _check_count("logit_bias", value)
    bias: dict[int, float] = {}
    for key, number in value.items():
        token_id = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else key
        if not _is_int(token_id, 0) or token_id in bias or not _is_number(number, -_MAX_BIAS, _MAX_BIAS):
            raise _out_of_range("logit_bias", {key: number}, expected, hint)
        bias[token_id] = float(number)
    return bias


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


def _are_strings(values: tuple[object, ...]) -> bool:
    return all(isinstance(value, str) and value for value in values)


def _are_token_ids(values: tuple[object, ...]) -> bool:
    return all(_is_int(value, 0) for value in values)


def _out_of_range(name: str, value: object, expected: str, hint: str) -> RequestError:
    return RequestError(
        f"SamplingParams.{name} is out of range",
        got=_excerpt(value),
        expected=expected,
        hint=f"{name}: {hint}",
        param=name,
    )


def _excerpt(value: object) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # Python writes no integer with more than 4,300 digits
        return f"{type(value).__name__} with a very large integer"


_RULES = (
    _Rule(
        ("n",),
        f"an integer from 1 to {limits.MAX_CONTINUATIONS:,}",
        lambda v: _is_int(v, 1) and v <= limits.MAX_CONTINUATIONS,
        "continuations per prompt",
    ),
    _Rule(("max_tokens",), "an integer of at least 1", lambda v: _is_int(v, 1), "the most tokens to generate"),
    _Rule(("min_tokens",), "an integer of at least 0", lambda v: _is_int(v, 0), "tokens before the text may end"),
    _Rule(
        ("temperature",),
        "a number from 0 to 1e30",
        lambda v: _is_number(v, 0.0, math.inf),
        "0 is greedy, 1 leaves the model's distribution as it is",
    ),
    _Rule(("top_p",), "0 < top_p <= 1", lambda v: _is_number(v, 0.0, 1.0) and v > 0, "1 keeps all tokens"),
    _Rule(("top_k",), "an integer of at least 1, or 0 (or -1) for all", lambda v: _is_int(v, 0), "0 keeps all tokens"),
    _Rule(("min_p",), "0 <= min_p <= 1", lambda v: _is_number(v, 0.0, 1.0), "0 keeps all tokens"),
    _Rule(
        ("seed",),
        "an integer from -2**63 to 2**63 - 1, or None",
        lambda v: v is None or (_is_int(v, -(2**63)) and v < 2**63),
        "None draws one",
    ),
    _Rule(
        ("presence_penalty", "frequency_penalty"),
        "a number from -2 to 2",
        lambda v: _is_number(v, -2.0, 2.0),
        "0 is none; below it, tokens that were generated become likelier",
    ),
    _Rule(
        ("repetition_penalty",),
        "a number above 0, at most 1e4",
        lambda v: _is_number(v, 1e-4, 1e4),
        "1 is none, above it repetition becomes less likely",
    ),
    _Rule(
        ("logprobs", "prompt_logprobs"),
        "an integer of at least 0, or -1 for all, or None",
        lambda v: v is None or _is_int(v, -1),
        "None is none, 0 only the token itself",
    ),
    _Rule(("stop",), "non-empty strings", _are_strings, "leave it out for none"),
    _Rule(
        ("bad_words",),
        "words with something else than spaces",
        lambda v: _are_strings(v) and all(map(str.strip, v)),
        "leave it out for none",
    ),
    _Rule(("stop_token_ids", "shown_special_tokens"), "token ids", _are_token_ids, "leave it out for none"),
    _Rule(
        ("allowed_token_ids",),
        "token ids, at least one, or None",
        lambda v: v is None or (len(v) > 0 and _are_token_ids(v)),
        "None allows all",
    ),
    _Rule(
        ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"),
        "True or False",
        lambda v: isinstance(v, bool),
        "a truth value",
    ),
)
