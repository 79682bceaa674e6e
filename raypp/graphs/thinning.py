"""Leaves out sizes where memory is short, evenly, so that a step still finds one that is not much larger."""

from __future__ import annotations

from collections.abc import Sequence


def bytes_each(taken: Sequence[int]) -> float:
    """Return what one more size takes, as far as those before it tell; 0: they do not.

    The mean of all but the first, which loads kernels. The largest counts as the second largest: the driver takes
    memory for graphs in chunks, of which one says nothing, and another process may have taken some meanwhile.

    Args:
        taken: What each size so far took, in bytes, in their order. Less than nothing where the count of those before
            it was corrected.
    """
    if len(taken) < 3:
        return 0.0
    *_, second, largest = sorted(taken[1:])
    return max(0.0, (sum(taken[1:]) - largest + second) / (len(taken) - 1))


def next_position(position: float, num_sizes: int, room_bytes: int, size_bytes: float) -> float:
    """Return how far the list of sizes is done after the next one, so that the room is used up at its end.

    Which size that is, `index_at` says. What it skips is left out; the last (smallest) never is, since steps of few
    rows would be padded most.

    Args:
        position: How far it is done.
        num_sizes: The list's length.
        room_bytes: What the sizes after `position` may take.
        size_bytes: What one takes; 0: not known.
    """
    count = int(room_bytes / size_bytes) if size_bytes else num_sizes
    if room_bytes < 0:
        count = 1
    return position + max(1.0, (num_sizes - position) / max(1, count))


def index_at(position: float) -> int:
    """Return the index of the size that ends at a position."""
    return int(position + 0.5) - 1
