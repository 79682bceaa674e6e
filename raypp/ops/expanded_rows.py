"""How prompts' latents are expanded to keys and values on a GPU: rows in groups, some heads at a time.

The plan asks for the bytes, so this imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

EXPANDED_BYTES = 128 << 20
"""Latents, keys and values that are there at a time; more only for one row that is longer than one head allows."""
MOST_GROUPS = 4
"""Groups of a step that FlashInfer plans; rows of later groups are attended by torch."""


class LatentSizes(NamedTuple):
    """Bytes of a token."""

    latent: int  # and of the rotated part of its key
    head: int  # of one head's key and value

    def of_token(self, num_heads: int) -> int:
        """Return the bytes of a token's latent and its keys and values of so many heads."""
        return self.latent + num_heads * self.head

    def planned(self, longest: int) -> int:
        """Return the most bytes that are there at a time, where no row has more than `longest` tokens."""
        return max(EXPANDED_BYTES, longest * self.of_token(1))


class RowGroups(NamedTuple):
    """Prefill rows that are expanded together, for `num_heads` heads at a time, a divisor of all."""

    num_heads: int
    rows: list[slice]


def group_rows(seq_lens: Sequence[int], sizes: LatentSizes, num_heads: int) -> RowGroups:
    """Return the groups with the fewest passes over heads and, of those, the fewest groups.

    Args:
        seq_lens: Tokens of each row.
        sizes: Of a token.
        num_heads: Of a layer.
    """
    found, longest = list[RowGroups](), max(seq_lens)
    for count in range(num_heads, 0, -1):
        most = EXPANDED_BYTES // sizes.of_token(count)
        if num_heads % count == 0 and (count == 1 or longest <= most):
            rows = _runs(seq_lens, most)
            if count == 1 or len(rows) <= MOST_GROUPS:
                found.append(RowGroups(count, rows))
    return min(found, key=lambda groups: (len(groups.rows) * (num_heads // groups.num_heads), len(groups.rows)))


def _runs(seq_lens: Sequence[int], most: int) -> list[slice]:
    """Return runs of rows with at most so many tokens together; a longer row is alone."""
    runs, begin, num_tokens = list[slice](), 0, 0
    for row, length in enumerate(seq_lens):
        if row > begin and num_tokens + length > most:
            runs.append(slice(begin, row))
            begin, num_tokens = row, 0
        num_tokens += length
    return [*runs, slice(begin, len(seq_lens))]
