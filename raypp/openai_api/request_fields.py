"""What the bodies of all routes that generate have in common: how to sample, and what is taken and ignored.

Names, types and defaults are OpenAI's published ones; the fields that only vLLM's server has keep the names they have
there. `foreign_fields` has those of others that are known and not supported. Inside of messages and tools an unknown
field is passed over: clients send back what servers gave them, with notes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, create_model, model_validator
from pydantic_core import PydanticCustomError

from raypp.errors import RequestError
from raypp.openai_api.foreign_fields import OF_ALL, ForeignField
from raypp.sampling_params import (
    MAX_BIASED_TOKENS,
    MAX_CACHE_SALT_CHARS,
    MAX_NUMBER,
    PARAMETERS,
    Parameter,
    SamplingParams,
)

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
"""For a model whose generation_config.json says nothing of sampling."""
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
    }
)
"""Fields that are taken and have no effect: clients send them as a matter of course. A warning in the log says so."""
_LARGE = 2**53
"""pydantic's words for `le` round a limit that no float holds; those for `lt` are our own."""
_NO_CONTROLS = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"  # a line feed would forge a line of a log
PATTERNS_IN_WORDS: Mapping[str, str] = MappingProxyType(
    {_NO_CONTROLS: "text without line breaks and other control characters"}
)
"""What errors say for a pattern."""


class OpenAIModel(BaseModel):
    """Base of all shapes: strict types (`"5"` is not a number), no NaN, fields documented by their docstrings."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class RequestModel(OpenAIModel):
    """Base of what clients send: a field that is null counts as left out, also one that is not known.

    Of fields that are not known one is left: a complaint for each of a million would stop the server for seconds.
    """

    @classmethod
    def known_names(cls) -> set[str]:
        """Return the names of the fields, as a client writes them."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.known_names()
        first_unknown = next((name for name, value in given.items() if value is not None and name not in known), None)
        return {
            name: value
            for name, value in given.items()
            if value is not None and (name in known or name == first_unknown)
        }


class BodyModel(RequestModel):
    """Base of whole bodies."""

    chat_params: ClassVar[Mapping[str, str]] = {}
    """A chat's fields, and what they are called in this body, where that differs."""
    foreign: ClassVar[Mapping[str, ForeignField]] = OF_ALL
    """Fields of other servers that this body does not have."""

    _passed_over: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def refused_fields(cls) -> dict[str, ForeignField]:
        """Return the fields of other servers that would change the answer, and that this body does not have."""
        known = cls.known_names()
        return {name: field for name, field in cls.foreign.items() if field.has_effect and name not in known}

    def pass_over(self, names: Sequence[str]) -> None:
        """Note fields that were given, that this body does not have, and that were left out."""
        self._passed_over = tuple(names)

    def ignored(self) -> list[str]:
        """Return the fields that the body gives and that have no effect; of fields in others, their path."""
        return list(self._passed_over)


class LenientModel(RequestModel):
    """Base of what clients send back: fields that are not known are passed over."""

    model_config = ConfigDict(extra="ignore")


T = TypeVar("T")

Entries = Annotated[list[T], Field(fail_fast=True)]
"""A list of a request. The first entry that is wrong ends its check: there may be millions of them."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
"""20.0 is one, too: to JSON, and to clients whose language has one kind of numbers, it is the same as 20."""


_HTTP_PARAMETERS = {name: parameter for name, parameter in PARAMETERS.items() if parameter.http is not None}


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASED_TOKENS:
        context = {"got": f"{len(biases):,} entries"}
        raise PydanticCustomError("too_many", f"at most {MAX_BIASED_TOKENS:,} entries", context)
    return biases


def _field_type(name: str, parameter: Parameter) -> Any:
    """Return the type of a sampling parameter's field, in which JSON's null is none."""
    low = parameter.low if parameter.http_low is None else parameter.http_low
    high = parameter.high if parameter.http_high is None else parameter.http_high
    bounds: dict[str, Any] = {"gt" if parameter.is_above else "ge": low}
    bounds |= {"lt": high + 1} if isinstance(high, int) and high >= _LARGE else {"le": high}
    in_range = Field(**{bound: value for bound, value in bounds.items() if abs(value) < MAX_NUMBER})
    text = Annotated[str, Field(min_length=1)]
    match parameter.kind:
        case "integer":
            return Annotated[Integer, in_range] | None
        case "number":
            return Annotated[float, in_range] | None
        case "flag":
            return bool | None
        case "token ids":
            return Entries[Annotated[Integer, Field(ge=0)]] | None
        case "biases":
            return Annotated[dict[str, Annotated[float, in_range]] | None, BeforeValidator(_few)]
    return text | Entries[text] | None if name == "stop" else Entries[text] | None


def _sampling_fields(routes: str) -> dict[str, Any]:
    return {
        name: (_field_type(name, parameter), Field(default=None, description=parameter.http))
        for name, parameter in _HTTP_PARAMETERS.items()
        if parameter.http_routes == routes
    }


if TYPE_CHECKING:

    class _SamplingFields(BodyModel):
        seed: int | None = None

    class _CompletionSamplingFields(BodyModel):
        n: int | None = None
        max_tokens: int | None = None
        prompt_logprobs: int | None = None

else:
    _SamplingFields = create_model("_SamplingFields", __base__=BodyModel, **_sampling_fields("all"))
    _CompletionSamplingFields = create_model(
        "_CompletionSamplingFields", __base__=BodyModel, **_sampling_fields("completions")
    )


class StreamOptions(RequestModel):
    """What a stream holds besides the text."""

    include_usage: bool | None = None
    """End with a chunk that has no choices and counts the tokens."""
    continuous_usage_stats: bool | None = None
    """Count the tokens in every chunk (vLLM)."""
    include_obfuscation: bool | None = None
    """Taken and ignored."""


class StructuredOutputsFields(RequestModel):
    """One of these constraints."""

    json_schema: dict[str, Any] | str | None = None
    """JSON that this schema accepts."""
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    """The same, by vLLM's name."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """The text matches."""
    choice: Entries[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """EBNF with a rule `root`."""
    structural_tag: dict[str, Any] | str | None = None
    """Free text with constrained parts, in the format of structural tags."""

    def given(self) -> dict[str, Any]:
        """Return what is given, by the engine's names."""
        values = self.model_dump(exclude_none=True)
        if "json_" in values:
            values.setdefault("json_schema", values.pop("json_"))
        return values


class RequestFields(_SamplingFields):
    """The fields of every route that generates."""

    model: str | None = Field(default=None, min_length=1)
    """The name of the served model; by default the one there is."""

    stream: bool | None = None
    """Send the text as it comes."""
    structured_outputs: StructuredOutputsFields | None = None
    """What the text has to be, all of it (vLLM)."""
    guided_json: dict[str, Any] | str | None = None
    """`structured_outputs` with `json_schema`, by vLLM's older name."""
    guided_regex: str | None = None
    """`structured_outputs` with `regex`, likewise."""
    guided_choice: Entries[str] | None = None
    """`structured_outputs` with `choice`, likewise."""
    guided_grammar: str | None = None
    """`structured_outputs` with `grammar`, likewise."""
    priority: Integer | None = Field(default=None, ge=-(2**31), lt=2**31)
    """Smaller is earlier, where the engine schedules by priority."""
    request_id: str | None = Field(default=None, min_length=1, max_length=128, pattern=_NO_CONTROLS)
    """A name to find the request by, in its answer's `id` and in the logs; without control characters."""

    # How the prompt becomes tokens, and what comes back of them (vLLM).
    add_special_tokens: bool | None = None
    """Put the tokens around the prompt that the model expects around texts. By default around plain prompts, but not
    around conversations: their template writes them."""
    truncate_prompt_tokens: Integer | None = Field(default=None, ge=-1)
    """Keep only this many of the prompt's last tokens; -1: as many as the context has room for. Prompts with images are
    not cut."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    """Share what is cached of the prompt's beginning only with requests of the same salt: others cannot tell by the
    time that an answer takes whether this prompt was here before. What is encoded of images is shared all the same."""

    # Accounting and routing of OpenAI's own service, without meaning here: `IGNORED` names them.
    user: str | None = None
    """OpenAI's name of an end user."""
    metadata: dict[str, str] | None = None
    """Notes for OpenAI's dashboard."""
    store: bool | None = None
    """Whether OpenAI keeps the answer; nothing is kept here."""
    service_tier: str | None = None
    """OpenAI's processing tiers; here `priority` says who is served first."""
    safety_identifier: str | None = None
    """OpenAI's name of an end user."""
    prompt_cache_key: str | None = None
    """OpenAI's routing to caches; here prompts are cached by their tokens and `cache_salt`."""
    prompt_cache_retention: str | None = None
    """How long OpenAI caches a prompt; here as long as there is room."""

    def ignored(self) -> list[str]:
        """Return the fields that the body gives and that have no effect; of fields in others, their path."""
        own = [name for name in sorted(IGNORED & self.model_fields_set) if getattr(self, name) is not None]
        return [*own, *super().ignored()]

    @property
    def form_param(self) -> str:
        """The field that holds the text to a form, where one does."""
        return next((name for name in _GUIDED if getattr(self, name) is not None), "structured_outputs")

    def constraint(self) -> dict[str, Any]:
        """Return what `structured_outputs` or one of its other names asks for, by the engine's names; maybe nothing.

        Raises:
            RequestError: it is asked for by two names.
        """
        given = {} if self.structured_outputs is None else self.structured_outputs.given()
        by_name = {
            name: value
            for name, kind in _GUIDED.items()
            if (value := getattr(self, name)) is not None and given != {kind: value}  # guidance sends both
        }
        if len(names := [*(["structured_outputs"] if given else []), *by_name]) > 1:
            raise RequestError(
                "two constraints for one text",
                got=" and ".join(names),
                expected="one of them",
                hint="the guided_ fields are other names of structured_outputs: send that alone",
                param=names[-1],
            )
        return given | {_GUIDED[name]: value for name, value in by_name.items()}

    def max_kept(self, max_model_len: int) -> int | None:
        """Return to how many tokens a prompt is cut; None: to none.

        Args:
            max_model_len: The most tokens of a request, prompt and output together.

        Raises:
            RequestError: none, or more than the context has.
        """
        given = self.truncate_prompt_tokens
        if given is not None and (given == 0 or given > max_model_len):
            raise RequestError(
                "truncate_prompt_tokens is out of range",
                got=given,
                expected=f"1 to max_model_len = {max_model_len}, or -1 for as many as the context has room for",
                hint="leave it out to have longer prompts refused",
                param="truncate_prompt_tokens",
            )
        return max_model_len - 1 if given == -1 else given

    def given_params(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters that the body names, by the engine's names, and defaults for the others."""
        given = {name: value for name in _HTTP_PARAMETERS if (value := getattr(self, name, None)) is not None}
        given = {**defaults, **given}
        if constraint := self.constraint():
            given["structured_outputs"] = constraint
        return given

    @property
    def num_continuations(self) -> int:
        """How many texts each prompt gets."""
        return 1


class CompletionFields(RequestFields, _CompletionSamplingFields):
    """The further fields of chat and of plain completions."""

    return_token_ids: bool | None = None
    """Return `token_ids` with each choice, and `prompt_token_ids`."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens of log-probabilities by their numbers, as `token_id:17`; their `bytes` stay (vLLM)."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""

    @property
    def num_continuations(self) -> int:
        """How many texts each prompt gets."""
        return self.n or 1


_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


@contextmanager
def renaming(rename: Callable[[str | None], str | None]) -> Iterator[None]:
    """Let errors name another field as the one at fault.

    Args:
        rename: Returns the field in the place of an error's `param`.
    """
    try:
        yield
    except RequestError as error:
        error.param = rename(error.param)
        raise


def naming_form(param: str) -> AbstractContextManager[None]:
    """Let errors about the constraint of a text name the field of the body that asked for it.

    Args:
        param: `RequestFields.form_param`.
    """
    return renaming(lambda named: param if named == "structured_outputs" else named)


def make_sampling_params(given: dict[str, Any], max_model_len: int) -> SamplingParams:
    """Return the parameters; more tokens than the engine can hold are as many as it can.

    Raises:
        RequestError: a value that makes no sense, or values that contradict each other.
    """
    return SamplingParams(**{**given, "max_tokens": min(given["max_tokens"], max_model_len)})
