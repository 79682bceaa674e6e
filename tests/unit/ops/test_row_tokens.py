"""The rows' table keeps each row's newest tokens, and what is written in front of them overwrites none that is read."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raypp.ops.row_tokens import NO_TOKEN, RowTokens, StepTokens
from raypp.sampling_params import MAX_BAD_WORD_TOKENS
from raypp.specdec.table_bytes import row_tokens_width, token_table_bytes


def start(table: RowTokens, texts: dict[int, list[int]]) -> None:
    plan: Any = SimpleNamespace(
        start_rows=np.array(list(texts), np.int32),
        start_num_tokens=np.array([len(text) for text in texts.values()], np.int32),
        start_token_ids=np.array([token_id for text in texts.values() for token_id in text], np.int32),
    )
    table.start(plan)


@pytest.mark.parametrize(("window", "max_drafts"), [(0, 0), (0, 8), (64, 8), (300, 3)])
def test_it_follows_rows_through_starts_and_steps(window, max_drafts):
    rng = random.Random(window + max_drafts)
    table = RowTokens(6, row_tokens_width(window, max_drafts), torch.device("cpu"))
    kept = max(window, MAX_BAD_WORD_TOKENS)
    texts: dict[int, list[int]] = {}
    for _ in range(60):
        new = {row: [rng.randrange(1, 90) for _ in range(rng.randint(1, 200))] for row in rng.sample(range(6), 2)}
        start(table, new)
        texts |= new
        rows = rng.sample(list(texts), rng.randint(1, len(texts)))
        first = [len(texts[row]) for row in rows]
        for num_ahead in (max_drafts, 1 + max_drafts):  # drafts, and then the model's own tokens
            token_ids = torch.tensor([[rng.randrange(1, 90) for _ in range(num_ahead)] for _ in rows])
            table.write(StepTokens(torch.tensor(rows), torch.tensor(first), token_ids.view(len(rows), num_ahead)))
            for row, text in texts.items():  # what is in front of a row's tokens hides none of them
                at = torch.tensor([len(text)])
                expected = ([NO_TOKEN] * kept + text)[-kept:]
                assert table.before(torch.tensor([row]), at, kept).tolist() == [expected]
        for row, ids in zip(rows, token_ids.tolist(), strict=True):
            texts[row] = texts[row] + ids[: rng.randint(0, 1 + max_drafts)]


def test_its_bytes_are_those_that_are_planned():
    width = row_tokens_width(640, 8)
    assert width == 656
    assert RowTokens(12, width, torch.device("cpu")).table.nbytes == token_table_bytes(12, width) == 12 * 656 * 4
