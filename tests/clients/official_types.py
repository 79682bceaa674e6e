"""Whether answers are what OpenAI's and Anthropic's own packages say: strictly, and with nothing else in them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)

_VLLM = r"(choices\.\d+\.)?(stop_reason|token_ids|prompt_token_ids|prompt_logprobs)"
"""Fields of vLLM's that these answers have, too."""
_EXCEPTIONS = {
    "/v1/chat/completions": rf"{_VLLM}|choices\.\d+\.(message|delta)\.reasoning(_content)?",
    # OpenAI sends null before the end of a stream, and for the first token of an echoed prompt.
    "/v1/completions": rf"{_VLLM}|choices\.\d+\.(finish_reason|logprobs\.(token|top)_logprobs\.0)",
    # OpenAI says whether a response is stored. Open Responses requires penalties and `bytes`, earlier packages `name`.
    "/v1/responses": r"(response\.)?(store|presence_penalty|frequency_penalty)"
    r"|logprobs\.\d+\.(top_logprobs\.\d+\.)?bytes|name",
}
"""By path: the places at which an answer may differ."""


@cache
def _kinds() -> dict[str, tuple[Any, Any]]:
    """Return by path what an answer is, and what each event of its stream is."""
    import anthropic.types as anthropic_types
    import openai.types as openai_types
    import openai.types.responses as openai_responses
    from openai.types import chat as openai_chat

    return {
        "/v1/chat/completions": (openai_chat.ChatCompletion, openai_chat.ChatCompletionChunk),
        "/v1/completions": (openai_types.Completion, openai_types.Completion),
        "/v1/responses": (openai_responses.Response, openai_responses.ResponseStreamEvent),
        "/v1/messages": (anthropic_types.Message, anthropic_types.RawMessageStreamEvent),
        "/v1/messages/count_tokens": (anthropic_types.MessageTokensCount, None),
    }


def type_faults(path: str, values: list[Any], *, is_success: bool, is_stream: bool) -> list[str]:
    """Return where an answer is not what the packages say.

    Args:
        path: Of the route, one of `PATHS`.
        values: The answer, or the events of its stream.
        is_success: Whether it is no error.
        is_stream: Whether it is a stream.
    """
    from anthropic.types.shared import ErrorResponse
    from openai.types.shared import ErrorObject

    kind = _kinds()[path][is_stream]
    if not is_success:
        kind = ErrorResponse if path.startswith("/v1/messages") else dict[str, ErrorObject]
    return [fault for value in values for fault in _faults(_of_type(kind, value.get("type")), path, value)]


def _faults(kind: Any, path: str, value: Any) -> list[str]:
    try:
        _adapter(kind).validate_python(value, strict=True, extra="forbid")
    except ValidationError as error:
        places = [(".".join(map(str, found["loc"])), found) for found in error.errors()]
        return [
            f"{place}: {found['msg']}: {str(found['input'])[:200]}"
            for place, found in places
            if not re.fullmatch(_EXCEPTIONS.get(path, ""), place)
        ]
    return []


def _of_type(kind: Any, name: str | None) -> Any:
    """Return which of several classes of events has this `type`; what is no choice of classes as it is."""
    choices: tuple[type[BaseModel], ...] = get_args(get_args(kind)[0]) if get_args(kind) else ()
    return next((one for one in choices if name in get_args(one.model_fields["type"].annotation)), kind)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
