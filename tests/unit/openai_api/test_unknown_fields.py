"""Fields that no shape has: misspelt ones are refused, others are passed over where that is asked for."""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any

import pytest
from relative_cost import relative_cost

from raypp.errors import nearest_name
from raypp.openai_api.anthropic_request import MessagesRequest
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.error_bodies import BodyError, parse_body
from raypp.openai_api.request_fields import BodyModel
from raypp.openai_api.response_request import ResponseRequest

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
ROUTES: dict[type[BodyModel], str] = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    ResponseRequest: "/v1/responses",
    MessagesRequest: "/v1/messages",
}
SHAPES = [*ROUTES]


def test_what_clients_send_as_a_matter_of_course_is_taken() -> None:
    defaults = {
        "include_reasoning": True,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "spaces_between_special_tokens": True,
        "echo": False,
        "documents": [],
        "mm_processor_kwargs": {},
        "vllm_xargs": {},
        "logits_processors": [],
    }
    assert parse_body(ChatRequest, {**HELLO, **defaults}) == parse_body(ChatRequest, HELLO)
    message = {**HELLO, "max_tokens": 3}
    assert parse_body(MessagesRequest, {**message, "mcp_servers": []}) == parse_body(MessagesRequest, message)
    sent = {**HELLO, "guided_decoding_backend": "guidance", "num_ctx": 4096}
    assert parse_body(ChatRequest, sent).ignored() == ["guided_decoding_backend", "num_ctx"]


def test_unknown_fields_are_passed_over_where_that_is_asked_for() -> None:
    with pytest.raises(BodyError, match="unknown field vibe"):
        parse_body(ChatRequest, {**HELLO, "vibe": 1})
    body = parse_body(ChatRequest, {**HELLO, "user": "me", "vibe": 1, "nothing": None, "temperature": 0}, "warn")
    assert body.ignored() == ["user", "vibe"]
    assert body.temperature == 0
    with pytest.raises(BodyError, match=r"unknown field stream_options\.vibe"):  # the object is known as a whole
        parse_body(ChatRequest, {**HELLO, "stream": True, "stream_options": {"vibe": 1}}, "warn")


@pytest.mark.parametrize(
    ("shape", "name", "meant"),
    [
        (ChatRequest, "temprature", "temperature"),
        (ChatRequest, "max_token", "max_tokens"),
        (ChatRequest, "topP", "top_p"),
        (ChatRequest, "max-tokens", "max_tokens"),
        (MessagesRequest, "stop", "stop_sequences"),
        (ResponseRequest, "max_tokens", "max_output_tokens"),
        (ChatRequest, "lengthpenalty", "length_penalty"),
        (CompletionRequest, "max_new_token", "max_tokens"),
        (ResponseRequest, "Max-Length", "max_length"),
    ],
)
def test_a_misspelt_field_is_never_passed_over(shape: type[BodyModel], name: str, meant: str) -> None:
    body = {**HELLO, "input": "a", "prompt": "a", "max_tokens": 3} if shape is not ChatRequest else HELLO
    body = {field: value for field, value in body.items() if field in shape.known_names()}
    with pytest.raises(BodyError, match=f"unknown field {name}; expected: did you mean {meant}"):
        parse_body(shape, {**body, name: 1}, "warn")


def test_a_misspelt_field_of_other_servers_is_told_why_it_is_not_supported() -> None:
    with pytest.raises(BodyError, match=r"length_penalty\?; hint: length_penalty is not supported: of beam search"):
        parse_body(ChatRequest, {**HELLO, "lengthpenalty": 2}, "warn")


def test_of_more_unknown_fields_than_are_looked_at_the_limit_is_said() -> None:
    harmless = {f"vibe{index}": 1 for index in range(17)}
    with pytest.raises(BodyError, match="too many unknown fields; got: 17, vibe16 for one; expected: at most 16"):
        parse_body(ChatRequest, {**HELLO, **harmless}, "warn")
    with pytest.raises(BodyError, match="unknown field temprature"):
        parse_body(ChatRequest, {**HELLO, "temprature": 1, **harmless}, "warn")
    harmless.popitem()
    assert len(parse_body(ChatRequest, {**HELLO, **harmless}, "warn").ignored()) == 16


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_said_of_a_refused_field_names_one_that_the_body_has(shape: type[BodyModel]) -> None:
    """Or the route whose body has another one."""
    fields = set[str]().union(*(each.known_names() for each in SHAPES))
    for name, refused in shape.refused_fields().items():
        named = fields & set(re.findall("`(.*?)`", refused.reason))
        names_route = f"`{ROUTES[shape]}`" in refused.reason or refused.reason.startswith("`/v1/")
        assert not named or named & shape.known_names() or names_route, name


def test_a_missing_field_that_is_misspelt_is_named() -> None:
    with pytest.raises(BodyError, match="unknown field promt; expected: did you mean prompt"):
        parse_body(CompletionRequest, {"promt": "a"}, "warn")


def misspellings(name: str) -> set[str]:
    """Return what one slip of a finger makes of a name: a letter lost, doubled, wrong, or two that changed places."""
    lost = {name[:i] + name[i + 1 :] for i in range(len(name))}
    doubled = {name[:i] + name[i] + name[i:] for i in range(len(name))}
    wrong = {name[:i] + "x" + name[i + 1 :] for i in range(len(name))}
    swapped = {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(len(name) - 1)}
    return (lost | doubled | wrong | swapped) - {name}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_slip_of_a_finger_is_found(shape: type[BodyModel]) -> None:
    known = shape.known_names()
    slips = [slip for name in known if len(name) > 3 for slip in misspellings(name) - known]
    missed = [slip for slip in slips if nearest_name(slip, known) is None]
    assert not missed, f"{len(missed)} of {len(slips)}"


@pytest.mark.parametrize(
    "name",
    ["length_penalty", "client_metadata", "session_id", "num_ctx", "keep_alive", "route", "betas"],
)
def test_what_is_no_misspelling_is_none(name: str) -> None:
    for shape in SHAPES:
        assert nearest_name(name, shape.known_names() - {name}) is None


@pytest.mark.parametrize(
    "name",
    ["session_id", "route", "mirostat_tau", "post_sampling_probs", "background_tasks", "conversation_id"],
)
def test_what_is_a_little_like_a_refused_field_is_passed_over(name: str) -> None:
    bodies = {ChatRequest: HELLO, CompletionRequest: {"prompt": "a"}, ResponseRequest: {"input": "a"}}
    for shape, body in bodies.items():
        assert parse_body(shape, {**body, name: 1}, "warn").ignored() == [name]


def test_many_or_long_names_take_no_time() -> None:
    draw = random.Random(0)
    many = {f"{draw.random()}": 1 for _ in range(100_000)}
    for unknown in (many, {"x" * 10_000_000: 1, **dict.fromkeys("abcdefghijklmo", 1)}):

        def parse(unknown: dict[str, int] = unknown) -> None:
            with contextlib.suppress(BodyError):  # there are more than are looked at
                parse_body(ChatRequest, {**HELLO, **unknown}, "warn")

        assert relative_cost([parse]) < 900
