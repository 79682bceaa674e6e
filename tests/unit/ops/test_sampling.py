"""The sampler's distribution and its noise, against exact computations and transformers' logits processors."""

import math

import numpy as np
import pytest
import torch
from sizes import sized
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from raypp.ops.sample.token_choice import gumbel_noise, mask_truncated, sample, sample_greedy

NUM_DRAWS = 20_000
ALONE = ((7, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.1))
ONE = torch.ones(1)


def _draws(logits: torch.Tensor, temperature: float, truncation=None, *, seed: int = 5) -> torch.Tensor:
    """Draw once at each of NUM_DRAWS positions of one request."""
    positions = torch.arange(NUM_DRAWS)
    rows = logits.expand(NUM_DRAWS, -1)
    if truncation is not None:
        truncation = tuple(t.expand(NUM_DRAWS) for t in truncation)
    return sample(rows, torch.full((NUM_DRAWS,), temperature), torch.full((NUM_DRAWS,), seed), positions, truncation)


def _p_value(draws: torch.Tensor, probabilities: torch.Tensor) -> float:
    from scipy import stats  # which takes seconds

    counts = torch.bincount(draws, minlength=len(probabilities)).double().numpy()
    expected = probabilities.double().numpy() * len(draws)
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    keep = wanted > 0
    wanted = wanted[keep] * (observed[keep].sum() / wanted[keep].sum())
    return float(stats.chisquare(observed[keep], wanted).pvalue)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(300, generator=torch.Generator().manual_seed(0)) * 1.5


@pytest.mark.parametrize("temperature", sized([0.3], [0.3, 0.8, 1.0, 1.7]))
def test_draws_follow_the_softmax(logits, temperature):
    assert _p_value(_draws(logits, temperature), (logits / temperature).softmax(-1)) > 1e-4


def test_a_wrong_temperature_is_noticed(logits):
    assert _p_value(_draws(logits, 0.8), (logits / 0.9).softmax(-1)) < 1e-4


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(40, 0.8, 0.05), *(pytest.param(*each, marks=pytest.mark.full) for each in ALONE)]
)
def test_truncated_draws_follow_what_transformers_leaves(logits, top_k, top_p, min_p):
    scores = (logits / 0.8).unsqueeze(0)
    for warper in (
        TopKLogitsWarper(top_k) if top_k else None,
        TopPLogitsWarper(top_p) if top_p < 1 else None,
        MinPLogitsWarper(min_p) if min_p else None,
    ):
        scores = scores if warper is None else warper(None, scores)
    truncation = (torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    masked = mask_truncated(logits.unsqueeze(0), torch.tensor([0.8]), truncation)
    assert torch.equal(masked.isinf(), scores.isinf())
    assert _p_value(_draws(logits, 0.8, truncation), scores[0].softmax(-1)) > 1e-4


def test_the_most_likely_token_always_stays():
    logits = torch.tensor([[1.0, 5.0, 1.0]])
    masked = mask_truncated(logits, ONE, (torch.tensor([1]), torch.tensor([1e-9]), ONE))
    assert masked.argmax() == 1
    assert masked.isinf().sum() == 2


def test_rows_are_truncated_each_by_its_own_parameters():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    truncation = (torch.tensor([0, 3, 0]), torch.tensor([1.0, 1.0, 0.2]), torch.zeros(3))
    masked = mask_truncated(logits, torch.ones(3), truncation)
    assert masked[0].isfinite().all()
    assert masked[1].isfinite().sum() == 3
    assert 1 <= masked[2].isfinite().sum() < 50


def test_noise_is_standard_gumbel():
    from scipy import stats  # which takes seconds

    noise = gumbel_noise(torch.arange(50), torch.zeros(50, dtype=torch.int64), 4000).flatten().double().numpy()
    assert np.isfinite(noise).all()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("what", ["seeds", "positions"])
def test_streams_of_neighbouring_seeds_and_positions_are_unrelated(what):
    varied, fixed = torch.arange(60) - 30, torch.zeros(60, dtype=torch.int64)
    seeds, positions = (varied, fixed) if what == "seeds" else (fixed, varied + 30)
    noise = gumbel_noise(seeds, positions, 4000)
    correlations = torch.corrcoef(noise).fill_diagonal_(0).abs()
    # The largest of 1,770 correlations of 4,000 pairs each.
    assert correlations.max() < 5.5 / math.sqrt(4000)


def test_a_row_draws_the_same_whatever_it_is_batched_with():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(2))
    temperature, seeds, positions = torch.tensor([0.8, 0.0, 1.5, 0.8]), torch.arange(4), torch.arange(4) * 7
    together = sample(logits, temperature, seeds, positions)
    for row in range(4):
        one = slice(row, row + 1)
        assert sample(logits[one], temperature[one], seeds[one], positions[one]) == together[row]


def test_temperature_zero_is_greedy_beside_rows_that_draw():
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(3))
    temperature = torch.tensor([0.0, 1.0] * 4)
    tokens = sample(logits, temperature, torch.arange(8), torch.arange(8))
    assert torch.equal(tokens[::2], sample_greedy(logits)[::2])


def test_the_noise_is_pinned():
    """A seed's text must not change between versions: the first values are written down."""
    noise = gumbel_noise(torch.tensor([0, -1]), torch.tensor([0, 5]), 3)
    again = gumbel_noise(torch.tensor([0, -1]), torch.tensor([0, 5]), 300)[:, :3]
    assert torch.equal(noise, again)
    assert _splitmix_reference(0, 0, 3) == pytest.approx(noise[0].tolist(), rel=1e-5)
    assert _splitmix_reference(-1, 5, 3) == pytest.approx(noise[1].tolist(), rel=1e-5)


def _splitmix_reference(seed: int, position: int, vocab_size: int) -> list[float]:
    """The same noise in plain Python integers."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(bits: int) -> int:
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        return bits ^ (bits >> 31)

    key = mix((mix((seed + golden) & mask) + (position + 1) * golden) & mask)
    values = []
    for token_id in range(vocab_size):
        low = mix((key + (token_id + 1) * golden) & mask) & 0xFFFFFFFF
        values.append(-math.log(-math.log1p(-(low + 0.5) * 2.0**-32)))
    return values
