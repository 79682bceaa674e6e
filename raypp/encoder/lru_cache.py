"""A cache with a limit in bytes (or whatever else sizes are counted in): the least recently used goes first.

What is pinned stays. An encoder keeps embeddings in one, by content hash; the scheduler plans with one which of them
the first stage holds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Values by key, in the order of their last use.

    Args:
        limit: The most that all values together may measure.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        """What the values measure."""
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._pins: Counter[Key] = Counter()
        self.pinned = 0
        """What the pinned values measure."""

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return a value, which thereby is used; None if it is not there."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def has_room(self, size: int) -> bool:
        """Return whether a value of that size could be put in: whether the unpinned ones make enough room."""
        return self.pinned + size <= self.limit

    def put(self, key: Key, value: Value, size: int) -> list[Key]:
        """Put a value in that is not there; return the keys of those that had to make room for it.

        A value that there is no room for is not kept: its own key is then the only one that is returned.
        """
        assert key not in self._values, "it is there already"
        if not self.has_room(size):
            return [key]
        evicted: list[Key] = []
        too_many = self.used + size - self.limit
        for other, (_, size_of_other) in self._values.items():
            if too_many <= 0:
                break
            if other not in self._pins:
                evicted.append(other)
                too_many -= size_of_other
        for other in evicted:
            self.remove(other)
        self._values[key] = (value, size)
        self.used += size
        return evicted

    def pin(self, key: Key) -> None:
        """Keep a value that is there until it is unpinned as often as it was pinned."""
        _, size = self._values[key]
        self._values.move_to_end(key)
        if not self._pins[key]:
            self.pinned += size
        self._pins[key] += 1

    def unpin(self, key: Key) -> None:
        """Undo one `pin`."""
        assert self._pins[key] > 0, "it is not pinned"
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            self.pinned -= self._values[key][1]

    def size_of(self, key: Key) -> int:
        """Return what a value that is there measures, without using it."""
        return self._values[key][1]

    def is_pinned(self, key: Key) -> bool:
        """Return whether a value has to stay."""
        return key in self._pins

    def remove(self, key: Key) -> None:
        """Take a value out. It must not be pinned."""
        assert key not in self._pins, "it is pinned"
        _, size = self._values.pop(key)
        self.used -= size

    def check_integrity(self) -> None:
        """Assert that everything was counted right, and that the limit was kept."""
        assert self.used == sum(size for _, size in self._values.values()) <= self.limit
        assert self.pinned == sum(self._values[key][1] for key in self._pins)
        assert all(count > 0 for count in self._pins.values())
