"""Parameters are kept in one form, whatever form they come in, and contradictions are named."""

from __future__ import annotations

import pytest

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
