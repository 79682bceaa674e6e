"""The sizes that graphs are captured for."""

from __future__ import annotations

from bisect import bisect_left

_FINE_UP_TO = 256


class Buckets:
    """Ascending sizes; a count takes the smallest that holds it.

    Args:
        sizes: The sizes, in any order.
    """

    def __init__(self, sizes: set[int]) -> None:
        assert sizes
        assert min(sizes) >= 1
        self.sizes = tuple(sorted(sizes))

    def fit(self, count: int) -> int | None:
        """Return the smallest size that holds `count`, None when none does."""
        index = bisect_left(self.sizes, count)
        return self.sizes[index] if index < len(self.sizes) else None


def row_buckets(max_rows: int) -> Buckets:
    """Return sizes for up to `max_rows` rows: powers of two to 8, then steps of 8, from 256 on steps of 32.

    A step of 8 rows costs less than a percent of a decode step's time each, so padding stays cheap at any number.
    """
    sizes = {1, 2, 4, *range(8, min(max_rows, _FINE_UP_TO) + 1, 8), *range(_FINE_UP_TO, max_rows + 1, 32), max_rows}
    return Buckets({size for size in sizes if size <= max_rows})


def few_row_buckets(max_rows: int) -> Buckets:
    """Return fewer sizes for up to `max_rows` rows, at most half as large again as the next smaller from 16 on."""
    sizes = {1, 2, 4, 8, max_rows}
    for power in range(4, max_rows.bit_length()):
        sizes |= {1 << power, 3 << power - 1}
    return Buckets({size for size in sizes if size <= max_rows})


def token_buckets(max_tokens: int) -> Buckets:
    """Return sizes for steps of up to `max_tokens` tokens: finer where a token's time counts less than a launch's.

    From 256 tokens on padding is at most 64 tokens, from 640 on 128: libraries multiply tiles of 128 or 256 rows. From
    2,048 on it is at most an eighth.
    """
    sizes = {16, 32, 64, 96, 128, 192, *range(256, 640, 64), *range(640, 2048, 128), max_tokens}
    sizes |= {*range(2048, 4096, 256), *range(4096, max_tokens + 1, 512)}
    return Buckets({size for size in sizes if size <= max_tokens})
