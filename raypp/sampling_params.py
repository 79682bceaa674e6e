"""`SamplingParams`: how the tokens of one request are chosen, and when it ends. Names are those of vllm's.

    logits -> bias -> penalties -> bans -> temperature -> top-k, top-p, min-p -> draw
       +----> logprobs, of what the model itself said

A field is declared once: its annotation has a `Parameter`, which says what the field may be, and how HTTP, the command
line and a model's generation_config.json name it. `raypp.openai_api.request_fields`, `raypp.cli.sampling_options` and
`raypp.models.generation_config` are made from that.

Everything that can be wrong with the parameters alone is found here; what depends on the model (its vocabulary, its
tokenizer) is found by `raypp.api.prepare`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, Self, get_type_hints

from raypp.errors import RequestError, refusing_unknown
from raypp.structured_outputs import as_structured_outputs

# What one request may bring at most, where the model sets no limit: the engine keeps rare parameters in tables that are
# as wide as the widest request, and every new piece of text is searched for stop strings.
MAX_CONTINUATIONS = 16_384
MAX_BIASED_TOKENS = 1_024
MAX_END_TOKENS = 64
"""Stop tokens and the model's end-of-sequence tokens together."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1_024
MAX_CACHE_SALT_CHARS = 1_024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1_024
MAX_BAD_WORD_SPELLINGS = 256
"""Most words have two: at the beginning of a text and after a space."""
MAX_BAD_WORD_TOKENS = 64
"""Tokens of one spelling: the last stage remembers that many."""

MAX_NUMBER = 1e30
"""What float32 holds with room to spare."""
_TOKEN_ID = re.compile(r"[0-9]{1,18}")  # as a key of JSON
_MAX_BIAS = 1e6
"""More than any logit, and far less than what a ban takes away: a bias may decide a draw, but not undo a ban."""

TokenIds = tuple[int, ...] | list[int]
Strings = tuple[str, ...] | list[str]
Kind = Literal["integer", "number", "flag", "strings", "words", "token ids", "biases", "constraint"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What a field of `SamplingParams` may be, and how it is given from outside of Python."""

    kind: Kind
    """`words` are strings that hold more than spaces."""
    expected: str
    """In errors: what it may be."""
    hint: str
    low: float = -math.inf
    """The least number, inclusive unless `is_above`; of biases, the least bias."""
    high: float = math.inf
    is_above: bool = False
    is_optional: bool = False
    """Whether it may be None. A list that may be None is not empty."""
    most: int | None = None
    """Entries of a list; None: any number."""
    most_hint: str = ""
    """What else to do about more entries."""
    most_chars: int | None = None
    """Of an entry."""

    http: str | None = None
    """Describes the field of HTTP bodies; None: the routes have fields of their own for it, or none."""
    http_routes: Literal["all", "completions"] = "all"
    """Which bodies have it: all that generate, or those of chat and completions."""
    http_low: float | None = None
    """The least number over HTTP, where that is not `low`."""
    http_high: float | None = None
    option: str | None = None
    """Describes the option of the command line; None: there is none. Empty: its name says it all."""
    option_name: str = ""
    """Where that is not the field's, as `--stop-token`."""
    recommended_as: str = ""
    """Its name in a model's generation_config.json; empty: what that says of it does not count."""

    def holds(self, value: Any) -> bool:
        """Return whether a value, in the form in which it is kept, is one that the field may have."""
        if value is None:
            return self.is_optional
        match self.kind:
            case "integer":
                return _is_int(value) and self._is_in_range(value)
            case "number":
                return _is_number(value) and self._is_in_range(value)
            case "flag":
                return isinstance(value, bool)
            case "strings":
                return all(isinstance(one, str) and one for one in value)
            case "words":
                return all(isinstance(one, str) and one.strip() for one in value)
            case "token ids":
                return all(_is_int(one) and one >= 0 for one in value) and not (self.is_optional and not value)
            case "biases":
                return all(_is_number(one) and self._is_in_range(one) for one in value.values())
            case "constraint":
                return True  # it is checked while it is brought into its kept form

    def _is_in_range(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.is_above and value == self.low)


@refusing_unknown
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Raises RequestError on a value that makes no sense, and on values that contradict each other.
    """

    n: Annotated[
        int,
        Parameter(
            kind="integer",
            expected=f"an integer from 1 to {MAX_CONTINUATIONS:,}",
            hint="continuations per prompt",
            low=1,
            high=MAX_CONTINUATIONS,
            http="Continuations per prompt.",
            http_routes="completions",
            http_high=128,
            option="continuations per prompt",
        ),
    ] = 1
    """Continuations of the prompt. They share the KV of the prompt, and each has a seed of its own."""
    max_tokens: Annotated[
        int,
        Parameter(
            kind="integer",
            expected="an integer of at least 1",
            hint="the most tokens to generate",
            low=1,
            http="The most tokens to generate.",
            http_routes="completions",
            option="the most tokens to generate",
            recommended_as="max_new_tokens",
        ),
    ] = 16
    """The most tokens to generate, per continuation."""
    min_tokens: Annotated[
        int,
        Parameter(
            kind="integer",
            expected="an integer of at least 0",
            hint="tokens before the text may end",
            low=0,
            http="Do not end before this many tokens.",
            option="tokens before the text may end",
        ),
    ] = 0
    """No end-of-sequence or stop token is drawn, and no stop string looked for, before this many tokens."""

    temperature: Annotated[
        float,
        Parameter(
            kind="number",
            expected="a number from 0 to 1e30",
            hint="0 is greedy, 1 leaves the model's distribution as it is",
            low=0,
            high=MAX_NUMBER,
            http="Divides the logits; 0 is greedy, 1 the default.",
            option="0 is greedy",
            recommended_as="temperature",
        ),
    ] = 1.0
    """Divides the logits; 0 means greedy."""
    top_p: Annotated[
        float,
        Parameter(
            kind="number",
            expected="0 < top_p <= 1",
            hint="1 keeps all tokens",
            low=0,
            high=1,
            is_above=True,
            http="Keep the smallest set of tokens whose probabilities sum to at least this.",
            option="",
            recommended_as="top_p",
        ),
    ] = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this."""
    top_k: Annotated[
        int,
        Parameter(
            kind="integer",
            expected="an integer of at least 1, or 0 (or -1) for all",
            hint="0 keeps all tokens",
            low=-1,
            http="Keep the k most likely tokens; 0 or -1 keeps all.",
            option="",
            recommended_as="top_k",
        ),
    ] = 0
    """Keep the k most likely tokens; 0 (or -1) keeps all."""
    min_p: Annotated[
        float,
        Parameter(
            kind="number",
            expected="0 <= min_p <= 1",
            hint="0 keeps all tokens",
            low=0,
            high=1,
            http="Keep tokens at least this fraction as likely as the most likely one.",
            option="",
            recommended_as="min_p",
        ),
    ] = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    seed: Annotated[
        int | None,
        Parameter(
            kind="integer",
            expected="an integer from -2**63 to 2**63 - 1, or None",
            hint="None draws one",
            low=-(2**63),
            high=2**63 - 1,
            is_optional=True,
            http="The same request with the same seed has the same text.",
            option="same seed, same text",
        ),
    ] = None
    """The text depends on the prompt, the parameters and this seed alone; None draws one,
    from a stream that begins with the engine's own seed. The first of n continuations has this seed itself."""

    presence_penalty: Annotated[
        float,
        Parameter(
            kind="number",
            expected="a number from -2 to 2",
            hint="0 is none; below it, tokens that were generated become likelier",
            low=-2,
            high=2,
            http="Lowers (if negative, raises) the logits of tokens that were generated.",
            option="against tokens that were generated",
        ),
    ] = 0.0
    """Subtracted from the logit of every token that was generated already."""
    frequency_penalty: Annotated[
        float,
        Parameter(
            kind="number",
            expected="a number from -2 to 2",
            hint="0 is none; below it, tokens that were generated become likelier",
            low=-2,
            high=2,
            http="The same, times how often they were.",
            option="the same for every time that they were",
        ),
    ] = 0.0
    """Subtracted from a token's logit once for every time that it was generated."""
    repetition_penalty: Annotated[
        float,
        Parameter(
            kind="number",
            expected="a number above 0, at most 1e4",
            hint="1 is none, above it repetition becomes less likely",
            low=1e-4,
            high=1e4,
            http="Divides (if negative, multiplies) the logits of tokens in the prompt or in the text.",
            option="divides logits of tokens seen; 1 is none",
            recommended_as="repetition_penalty",
        ),
    ] = 1.0
    """Positive logits of tokens in the prompt or the output are divided by it, negative ones multiplied."""
    logit_bias: Annotated[
        Mapping[int, float],
        Parameter(
            kind="biases",
            expected=f"a dict from token ids to numbers from -{_MAX_BIAS:g} to {_MAX_BIAS:g}",
            hint="allowed_token_ids and bad_words take tokens out of the choice altogether",
            low=-_MAX_BIAS,
            high=_MAX_BIAS,
            most=MAX_BIASED_TOKENS,
            most_hint="allowed_token_ids takes any number of tokens out of the choice",
            http="Token id (as text, since JSON has no other keys) to what is added to its logit.",
            http_low=-100,
            http_high=100,
            option="add X to a token's logit; may be repeated",
        ),
    ] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens. Keys may be str, as JSON has them; None is none."""
    allowed_token_ids: Annotated[
        TokenIds | None,
        Parameter(
            kind="token ids",
            expected="token ids, at least one, or None",
            hint="None allows all",
            is_optional=True,
            http="Generate no others.",
            option="draw only tokens named like this; may be repeated",
            option_name="--allow-token",
        ),
    ] = None
    """No other token is drawn. None: all are."""
    bad_words: Annotated[
        Strings,
        Parameter(
            kind="words",
            expected="words with something else than spaces",
            hint="leave it out for none",
            most=MAX_BAD_WORDS,
            most_hint="logit_bias and allowed_token_ids keep single tokens from being drawn",
            most_chars=MAX_BAD_WORD_CHARS,
            http="Never generate these.",
            option="never complete it; may be repeated",
            option_name="--bad-word",
        ),
    ] = ()
    """Words that the output does not hold: a token that would complete one, counted over prompt and output, is not
    drawn. A word counts as the tokenizer writes it alone and after a space. None is none."""

    logprobs: Annotated[
        int | None,
        Parameter(
            kind="integer",
            expected="an integer of at least 0, or -1 for all, or None",
            hint="None is none, 0 only the token itself",
            low=-1,
            is_optional=True,
            option="log-probabilities of tokens, and K more; generate: with --json",
        ),
    ] = None
    """Log-probabilities to return per output token: of the token itself and of this many most likely ones, before bias,
    penalties, bans and temperature. 0 is the token's alone, -1 the whole vocabulary, None none."""
    prompt_logprobs: Annotated[
        int | None,
        Parameter(
            kind="integer",
            expected="an integer of at least 0, or -1 for all, or None",
            hint="None is none, 0 only the token itself",
            low=-1,
            is_optional=True,
            http="Log-probabilities of the prompt's tokens, and of this many alternatives.",
            http_routes="completions",
            http_low=0,
            http_high=20,
            option="the same for the prompt",
        ),
    ] = None
    """The same for the tokens of the prompt; the prompt is then computed as a whole, none of it found in the cache."""

    structured_outputs: Annotated[
        Mapping[str, Any] | None, Parameter(kind="constraint", expected="a constraint", hint="", is_optional=True)
    ] = field(default=None, hash=False)
    """What the text has to be, `{"json_schema": ...}` for instance; see `raypp.structured_outputs`. The grammar goes
    before everything else: of tokens that it allows, bans and allowed_token_ids leave at least one. None: anything."""

    stop: Annotated[
        Strings | str,
        Parameter(
            kind="strings",
            expected="non-empty strings",
            hint="leave it out for none",
            most=MAX_STOP_STRINGS,
            most_hint="look for further ones in the text that comes back",
            most_chars=MAX_STOP_STRING_CHARS,
            http="The text ends before the first of these.",
            option="end before this text; may be repeated",
        ),
    ] = ()
    """The text ends before the first of these strings. Kept as a tuple; None is none."""
    stop_token_ids: Annotated[
        TokenIds,
        Parameter(
            kind="token ids",
            expected="token ids",
            hint="leave it out for none",
            most=MAX_END_TOKENS,
            most_hint="look for further ones among the tokens that come back",
            http="The text ends with the first of these tokens.",
            option="end with this token; may be repeated",
            option_name="--stop-token",
        ),
    ] = ()
    """The request ends with the first of these tokens. Kept as a tuple; None is none."""
    ignore_eos: Annotated[
        bool,
        Parameter(
            kind="flag",
            expected="True or False",
            hint="a truth value",
            http="Go on past the model's end of text.",
            option="go on past the end of the text",
        ),
    ] = False
    """Go on past the model's end-of-sequence token."""
    include_stop_str_in_output: Annotated[
        bool,
        Parameter(
            kind="flag",
            expected="True or False",
            hint="a truth value",
            http="Let the text end behind the stop string, not before it.",
            option="keep the stop text in the output",
            option_name="--include-stop",
        ),
    ] = False
    """The text holds the stop string, or the text of the stop token, that ended it."""
    skip_special_tokens: Annotated[
        bool,
        Parameter(
            kind="flag",
            expected="True or False",
            hint="a truth value",
            http="Leave special tokens out of the text; the default.",
            option="write special tokens, too",
            option_name="--keep-special-tokens",
        ),
    ] = True
    """Special tokens have no text."""
    shown_special_tokens: Annotated[
        TokenIds, Parameter(kind="token ids", expected="token ids", hint="leave it out for none")
    ] = ()
    """These have text all the same. Kept as a tuple; None is none."""
    detokenize: Annotated[bool, Parameter(kind="flag", expected="True or False", hint="a truth value")] = True
    """Make text. Without it texts are empty and there can be no stop strings."""

    def __post_init__(self) -> None:
        """Bring values into their kept form, and check them."""
        for name, parameter in PARAMETERS.items():
            given = getattr(self, name)
            if given is _DEFAULTS[name]:
                continue
            value = _kept(name, parameter, given)
            if value is not given:
                object.__setattr__(self, name, value)
            if not parameter.holds(value):
                raise _out_of_range(name, value)
            if parameter.most_chars is not None:
                _check_length(name, value, parameter.most_chars)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_together()

    @classmethod
    def of_json(cls, values: Iterable[Any]) -> Self:
        """Return parameters that another process has checked, of their values in the order of the fields, as JSON."""
        params = object.__new__(cls)
        for name, value in zip(PARAMETERS, values, strict=True):
            object.__setattr__(params, name, tuple(value) if isinstance(value, list) else value)
        object.__setattr__(params, "logit_bias", {int(key): bias for key, bias in params.logit_bias.items()})
        return params

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

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


PARAMETERS: Mapping[str, Parameter] = {
    name: annotation.__metadata__[0]
    for name, annotation in get_type_hints(SamplingParams, include_extras=True).items()
    if hasattr(annotation, "__metadata__")
}
"""By name, in the order of the fields."""
_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}


def _kept(name: str, parameter: Parameter, value: Any) -> Any:
    """Return a value in the form in which it is kept."""
    match parameter.kind:
        case "strings" | "words" | "token ids":
            if value is None and parameter.is_optional:
                return None
            return _as_tuple(name, (value,) if name == "stop" and isinstance(value, str) else value)
        case "biases":
            return _as_bias(name, value)
        case "constraint":
            return as_structured_outputs(value)
    return value


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


def _as_bias(name: str, value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _out_of_range(name, value)
    _check_count(name, value)
    bias: dict[int, float] = {}
    for key, number in value.items():
        token_id = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else key
        if not _is_int(token_id) or token_id < 0 or token_id in bias or not PARAMETERS[name].holds({0: number}):
            raise _out_of_range(name, {key: number})
        bias[token_id] = float(number)
    return bias


def _check_count(name: str, value: Collection[object]) -> None:
    """Accept as many entries as there may be; the vocabulary limits `allowed_token_ids`, see `api.check_params`."""
    parameter = PARAMETERS[name]
    if parameter.most is not None and len(value) > parameter.most:
        raise RequestError(
            f"SamplingParams.{name} has too many entries",
            got=f"{len(value):,} entries",
            expected=f"at most {parameter.most:,}",
            hint=parameter.most_hint,
            param=name,
        )


def _check_length(name: str, values: Collection[str], most: int) -> None:
    longest = max(map(len, values), default=0)
    if longest > most:
        raise RequestError(
            f"an entry of SamplingParams.{name} is too long",
            got=f"{longest:,} characters",
            expected=f"at most {most:,} characters",
            hint="a shorter part of it has the same effect earlier",
            param=name,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Return whether a value is a number; an integer may be larger than any float."""
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _out_of_range(name: str, value: object) -> RequestError:
    return RequestError(
        f"SamplingParams.{name} is out of range",
        got=_excerpt(value),
        expected=PARAMETERS[name].expected,
        hint=f"{name}: {PARAMETERS[name].hint}",
        param=name,
    )


def _excerpt(value: object) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # Python writes no integer with more than 4,300 digits
        return f"{type(value).__name__} with a very large integer"
