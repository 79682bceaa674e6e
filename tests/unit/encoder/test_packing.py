"""Packing: every item once, in order, within the budget, and without effect on what comes out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_tape import OpTapes
from toy_tower import NUM_TAPS, ToyTower, toy_item

from raypp.encoder.build_encoder import MAX_PADDING_SHARE, largest_fitting, token_ladder
from raypp.encoder.encoder_graphs import EncoderCudaGraphManager, GraphChoice, pack_items
from raypp.encoder.protocol import BudgetRange
from raypp.errors import ResourceError
from raypp.graphs.buckets import Buckets

CPU = torch.device("cpu")

sizes = st.lists(st.integers(1, 40), max_size=30)
budget_sets = st.sets(st.integers(1, 32), min_size=1, max_size=8).map(Buckets)


@given(sizes, budget_sets, st.integers(1, 6))
def test_every_item_is_in_one_batch_that_holds_it(num_tokens, budgets, max_items):
    batches = pack_items(num_tokens, budgets.sizes[-1], max_items, lambda sizes: budgets.fit(sum(sizes)))
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(num_tokens)))
    packed = [batch.indices for batch in batches if batch.budget is not None]
    assert [index for indices in packed for index in indices] == sorted(index for i in packed for index in i)
    for batch in batches:
        assert batch.num_tokens == sum(num_tokens[index] for index in batch.indices)
        assert len(batch.indices) <= max_items
        if batch.budget is None:
            assert len(batch.indices) == 1
            assert batch.num_tokens > budgets.sizes[-1]
        else:
            assert batch.budget == budgets.fit(batch.num_tokens)


@given(sizes, budget_sets, st.integers(1, 6))
def test_no_two_batches_in_a_row_would_have_been_one(num_tokens, budgets, max_items):
    batches = pack_items(num_tokens, budgets.sizes[-1], max_items, lambda sizes: budgets.fit(sum(sizes)))
    packed = [batch for batch in batches if batch.budget is not None]
    for batch, following in pairwise(packed):
        next_size = num_tokens[following.indices[0]]
        assert len(batch.indices) == max_items or batch.num_tokens + next_size > budgets.sizes[-1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), budget_sets, st.integers(1, 5), st.booleans())
def test_what_an_item_is_packed_with_does_not_matter(num_patches, budgets, max_items, is_captured):
    items = [toy_item(count, seed) for seed, count in enumerate(num_patches)]
    tower = ToyTower()
    manager = EncoderCudaGraphManager(tower, budgets, max_items, CPU, None)
    if is_captured:
        manager.capture()
    else:  # without it the buffers hold other things: nothing may come of it
        manager.capture()
        manager.encode(items[::-1])
    together = manager.encode(items)
    for item, encoded in zip(items, together, strict=True):
        assert encoded.key == item.key
        assert encoded.rows.shape[:2] == (1 + NUM_TAPS, item.num_tokens)
        alone = tower.split_output(*[f(tower.select_items([item], [0])) for f in (tower.eager_forward, lambda b: b)])
        torch.testing.assert_close(encoded.rows, alone[0].rows, rtol=0, atol=0)


def test_the_statistics_add_up():
    tower = ToyTower()
    manager = EncoderCudaGraphManager(tower, Buckets({4, 8}), 2, CPU, None)
    manager.capture()
    manager.encode([toy_item(3 * count) for count in (3, 2, 9, 4, 4, 1)])  # 3+2 | 9 eager | 4+4 | 1
    stats = manager.stats
    assert (stats.num_items, stats.num_tokens) == (6, 23)
    assert (stats.num_captured_batches, stats.num_eager_batches, tower.num_eager) == (3, 1, 1)
    assert (stats.num_captured_items, stats.num_captured_tokens) == (5, 14)
    assert stats.num_padding_tokens == (8 - 5) + 0 + (4 - 1)
    assert stats.hit_rate == pytest.approx(5 / 6)
    assert stats.padding_share == pytest.approx(6 / 20)


def test_outputs_outlive_the_next_batch():
    manager = EncoderCudaGraphManager(ToyTower(), Buckets({8}), 1, CPU, None)
    manager.capture()
    first, second = toy_item(6, 1), toy_item(6, 2)
    encoded = manager.encode([first])[0].rows
    kept = encoded.clone()
    manager.encode([second])
    torch.testing.assert_close(encoded, kept, rtol=0, atol=0)


def test_captured_batches_equal_calls_on_the_same_padding():
    budgets, tower = Buckets({3, 5, 8, 12}), ToyTower()
    captured = EncoderCudaGraphManager(tower, budgets, 3, CPU, OpTapes())
    captured.capture()
    assert {budget: of.split_squares for budget, of in captured.choice.times.items()} == {3: 9, 5: 13, 8: 22, 12: 48}
    assert captured.choice.launch_s > 0
    captured.choice = GraphChoice(budgets, {})  # whatever was faster
    called = EncoderCudaGraphManager(tower, budgets, 3, CPU, None)
    for seed in range(12):
        items = [toy_item(1 + (7 * seed + 5 * index) % 30, seed * 10 + index) for index in range(5)]
        for one, other in zip(captured.encode(items), called.encode(items), strict=True):
            assert torch.equal(one.rows, other.rows)
    assert captured.stats.num_captured_batches > 12
    assert (captured.stats.num_graphs, captured.stats.num_eager_batches) == (4, 0)


@given(st.integers(1, 64), st.integers(1, 6000))
def test_the_ladder_keeps_padding_small(min_tokens, max_tokens):
    ladder = token_ladder(BudgetRange(min_tokens, max_tokens))
    assert ladder.sizes[-1] == max_tokens
    for count in range(min(min_tokens, max_tokens), max_tokens + 1, 1 + max_tokens // 200):
        budget = ladder.fit(count)
        assert (budget - count) / budget <= MAX_PADDING_SHARE
    assert len(ladder.sizes) < 80


@given(st.integers(1, 100), st.integers(0, 5000), st.integers(0, 4000), st.integers(1, 50))
def test_budgets_shrink_to_the_memory(smallest, more, fixed, per_token):
    measured = []

    def measure(num_tokens: int) -> int:
        measured.append(num_tokens)
        return fixed + per_token * num_tokens

    limit = fixed + per_token * (smallest + more // 2)
    fitting = largest_fitting(BudgetRange(smallest, smallest + more), measure, limit)
    assert measure(fitting.max_tokens) <= limit
    assert measured[:-1] == sorted(measured[:-1], reverse=True)
    assert len(measured) < 60


def test_a_memory_too_small_for_anything_is_refused():
    with pytest.raises(ResourceError, match="smallest image"):
        largest_fitting(BudgetRange(4, 100), lambda num_tokens: num_tokens * 10, 39)
