"""What is said of two implementations in bf16 and one in float32."""

import pytest
import torch
from agreement import NUM_COMPARED, NUM_REPORTED, Position, agreement_of

from raypp.types import Logprob

VOCAB_SIZE = 50


def _position(exact, raypp_error, other_error, generator):
    def noisy(error):
        return exact + error * torch.randn(VOCAB_SIZE, generator=generator)

    top = noisy(raypp_error).topk(NUM_REPORTED)
    told = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Position({t: Logprob(v, rank, None) for rank, (t, v) in enumerate(told, 1)}, noisy(other_error), exact)


def _positions(raypp_error, other_error, lead=1.0, count=400):
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        exact = torch.randn(VOCAB_SIZE, generator=generator)
        exact[index % VOCAB_SIZE] = exact.max() + lead
        found.append(_position(exact, raypp_error, other_error, generator))
    return found


def test_equal_errors_are_good():
    agreement = agreement_of(_positions(0.02, 0.02))
    assert agreement.is_good
    assert agreement.error_ratio == pytest.approx(1.0, abs=0.1)
    assert (agreement.num_positions, agreement.num_distinct, agreement.raypp_with_other) == (400, VOCAB_SIZE, 1.0)
    assert agreement.missing < 0.5 / NUM_COMPARED


def test_twice_the_error_is_not():
    agreement = agreement_of(_positions(0.04, 0.02))
    assert agreement.error_ratio == pytest.approx(2.0, abs=0.2)
    assert not agreement.is_good


def test_another_token_at_clear_positions_is_not():
    positions = _positions(0.02, 0.02)
    wrong = [Position({**p.raypp, VOCAB_SIZE: Logprob(9.0, 0, None)}, p.other, p.exact) for p in positions[:20]]
    agreement = agreement_of(wrong + positions[20:])
    assert agreement.raypp_with_other_if_clear == pytest.approx(0.95)
    assert not agreement.is_good


def test_near_ties_are_told_apart():
    agreement = agreement_of(_positions(0.02, 0.02, lead=0.01))
    assert agreement.raypp_with_other < 0.9, "a toss of a coin nearly"
    assert agreement.clear < 0.1
    assert "(below 99%)" in str(agreement), "said, though not asked for"


def test_near_ties_count_where_all_positions_do():
    near_ties, clear = _positions(0.02, 0.02, lead=0.01, count=40), _positions(0.02, 0.02)
    assert agreement_of(clear + near_ties).is_good
    agreement = agreement_of(clear + near_ties, counts_all=True)
    assert agreement.raypp_with_other < 0.99
    assert not agreement.is_good
    assert agreement_of(clear, counts_all=True).is_good
