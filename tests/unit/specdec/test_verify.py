"""Verification against the rule in plain Python, and the tables around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sizes import sized

from raypp.ops.sample.token_choice import mask_truncated, sample
from raypp.specdec.draft_tables import verify_drafts
from raypp.specdec.forced_acceptance import ForcedAcceptance


def oracle(chosen: list[int], drafts: list[int], num_proposed: int, room: int) -> tuple[int, int, int]:
    """Return num_valid, num_drafted and num_matched of one row."""
    num_verified = len(chosen) - 1
    compared = drafts[: min(num_proposed, max(num_verified, 1))]
    num_matched = 0
    for draft, token_id in zip(compared, chosen, strict=False):
        if draft != token_id:
            break
        num_matched += 1
    return max(1, min(1 + min(num_matched, num_verified), room)), len(compared), num_matched


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int], list[int]]:
    num_rows, num_drafts = draw(st.integers(1, 5)), draw(st.integers(0, 5))
    max_drafts = draw(st.integers(max(num_drafts, 1), 6))
    tokens = st.integers(0, 1)

    def table(width: int, values: st.SearchStrategy[int]) -> list[list[int]]:
        return draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=num_rows, max_size=num_rows))

    return (
        table(num_drafts + 1, tokens),
        table(max_drafts, tokens),
        [row[0] for row in table(1, st.sampled_from([0, max_drafts]))],
        [row[0] for row in table(1, st.integers(0, 8))],
    )


@given(rows())
def test_drafts_are_accepted_up_to_the_first_that_the_model_did_not_choose(given):
    chosen, drafts, num_proposed, room = given
    first = torch.arange(len(chosen)) * 10
    got = verify_drafts(
        *(torch.tensor(t, dtype=torch.int32) for t in (chosen,)), first, *_int32s(drafts, num_proposed, room)
    )
    expected = [oracle(*row) for row in zip(chosen, drafts, num_proposed, room, strict=True)]
    assert list(zip(*(t.tolist() for t in (got.num_valid, got.num_drafted, got.num_matched)), strict=True)) == expected
    assert got.lengths.tolist() == [f + v for f, (v, _, _) in zip(first.tolist(), expected, strict=True)]


def _int32s(*values: list) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.int32) for value in values]


NUM_DRAWS = sized(6_000, 20_000)


DISTRIBUTIONS = [
    pytest.param(0.7, 0, 1.0, 0.0, marks=pytest.mark.full),
    (1.0, 0, 1.0, 0.0),
    pytest.param(1.6, 0, 1.0, 0.0, marks=pytest.mark.full),
    pytest.param(1.0, 9, 1.0, 0.0, marks=pytest.mark.full),
    (1.2, 40, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), DISTRIBUTIONS)
@pytest.mark.parametrize("draft", ["likely", "unlikely"])
def test_the_tokens_that_are_kept_have_the_models_distribution(temperature, top_k, top_p, min_p, draft):
    """One draft: the first token, and where the draft was right the second, are distributed as without it."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(3)) * 1.5
    truncation = (torch.full((2,), top_k), torch.full((2,), top_p), torch.full((2,), min_p))
    probabilities = mask_truncated(logits, torch.full((2,), temperature), truncation).softmax(-1)
    order = probabilities[0].argsort(descending=True)
    draft_id = int(order[0] if draft == "likely" else order[5])
    kept: list[list[int]] = [[], []]
    for start in range(0, NUM_DRAWS, 2000):
        seeds = torch.arange(start, start + 2000).repeat_interleave(2)
        positions = torch.tensor([7, 8]).repeat(2000)
        chosen = sample(
            logits.repeat(2000, 1),
            torch.full((4000,), temperature),
            seeds,
            positions,
            tuple(values[:1].expand(4000) for values in truncation),
        )
        chosen = chosen.view(2000, 2).to(torch.int32)
        verified = verify_drafts(
            chosen,
            torch.full((2000,), 7),
            torch.full((2000, 1), draft_id, dtype=torch.int32),
            *_int32s([1] * 2000, [9] * 2000),
        )
        kept[0] += chosen[:, 0].tolist()
        kept[1] += chosen[verified.num_valid == 2, 1].tolist()
        assert (chosen[verified.num_valid == 2, 0] == draft_id).all()
    accepted = len(kept[1]) / NUM_DRAWS
    assert accepted == pytest.approx(float(probabilities[0, draft_id]), abs=5 * (0.25 / NUM_DRAWS) ** 0.5)
    assert len(kept[1]) > NUM_DRAWS // 100
    for position in (0, 1):
        assert _p_value(kept[position], probabilities[position]) > 1e-4


def test_a_verifier_that_keeps_the_draft_instead_has_another_distribution():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(3)) * 1.5
    drawn = sample(logits.expand(5000, -1), torch.ones(5000), torch.arange(5000), torch.full((5000,), 7))
    drawn[::10] = int(logits.argmax())
    assert _p_value(drawn.tolist(), logits[0].softmax(-1)) < 1e-4


def _p_value(drawn: list[int], probabilities: torch.Tensor) -> float:
    from scipy import stats  # which takes seconds

    counts = np.bincount(drawn, minlength=len(probabilities))
    expected = probabilities.double().numpy() * len(drawn)
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was kept"
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    some = wanted > 0
    return float(stats.chisquare(observed[some], wanted[some] * observed[some].sum() / wanted[some].sum()).pvalue)


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_forced_acceptance_has_its_rate_at_every_place(rate):
    num_rows, num_drafts = 4000, 3
    chosen = torch.randint(
        0, 50, (num_rows, num_drafts + 1), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    drafts = torch.randint(0, 50, (num_rows, 5), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    rows, first = torch.arange(num_rows), torch.arange(num_rows) + 3
    forced = ForcedAcceptance(rate, drafts.shape[1], torch.device("cpu"))(chosen, drafts, rows, first)
    assert torch.equal(
        forced, ForcedAcceptance(rate, drafts.shape[1], torch.device("cpu"))(chosen, drafts, rows, first)
    )
    assert torch.equal(forced[:, -1], chosen[:, -1]), "the bonus token is the model's"
    assert forced.min() >= 0
    matches = (forced[:, :num_drafts] == drafts[:, :num_drafts]).double()
    assert matches.mean(0).tolist() == pytest.approx([rate] * num_drafts, abs=0.03)
    after_a_match = matches[matches[:, 0] == 1, 1]
    assert not len(after_a_match) or float(after_a_match.mean()) == pytest.approx(rate, abs=0.03)
