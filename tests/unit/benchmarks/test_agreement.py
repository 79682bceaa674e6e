"""What is said of two implementations in bf16 and one in float32."""

from dataclasses import replace

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
    told_by_raypp = {t: Logprob(v, rank, None) for rank, (t, v) in enumerate(told, 1)}
    other, again = noisy(other_error), noisy(other_error)
    return Position(told_by_raypp, other, exact, int(again.argmax()))


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
    wrong = [replace(p, raypp={**p.raypp, VOCAB_SIZE: Logprob(9.0, 0, None)}) for p in positions[:20]]
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


def test_the_other_run_in_another_way_is_told_beside():
    positions = _positions(0.02, 0.02)
    assert agreement_of(positions).other_with_itself == 1.0
    changed = [replace(p, other_again=(p.other_again + 1) % VOCAB_SIZE) for p in positions[:40]]
    agreement = agreement_of(changed + positions[40:])
    assert agreement.other_with_itself == pytest.approx(0.9)
    assert agreement.is_good, "a control of the other: nothing is asked of it"
    assert agreement.figures()["other_with_itself"] == agreement.other_with_itself
    assert "transformers = itself 90.00%" in str(agreement)
    near_ties = agreement_of(_positions(0.02, 0.02, lead=0.01))
    assert near_ties.other_with_itself == pytest.approx(near_ties.raypp_with_other, abs=0.1)


def test_nothing_ties():
    agreement = agreement_of(_positions(0.02, 0.02, lead=0.01))
    assert agreement.tied == 0.0
    assert agreement.raypp_among_other_best == agreement.raypp_with_other < 0.9


def test_which_of_several_equal_ones_comes_first_is_no_opinion():
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[[7, 30, 40]] = logits.max() + 1
    other = logits.float().log_softmax(-1)  # as it is asked: what was equal in bf16 stays so

    def said(token):
        exact = other.clone()
        exact[token] += 0.01
        return Position({token: Logprob(float(exact[token]), 1, None)}, other, exact, 7)

    agreement = agreement_of([said(token) for token in (7, 30, 40, 9)])
    assert (agreement.tied, agreement.raypp_with_other, agreement.raypp_among_other_best) == (1.0, 0.25, 0.75)
    assert "tied at 100.00%, raypp's is among its best at 75.00%" in str(agreement)
    logits[7] += 0.125  # a digit of bf16 here
    assert (logits == logits.max()).sum() == 1
    other = logits.float().log_softmax(-1)
    agreement = agreement_of([said(token) for token in (7, 30)])
    assert (agreement.tied, agreement.raypp_with_other, agreement.raypp_among_other_best) == (0.0, 0.5, 0.5)
