"""Which items are encoded together, and padded to what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypp.graphs.buckets import Buckets


@dataclass(frozen=True)
class PackedBatch:
    """Items that are encoded by one forward."""

    indices: tuple[int, ...]  # into the list of items, ascending
    num_tokens: int  # of these items together
    budget: int | None  # what they are padded to; None for an item that is larger than every budget


def pack_items(num_tokens: Sequence[int], budgets: Buckets, max_items: int) -> list[PackedBatch]:
    """Fill batches one after the other, each with as many items as go into the largest budget.

    Items keep their order, but for those too large for any budget: each of them is a batch of its own.

    Args:
        num_tokens: Of each item.
        budgets: What there are graphs for. A batch takes the smallest that holds it.
        max_items: The most items of a batch.
    """
    largest = budgets.sizes[-1]
    batches: list[PackedBatch] = []
    indices: list[int] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if indices:
            batches.append(PackedBatch(tuple(indices), filled, budgets.fit(filled)))
            indices.clear()
            filled = 0

    for index, size in enumerate(num_tokens):
        if size > largest:
            batches.append(PackedBatch((index,), size, None))
            continue
        if filled + size > largest or len(indices) == max_items:
            close()
        indices.append(index)
        filled += size
    close()
    return batches
