"""Chooses which items are encoded together, and the size that they are padded to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PackedBatch:
    """Items that are encoded by one forward."""

    indices: tuple[int, ...]  # into the list of items, ascending
    num_tokens: int  # of these items together
    budget: int | None  # what they are padded to; None when they are encoded eagerly


def pack_items(
    num_tokens: Sequence[int], largest: int, max_items: int, budget_of: Callable[[Sequence[int]], int | None]
) -> list[PackedBatch]:
    """Fill batches one after the other, each with as many items as go into the largest budget.

    Items keep their order, but for those too large for any budget: each of them is a batch of its own.

    Args:
        num_tokens: Of each item.
        largest: The largest budget.
        max_items: The most items of a batch.
        budget_of: Returns what a batch of items of so many tokens each is padded to: the smallest budget that holds
            them; None when they had better be encoded eagerly.
    """
    batches: list[PackedBatch] = []
    indices: list[int] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if indices:
            batches.append(PackedBatch(tuple(indices), filled, budget_of([num_tokens[index] for index in indices])))
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
