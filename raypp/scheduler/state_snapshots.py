"""Which rows' states are kept for prompts that begin alike, and the copies that the next plan orders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from raypp.messages import NO_BYTES, Bytes, StateCopies, pack_inside


class StateSnapshots:
    """Copies of rows' states, by the keys of the last blocks whose tokens they cover; see `raypp.ops.row_state`.

    A snapshot that is made when none is free takes the place of the least recently used one.

    Args:
        num_snapshots: There are so many.
    """

    def __init__(self, num_snapshots: int) -> None:
        self._snapshot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._blank = list(range(num_snapshots - 1, -1, -1))
        self._num_snapshots = num_snapshots
        self._begun_with: set[bytes] = set()
        self._saved: dict[int, int] = {}  # ordered since the last plan: snapshot -> row
        self._restored: dict[int, int] = {}  # likewise, row -> snapshot

    def __len__(self) -> int:
        return len(self._snapshot_of)

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """Return the most leading blocks behind which a snapshot stands."""
        return next((end for end in range(len(keys), 0, -1) if keys[end - 1] in self._snapshot_of), 0)

    def save(self, key: bytes, row: int, before: bytes | None = None) -> None:
        """Order a copy of a row's state as the last plan leaves it, unless there is one.

        Args:
            key: Of the last block whose tokens it covers.
            row: Whose it is.
            before: The key of an earlier one of the row: if nobody has begun with it, it makes room first.
        """
        if key not in self._snapshot_of:
            snapshot = self._blank.pop() if self._blank else self._make_room()
            self._snapshot_of[key] = snapshot
            self._saved[snapshot] = row
        self._snapshot_of.move_to_end(key)
        if before is not None and before in self._snapshot_of and before not in self._begun_with:
            self._snapshot_of.move_to_end(before, last=False)

    def restore(self, key: bytes, row: int) -> None:
        """Order a copy of a snapshot to a row that starts with the next plan."""
        self._restored[row] = self._snapshot_of[key]
        self._begun_with.add(key)
        self._snapshot_of.move_to_end(key)

    def take_copies(self) -> Bytes:
        """Return a packed `StateCopies` of what was ordered since the last call; nothing where nothing was."""
        if not self._saved and not self._restored:
            return NO_BYTES
        parts = (self._saved.values(), self._saved.keys(), self._restored.values(), self._restored.keys())
        copies = StateCopies(*(np.fromiter(part, np.int32) for part in parts))
        self._saved, self._restored = {}, {}
        return pack_inside(copies)

    def _make_room(self) -> int:
        key, snapshot = self._snapshot_of.popitem(last=False)
        self._begun_with.discard(key)
        return snapshot

    def check_integrity(self) -> None:
        """Assert that every snapshot is blank or has one key."""
        used = list(self._snapshot_of.values())
        assert self._begun_with <= set(self._snapshot_of)
        assert sorted([*used, *self._blank]) == list(range(self._num_snapshots)), "a snapshot leaked, or has two keys"
        assert {*self._saved, *self._restored.values()} <= set(used), "a snapshot of a copy was given away"
