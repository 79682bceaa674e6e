"""N-gram drafts against a plain Python oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ngram_oracle import ngram_oracle, ring_table

from raypp.ops.ngram import propose_ngrams, propose_ngrams_by_row


def propose(
    texts: list[list[int]], window: int, min_n: int, max_n: int, num_drafts: int, slack: int = 0, extra: int = 0
):
    """Return drafts and whether they are no miss, of texts in shuffled rows of a table with rubbish in it."""
    rows = torch.randperm(len(texts) + 2, generator=torch.Generator().manual_seed(0))[: len(texts)]
    tokens = ring_table(texts, rows.tolist(), len(texts) + 2, window + extra)
    lengths = torch.tensor([len(text) for text in texts])
    drafts, num_proposed = propose_ngrams(
        tokens,
        rows,
        lengths,
        window=window,
        min_n=min_n,
        max_n=max_n,
        num_drafts=num_drafts,
        max_length=int(lengths.max()) + slack,
    )
    by_row = propose_ngrams_by_row(
        tokens, rows, lengths, window=window, min_n=min_n, max_n=max_n, num_drafts=num_drafts
    )
    assert by_row[0].tolist() == drafts.tolist()
    assert by_row[1].tolist() == num_proposed.tolist()
    assert by_row[0].dtype == by_row[1].dtype == drafts.dtype == num_proposed.dtype == torch.int32
    return drafts.tolist(), num_proposed.tolist()


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=5),
    window=st.integers(8, 48),
    ns=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    num_drafts=st.integers(1, 9),
    slack=st.integers(0, 9),
    extra=st.integers(0, 9),
)
@example(texts=[[0]], window=8, ns=[1, 1], num_drafts=1, slack=0, extra=0)
@example(texts=[[0, 0]], window=8, ns=[1, 6], num_drafts=3, slack=30, extra=0)
def test_drafts_are_those_of_the_oracle(texts, window, ns, num_drafts, slack, extra):
    got = propose(texts, window, *ns, num_drafts, slack, extra)
    expected = [ngram_oracle(text, window, *ns, num_drafts) for text in texts]
    assert got == ([drafts for drafts, _ in expected], [num_drafts * is_match for _, is_match in expected])


def test_the_longest_match_wins_and_then_the_newest():
    #       ----7 8 9 -> 1      9 -> 2       8 9 -> 3   8 9 -> 4     7 8 9
    text = [7, 8, 9, 1, 5, 9, 2, 5, 8, 9, 3, 5, 8, 9, 4, 5, 7, 8, 9]
    assert propose([text], 64, 2, 5, 2) == ([[1, 5]], [2])
    assert propose([text], 64, 2, 2, 2) == ([[4, 5]], [2])


def test_a_repeated_token_is_drafted_on():
    assert propose([[1, 2, 2, 2]], 64, 2, 5, 4) == ([[2, 2, 2, 2]], [4])
    assert propose([[1, 2, 1, 2, 1]], 64, 2, 5, 4) == ([[2, 1, 2, 1]], [4])


def test_a_miss_proposes_valid_ids_and_says_so():
    assert propose([[1, 2, 3]], 64, 2, 5, 3) == ([[3, 3, 3]], [0])
    assert propose([[1, 2, 3, 2]], 64, 2, 5, 3) == ([[2, 2, 2]], [0]), "one equal token is less than min_n"


def test_what_left_the_window_is_not_found():
    text = [1, 2, 9, *range(10, 20), 1, 2]
    assert propose([text], len(text), 2, 5, 1) == ([[9]], [1])
    assert propose([text], len(text) - 1, 2, 5, 1) == ([[2]], [0])


def test_the_oracle_finds_a_version_that_looks_at_the_end_itself():
    with pytest.raises(AssertionError):
        assert ngram_oracle([1, 2, 3], 8, 2, 3, 1)[1]
