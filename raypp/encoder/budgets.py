"""The sizes that encoder batches are captured for: token budgets, close enough together that padding stays small."""

from __future__ import annotations

from collections.abc import Callable

from raypp.encoder.protocol import BudgetRange
from raypp.errors import ResourceError
from raypp.graphs.buckets import Buckets

MAX_PADDING_SHARE = 0.1
"""Of a batch; powers of two, which waste up to half of it, would need a sixth of the graphs."""

_GRAIN = 32
"""Tokens. Products are computed in tiles of a hundred rows and more: a budget in between would pay for whole tiles."""


def token_ladder(budgets: BudgetRange, max_padding_share: float = MAX_PADDING_SHARE) -> Buckets:
    """Return budgets from the smallest item up, such that no batch has more padding than that share.

    An exception is a batch of less than `budgets.min_tokens`, which no item makes. Budgets that are far enough apart
    are multiples of 32.
    """
    sizes = [min(budgets.min_tokens, budgets.max_tokens)]
    while sizes[-1] < budgets.max_tokens:
        smallest_too_large = sizes[-1] + 1
        size = int(smallest_too_large / (1 - max_padding_share))
        if size - size % _GRAIN > sizes[-1] + _GRAIN // 2:
            size -= size % _GRAIN
        sizes.append(min(size, budgets.max_tokens))
    return Buckets(set(sizes))


def largest_fitting(budgets: BudgetRange, measure: Callable[[int], int], limit_bytes: int) -> BudgetRange:
    """Return the part of a range of budgets whose batches fit a memory.

    Args:
        budgets: What the model deems worth a graph.
        measure: Returns the bytes that a batch of so many tokens takes. Asked for large ones first, so that what it
            allocates can be used again.
        limit_bytes: The memory.

    Raises:
        ResourceError: not even the smallest item fits.
    """
    num_tokens = budgets.max_tokens
    while (needed := measure(num_tokens)) > limit_bytes:
        if num_tokens == budgets.min_tokens:
            raise ResourceError(
                "an encoder's memory is too small for the smallest image",
                got=f"{limit_bytes / 2**30:.2f} GiB",
                expected=f"{needed / 2**30:.2f} GiB for {num_tokens} tokens, besides the weights",
                hint="raise encoder_num_gpus or gpu_memory_utilization, or lower encoder_cache_bytes",
            )
        # Memory grows with the tokens; the next guess is a little below what that says.
        fitting = int(num_tokens * limit_bytes / needed * 0.95)
        num_tokens = max(min(fitting, num_tokens - 1), budgets.min_tokens)
    return BudgetRange(budgets.min_tokens, num_tokens)
