"""Proposes n-gram drafts: the tokens that followed the last occurrence of a row's newest tokens in its own text.

The idea is prompt lookup decoding (A. Saxena, 2023). Of all earlier places whose last n tokens equal the row's last n
tokens, the one with the longest n from `min_n` to `max_n` wins, and among equals the newest. The row's end itself is
no such place; a place may overlap it. What followed is proposed. Where fewer tokens followed than drafts are wanted,
the row has been repeating that many tokens, and the drafts go on repeating them.

`propose_ngrams` is plain torch, for any device and number of rows. `propose_ngrams_by_row` is for few rows on a CPU,
where one torch call costs as much as looking through a row. R rows, K drafts, W columns of the table.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.ops.break_point import break_point


def propose_ngrams(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    *,
    window: int,
    min_n: int,
    max_n: int,
    num_drafts: int,
    max_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return draft_ids [R, K] int32, and num_proposed [R] int32: K where there was a match, 0 where there was none.

    A row without a match gets its last token K times: valid ids that stand for nothing.

    Shapes: tokens [num_rows, W] int32, position p in column p mod W; rows [R] int64; lengths [R] int64, the tokens of
    each row, at least 1; of these the newest `window` are searched, and nothing at or past the length counts.

    Args:
        tokens: The rows' table, see `raypp.ops.row_tokens`.
        rows: Whose drafts are wanted.
        lengths: Their tokens.
        window: The newest tokens that are searched, at most W.
        min_n: The shortest match.
        max_n: The longest run that is compared.
        num_drafts: K.
        max_length: An upper bound of the lengths that the host knows; spares looking through empty columns.
    """
    text, known = _texts(tokens, rows, lengths, window, max_length)
    width = text.shape[1]
    positions = torch.arange(width, dtype=torch.int32, device=text.device)
    offsets = torch.arange(max_n, device=text.device)
    newest = text.gather(1, (known.unsqueeze(1) - 1 - offsets).clamp_(min=0))  # [R, max_n], the last token first
    # matches[r, p]: the j + 1 tokens that end at p are the row's last j + 1 tokens.
    matches = (text == newest[:, :1]) & (positions < known.unsqueeze(1) - 1)
    runs = matches.to(torch.int32)
    for j in range(1, min(max_n, width)):
        matches[:, j:] &= text[:, :-j] == newest[:, j : j + 1]
        matches[:, :j] = False
        runs += matches
    best = runs.mul_(width).add_(positions).amax(dim=1)  # the longest, then the newest
    is_match = best >= min_n * width
    start = (best % width + 1).to(torch.int64)
    period = (known - start).clamp_(min=1)
    followed = torch.arange(num_drafts, device=text.device).remainder(period.unsqueeze(1)).add_(start.unsqueeze(1))
    drafts = text.gather(1, torch.where(is_match.unsqueeze(1), followed, (known - 1).unsqueeze(1)))
    return drafts, is_match.to(torch.int32).mul_(num_drafts)


@break_point
def propose_ngrams_by_row(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    *,
    window: int,
    min_n: int,
    max_n: int,
    num_drafts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `propose_ngrams` returns, row by row, of tensors in main memory."""
    table: NDArray[np.int32] = tokens.numpy()
    draft_ids = np.empty((len(rows), num_drafts), np.int32)
    num_proposed = np.zeros(len(rows), np.int32)
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        text = table[row, :length]
        if length > window:
            text = table[row, np.arange(length - window, length) % table.shape[1]]
        end = _end_of_match(text, min_n, max_n)
        if end is None:
            draft_ids[index] = text[-1]
        else:
            draft_ids[index] = np.resize(text[end:], num_drafts)  # repeats what is too short
            num_proposed[index] = num_drafts
    return torch.from_numpy(draft_ids), torch.from_numpy(num_proposed)


def _end_of_match(text: NDArray[np.int32], min_n: int, max_n: int) -> int | None:
    """Return where the longest match of a row's newest tokens ends, the newest of the longest; None without any."""
    known = len(text)
    ends = np.flatnonzero(text[:-1] == text[-1])  # positions of the last token of a match
    length = 1
    while len(ends) and length < min(max_n, known):
        before = ends if ends[0] >= length else ends[ends >= length]
        longer = before[text[before - length] == text[known - 1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return int(ends[-1]) + 1 if len(ends) and length >= min_n else None


def _texts(
    tokens: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, window: int, max_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows' newest tokens in order, [R, width], and how many of them count, [R] int64."""
    if max_length <= window:
        return tokens[:, :max_length].index_select(0, rows), lengths
    known = lengths.clamp(max=window)
    columns = ((lengths - known).unsqueeze(1) + torch.arange(window, device=rows.device)).remainder_(tokens.shape[1])
    return tokens.index_select(0, rows).gather(1, columns), known
