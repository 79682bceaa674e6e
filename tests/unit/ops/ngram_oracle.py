"""What n-gram drafts should be, in plain Python; and tables to look for them in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

RUBBISH = 1


def ngram_oracle(text: Sequence[int], window: int, min_n: int, max_n: int, num_drafts: int) -> tuple[list[int], bool]:
    """Return the drafts of a text of which the newest `window` tokens are known, and whether they are a match."""
    known = list(text)[-window:]
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(known) - 1, n - 1, -1):  # the newest first; the end of the text itself is not among them
            if known[end - n : end] == known[len(known) - n :]:
                grown = list(known)
                while len(grown) < len(known) + num_drafts:
                    grown.append(grown[end + len(grown) - len(known)])
                return grown[len(known) :], True
    return [known[-1]] * num_drafts, False


def ring_table(texts: Sequence[Sequence[int]], rows: Sequence[int], num_rows: int, width: int) -> torch.Tensor:
    """Return a table of tokens with these texts in these rows, and rubbish everywhere else."""
    table = torch.full((num_rows, width), RUBBISH, dtype=torch.int32)
    for text, row in zip(texts, rows, strict=True):
        for position, token_id in enumerate(text):
            table[row, position % width] = token_id
    return table
