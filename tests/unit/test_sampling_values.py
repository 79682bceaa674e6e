"""Parameters are kept in one form, whatever form they come in, and contradictions are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raypp import sampling_params as limits
from raypp.api.beam_search import BeamSearchParams
from raypp.errors import RequestError
from raypp.types import SamplingParams


def test_values_are_kept_in_one_form() -> None:
    params = SamplingParams(
        stop="x", stop_token_ids=[1], bad_words=["a"], top_k=-1, logit_bias={"5": 1, 6: -2.5}, allowed_token_ids=[3, 4]
    )
    assert params == SamplingParams(
        stop=("x",),
        stop_token_ids=(1,),
        bad_words=("a",),
        top_k=0,
        logit_bias={5: 1.0, 6: -2.5},
        allowed_token_ids=(3, 4),
    )
    assert params.logit_bias == {5: 1.0, 6: -2.5}
    assert hash(params) == hash(SamplingParams(**{name: getattr(params, name) for name in params.__slots__}))


def test_none_is_none() -> None:
    given = dict.fromkeys(
        ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "logprobs", "seed")
    )
    assert SamplingParams(**given) == SamplingParams()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 and max_tokens=4"),
        ({"n": 2, "temperature": 0}, "n=2 and temperature=0"),
        ({"stop": "a", "detokenize": False}, "stop strings and detokenize=False"),
    ],
)
def test_contradictions_are_named(given: dict, words: str) -> None:
    with pytest.raises(RequestError, match="contradict") as caught:
        SamplingParams(**given)
    assert words in str(caught.value.got)


@pytest.mark.parametrize(
    "given",
    [
        *({name: value} for name in ("n", "max_tokens") for value in (0, -1, 1.5, True, None, "3")),
        *({"temperature": value} for value in (-0.1, float("nan"), float("inf"), 1e31, "hot", None, True)),
        *({"top_p": value} for value in (0, 1.1, float("nan"))),
        *({"repetition_penalty": value} for value in (0, -1, 1e5, float("nan"))),
        *({"logit_bias": value} for value in ([1], {-1: 1}, {1.5: 1}, {"a": 1}, {1: "b"}, {1: float("nan")}, {1: 1e7})),
        *({"allowed_token_ids": value} for value in ([], [-1], 5, "ab")),
        *({"bad_words": value} for value in ([""], [" "], [5], "word")),
        *({"logprobs": value} for value in (-2, 1.5, True)),
        {"skip_special_tokens": 1},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_a_hint(given: dict) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert None not in (caught.value.got, caught.value.expected, caught.value.hint)


@pytest.mark.parametrize(
    ("name", "most", "of_size"),
    [
        ("n", limits.MAX_CONTINUATIONS, int),
        ("logit_bias", limits.MAX_BIASED_TOKENS, lambda size: dict.fromkeys(range(size), 1.0)),
        ("stop_token_ids", limits.MAX_END_TOKENS, lambda size: [*range(size)]),
        ("stop", limits.MAX_STOP_STRINGS, lambda size: [str(index) for index in range(size)]),
        ("stop", limits.MAX_STOP_STRING_CHARS, lambda size: "x" * size),
        ("bad_words", limits.MAX_BAD_WORDS, lambda size: [str(index) for index in range(size)]),
        ("bad_words", limits.MAX_BAD_WORD_CHARS, lambda size: ["x" * size]),
    ],
)
def test_each_limit_is_named_with_its_value(name: str, most: int, of_size: Callable[[int], object]) -> None:
    SamplingParams(**{name: of_size(most)})
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: of_size(most + 1)})
    assert f"{most:,}" in str(caught.value.expected)
    assert f"{most + 1:,}".replace(",", "") in str(caught.value.got).replace(",", "")
    assert caught.value.hint


def test_a_key_of_many_digits_is_refused() -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias={"9" * 5000: 1.0})


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (SamplingParams, {"max_token": 3}, "did you mean max_tokens?"),
        (SamplingParams, {"topP": 0.5}, "did you mean top_p?"),
        (SamplingParams, {"vibe": 3}, "one of n, max_tokens, "),
        (BeamSearchParams, {"beam_width": 2, "max_tokens": 3, "length_penality": 1.0}, "did you mean length_penalty?"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(kind: type, given: dict[str, object], expected: str) -> None:
    with pytest.raises(RequestError, match="there is no") as caught:
        kind(**given)
    assert caught.value.param == list(given)[-1]
    assert str(caught.value.expected).startswith(expected)
