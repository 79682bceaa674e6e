"""The token table keeps each row's newest tokens, and nothing that was not valid."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raypp.specdec.table_bytes import token_table_bytes
from raypp.specdec.token_table import TokenTable


def start(table: TokenTable, texts: dict[int, list[int]]) -> None:
    plan: Any = SimpleNamespace(
        start_rows=np.array(list(texts), np.int32),
        start_num_tokens=np.array([len(text) for text in texts.values()], np.int32),
        start_token_ids=np.array([token_id for text in texts.values() for token_id in text], np.int32),
    )
    starting: Any = SimpleNamespace(plan=plan)
    table.start(starting)


@pytest.mark.parametrize("window", [16, 64])
def test_it_follows_rows_through_starts_and_steps(window):
    rng = random.Random(window)
    table = TokenTable(6, window, torch.device("cpu"))
    texts: dict[int, list[int]] = {}
    for _ in range(60):
        new = {row: [rng.randrange(1, 90) for _ in range(rng.randint(1, 40))] for row in rng.sample(range(6), 2)}
        start(table, new)
        texts |= new
        rows = rng.sample(list(texts), rng.randint(1, len(texts)))
        width = rng.choice([1, 4, 9])
        token_ids = torch.tensor([[rng.randrange(1, 90) for _ in range(width)] for _ in rows], dtype=torch.int32)
        num_valid = torch.tensor([rng.randint(1, width) for _ in rows], dtype=torch.int32)
        table.append(torch.tensor(rows), torch.tensor([len(texts[row]) for row in rows]), token_ids, num_valid)
        for row, ids, count in zip(rows, token_ids.tolist(), num_valid.tolist(), strict=True):
            texts[row] = texts[row] + ids[:count]
        for row, text in texts.items():
            kept = range(max(0, len(text) - window), len(text))
            assert [int(table.tokens[row, position % window]) for position in kept] == [text[p] for p in kept]


def test_its_bytes_are_those_that_are_planned():
    table = TokenTable(12, 640, torch.device("cpu"))
    assert table.num_bytes == token_table_bytes(12, 640) == 12 * 640 * 4
