"""Bias, penalties, bans and log-probabilities against transformers' logits processors and plain computations."""

from __future__ import annotations

import pytest
import reference_ops as reference
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from raypp.ops.row_tokens import NO_TOKEN
from raypp.ops.sample.adjust import BANNED, add_bias, allow_only, ban, completes_bad_word, penalize
from raypp.ops.sample.tables import ANY_TOKEN
from raypp.ops.sample.token_choice import top_logprobs

VOCAB_SIZE = 70


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3


def _is_banned(logits: torch.Tensor) -> torch.Tensor:
    return logits <= BANNED


def test_bias_as_transformers_adds_it(logits):
    bias = {3: 2.5, 60: -4.0, 1: -1.25}
    expected = SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()])(torch.tensor([[1]]), logits[:1])
    # The other rows have one entry that fills the places, and none at all.
    token_ids = torch.tensor([[3, 60, 1, 1], [0, 0, 0, 0], [5, 5, 5, 5]])
    values = torch.tensor([[2.5, -4.0, -1.25, -1.25], [0.0] * 4, [1.0] * 4])
    before = logits.clone()
    add_bias(logits, token_ids, values)
    assert torch.equal(logits[:1], expected)
    assert torch.equal(logits[1], before[1])
    assert logits[2, 5] == before[2, 5] + 1
    assert (logits != before)[2].sum() == 1


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3, 5.0])
def test_repetition_penalty_as_transformers(logits, penalty):
    prompt, output = [1, 2, 2, 9], [9, 40, 40, 40]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[:1].clone())
    counts, in_prompt = torch.zeros(3, VOCAB_SIZE, dtype=torch.int32), torch.zeros(3, VOCAB_SIZE, dtype=torch.bool)
    counts[0] = torch.bincount(torch.tensor(output), minlength=VOCAB_SIZE)
    in_prompt[0, prompt] = True
    before = logits.clone()
    penalize(logits, counts, in_prompt, torch.tensor([penalty, 1.0, 1.0]), torch.zeros(3), torch.zeros(3))
    torch.testing.assert_close(logits[:1], expected, rtol=1e-6, atol=0)
    assert torch.equal(logits[1:], before[1:])


def test_frequency_counts_and_presence_does_not(logits):
    counts = torch.zeros(3, VOCAB_SIZE, dtype=torch.int32)
    counts[:, 7], counts[:, 8] = 3, 1
    before = logits.clone()
    in_prompt = torch.ones(3, VOCAB_SIZE, dtype=torch.bool)  # must not matter to either
    frequency, presence = torch.tensor([0.5, 0.0, -1.0]), torch.tensor([0.0, 0.75, 0.25])
    penalize(logits, counts, in_prompt, torch.ones(3), frequency, presence)
    change = logits - before
    assert change[:, 7].tolist() == pytest.approx([-1.5, -0.75, 2.75], abs=1e-5)
    assert change[:, 8].tolist() == pytest.approx([-0.5, -0.75, 0.75], abs=1e-5)
    assert (change != 0).sum() == 6


@pytest.mark.parametrize("num_new", [0, 1, 2, 3])
def test_end_tokens_are_banned_as_transformers_bans_them(logits, num_new):
    prompt_len, min_tokens, eos = 4, 2, [5, 69]
    processor = MinNewTokensLengthLogitsProcessor(prompt_len, min_tokens, eos)
    expected = processor(torch.zeros(1, prompt_len + num_new, dtype=torch.int64), logits[:1])
    is_early = torch.tensor([num_new < min_tokens, False, False])
    before = logits.clone()
    ban(logits, torch.tensor([eos, eos, [NO_TOKEN, NO_TOKEN]]), is_early.unsqueeze(1).expand(3, 2))
    assert torch.equal(_is_banned(logits[:1]), expected.isinf())
    assert torch.equal(logits[1:], before[1:])


def test_a_token_that_is_named_twice_is_banned_once_any_of_them_says_so(logits):
    before = logits.clone()
    ban(logits, torch.tensor([[4, 4], [4, 4], [4, 4]]), torch.tensor([[True, False], [False, True], [False, False]]))
    assert _is_banned(logits)[:, 4].tolist() == [True, True, False]
    assert torch.equal(logits[2], before[2])


def test_where_there_is_no_token_none_is_banned(logits):
    before = logits.clone()
    ban(logits, torch.tensor([[4, NO_TOKEN], [ANY_TOKEN, 0], [NO_TOKEN, NO_TOKEN]]), torch.ones(3, 2).bool())
    assert _is_banned(logits).nonzero().tolist() == [[0, 4], [1, 0]]
    assert torch.equal(logits[2], before[2])


WORDS = [[5], [6, 7], [1, 2, 3], [2, 3], [9, 9, 9, 9]]


@pytest.mark.parametrize("known", [[1], [1, 2], [6], [0, 6], [9, 9, 9], [9, 9, 9, 9], [2, 6], [3, 1, 2], [9, 9]])
def test_bad_words_as_transformers_bans_them(logits, known):
    # transformers looks for no word that is longer than what is known, even where its last token would complete it.
    expected = NoBadWordsLogitsProcessor(WORDS)(torch.tensor([[0, *known]]), logits[:1])
    longest = 4
    words = torch.tensor([[ANY_TOKEN] * (longest - len(word)) + word for word in WORDS] + [[ANY_TOKEN] * longest])
    history = torch.tensor([([NO_TOKEN] * longest + known)[-(longest - 1) :]])
    is_banned = completes_bad_word(words.unsqueeze(0), history)
    ban(logits[:1], words[:, -1].unsqueeze(0), is_banned)
    assert torch.equal(_is_banned(logits[:1]), expected.isinf())


def test_only_what_is_allowed_is_left(logits):
    allowed = [0, 31, 32, 69]
    others = [t for t in range(VOCAB_SIZE) if t not in allowed]
    expected = SuppressTokensLogitsProcessor(others)(None, logits[:1])
    bitmask = torch.full((3, 3), -1, dtype=torch.int32)
    bitmask[0] = 0
    for token_id in allowed:
        bit = 1 << token_id % 32
        bitmask[0, token_id // 32] |= bit - (1 << 32) if bit >> 31 else bit
    before = logits.clone()
    allow_only(logits, bitmask)
    assert torch.equal(logits[:1], expected)
    assert torch.equal(logits[1:], before[1:])


def test_bans_that_leave_nothing_do_not_let_out_what_is_not_allowed(logits):
    bitmask = torch.zeros(3, 3, dtype=torch.int32)
    bitmask[:, 1] = 1 << 8  # token 40
    ban(logits, torch.full((3, 1), 40), torch.ones(3, 1, dtype=torch.bool))
    allow_only(logits, bitmask)
    assert logits.argmax(1).tolist() == [40] * 3


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB_SIZE])
def test_logprobs_are_the_log_softmax(logits, num_top):
    chosen = torch.tensor([0, 33, int(logits[2].argmax())])
    top = top_logprobs(logits, chosen, num_top)
    expected = logits.double().log_softmax(-1)
    assert top.token_ids.shape == top.logprobs.shape == (3, 1 + num_top)
    assert torch.equal(top.token_ids[:, 0], chosen.int())
    torch.testing.assert_close(top.logprobs.double(), expected.gather(1, top.token_ids.long()), rtol=0, atol=1e-5)
    ordered = expected.argsort(dim=1, descending=True)
    assert torch.equal(top.token_ids[:, 1:].long(), ordered[:, :num_top])
    assert top.ranks.tolist() == [1 + ordered[row].tolist().index(token) for row, token in enumerate(chosen.tolist())]


def test_the_twin_agrees_with_transformers(logits):
    """All together, in the order in which transformers has them: bias, repetition, bad words, length."""
    prompt, output, eos = [1, 2, 5], [6, 40, 40], [69]
    known = torch.tensor([prompt + output])
    expected = logits[:1].clone()
    for processor in (
        SequenceBiasLogitsProcessor([[[40], 3.0], [[1], -3.0]]),
        RepetitionPenaltyLogitsProcessor(1.5),
        NoBadWordsLogitsProcessor([[40, 40, 3], [40, 8]]),
        MinNewTokensLengthLogitsProcessor(3, 4, eos),
    ):
        expected = processor(known, expected)
    found = reference.changed_logits(
        logits[0],
        prompt,
        output,
        bias={40: 3.0, 1: -3.0},
        repetition=1.5,
        frequency=0.0,
        presence=0.0,
        early_end_token_ids=eos,
        bad_words=[[40, 40, 3], [40, 8]],
        allowed=None,
    )
    assert torch.equal(_is_banned(found), expected[0].isinf())
    torch.testing.assert_close(found[~_is_banned(found)], expected[0][~_is_banned(found)])
