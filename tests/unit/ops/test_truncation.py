"""Which tokens stay after top-k, top-p and min-p, against a sort in float64."""

import pytest
import torch

from raypp.ops.sample.truncation import WEIGHT_BITS, distances, may_draw, weights

VOCAB_SIZE = 3000
SETTINGS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (20, 0.95, 0.0),
    (0, 0.9, 0.0),
    (0, 0.999, 0.0),
    (0, 1e-6, 0.0),
    (0, 1.0, 0.05),
    (700, 0.6, 0.01),
    (VOCAB_SIZE, 1.0, 1.0),
    (2 * VOCAB_SIZE, 0.5, 0.0),
]


def _kept(logits: torch.Tensor, temperature: float, setting: tuple[int, float, float]) -> torch.Tensor:
    top_k, top_p, min_p = setting
    rows = len(logits)
    truncation = (
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )
    return may_draw(logits, logits.amax(-1), torch.full((rows,), temperature), truncation)


def _reference(logits: torch.Tensor, temperature: float, setting: tuple[int, float, float]) -> torch.Tensor:
    """Return what stays of one row, [V], by sums in float64."""
    top_k, top_p, min_p = setting
    ordered, order = logits.double().sort(descending=True)
    probabilities = ((ordered - ordered[0]) / temperature).exp()
    kept = torch.ones(len(logits), dtype=torch.bool)
    if top_k:
        kept &= ordered >= ordered[min(top_k, len(logits)) - 1]
    total, before = probabilities[kept].sum(), 0.0
    if top_p < 1:
        for place in range(len(logits)):
            likelier = ordered > ordered[place]
            before = probabilities[likelier].sum()
            kept[place] &= bool(before < top_p * total)
    kept &= probabilities >= min_p
    return torch.empty_like(kept).scatter_(0, order, kept)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_stays_is_what_a_sort_in_float64_leaves(setting):
    generator = torch.Generator().manual_seed(4)
    for temperature, scale in ((0.6, 3.0), (1.0, 0.01), (1.7, 12.0)):
        logits = torch.randn(1, 500, generator=generator) * scale
        kept = _kept(logits, temperature, setting)
        differing = (kept[0] != _reference(logits[0], temperature, setting)).sum()
        assert differing <= 1, "only the token at which the sum passes top_p may differ, by the sum's rounding"
        assert kept[0, logits[0].argmax()]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("scale", [0.001, 0.3, 6.0])
def test_what_stays_is_what_few_are_nearer_than(setting, scale):
    """The rule as it reads, token by token, in integers: no difference is allowed."""
    top_k, top_p, min_p = setting
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(9)) * scale
    logits[1], logits[2, 5:] = logits[1].round(), -torch.inf
    distance = distances(logits, logits.amax(-1), torch.full((3,), 0.8))
    weight = weights(distance)
    is_nearer = distance.unsqueeze(1) < distance.unsqueeze(2)  # [row, token, other]
    stays = is_nearer.sum(2) < (top_k or len(logits[0]))
    left = (weight * stays).sum(1, keepdim=True).double()
    nearer = (is_nearer * weight.unsqueeze(1)).sum(2)
    stays &= (nearer.double() < torch.tensor(top_p).double() * left) | (top_p >= 1)
    stays &= weight.double() >= torch.tensor(min_p).double() * 2.0**WEIGHT_BITS
    assert torch.equal(_kept(logits, 0.8, setting), stays)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_equally_likely_tokens_stay_or_go_together(setting):
    logits = torch.randint(0, 7, (4, VOCAB_SIZE), generator=torch.Generator().manual_seed(5)).float()
    kept = _kept(logits, 0.8, setting)
    for row in range(4):
        for value in range(7):
            assert kept[row][logits[row] == value].unique().numel() <= 1
    assert _kept(torch.zeros(1, VOCAB_SIZE), 0.8, setting).all()


def test_what_stays_does_not_depend_on_the_order_of_the_vocabulary():
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(6)) * 4
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(7))
    for setting in SETTINGS:
        assert torch.equal(_kept(logits, 0.9, setting)[:, order], _kept(logits[:, order], 0.9, setting))


def test_tokens_that_nothing_may_yield_are_the_last_to_stay():
    logits = torch.tensor([[1.0, -torch.inf, 0.0, -torch.inf]])
    assert _kept(logits, 1.0, (2, 1.0, 0.0)).tolist() == [[True, False, True, False]]
    assert _kept(logits, 1.0, (0, 0.999999, 0.0)).tolist() == [[True, False, True, False]]


def test_weights_are_exponentials():
    below = -torch.rand(20_000, generator=torch.Generator().manual_seed(8)) * 20
    logits = torch.cat((torch.zeros(1), below)).unsqueeze(0)
    got = weights(distances(logits, torch.zeros(1), torch.tensor([0.7])))
    expected = (logits.double() / 0.7).exp() * 2.0**WEIGHT_BITS
    assert got[0, 0] == 1 << WEIGHT_BITS
    # The exponent is a float32: 24 bits of up to 41.
    assert ((got - expected).abs() <= 1 + expected * 3e-6).all()
